"""docs/cases.md: every reported case, what guards against it here, and what tests it.

    python docs/cases.py

Guards and tests are found by the case's number in their source: a rule that names it, a function that mentions it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/cases.md"
NUMBER = re.compile(r"(?<![A-Za-z0-9])[Cc](\d\d)(?![A-Za-z0-9])")
HOSTS = {
    "trl": "huggingface/trl",
    "verl": "volcengine/verl",
    "vllm": "vllm-project/vllm",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "SkyRL": "NovaSky-AI/SkyRL",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "AReaL": "inclusionAI/AReaL",
    "slime": "THUDM/slime",
    "miles": "radixark/miles",
    "open-instruct": "allenai/open-instruct",
}
"""Short name -> repository of the report."""


def mentions(file: Path) -> Iterator[tuple[str, str]]:
    """(case, name) for each function, class or module of a file that mentions one; the innermost counts."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    spans = [
        (node.lineno - len(node.decorator_list), node.end_lineno or node.lineno, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    for number, line in enumerate(lines, 1):
        for found in NUMBER.findall(line):
            inside = [span for span in spans if span[0] <= number <= span[1]]
            yield f"C{found}", min(inside, key=lambda span: span[1] - span[0])[2] if inside else ""


def found() -> dict[str, tuple[list[str], list[str]]]:
    """Case -> its guards in the package, and its tests: laws too."""
    cases: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    files = sorted([*(ROOT / "verl_adaptor").rglob("*.py"), *(ROOT / "tests").glob("test_*.py")])
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        is_test = path.startswith(("tests/", "verl_adaptor/testing/"))
        for case, name in mentions(file):
            where = f"`{path.removeprefix('verl_adaptor/')}" + (f"::{name}`" if name else "`")
            cases.setdefault(case, ({}, {}))[is_test].setdefault(where)
    return {case: (list(guards), list(tests)) for case, (guards, tests) in cases.items()}


def page() -> str:
    """The page's text."""
    cases = tomllib.loads((ROOT / "docs/cases.toml").read_text(encoding="utf-8"))
    where = found()
    parts = [
        "# Reported cases",
        "What people who post-train with other stacks have reported, and how it ends here: *refused* before anything loads,\n"
        "*noticed* while it runs, or *impossible* by how things are made. Made by `python docs/cases.py`; do not edit.",
        "| case | answer | what happened |\n|---|---|---|\n"
        + "\n".join(f"| [{n}](#{n.lower()}) | {c['answer']} | {c['happened']} |" for n, c in cases.items()),
    ]
    for number, case in cases.items():
        guards, tests = where.get(number, ([], []))
        links = ", ".join(
            f"[{report}](https://github.com/{HOSTS[report.split('#')[0]]}/issues/{report.split('#')[1]})"
            for report in case["reports"]
        )
        facts = [f"{case['happened']}" + (f" ({links})" if links else "")]
        facts += [f"*{case['answer']}*: {case['how']}"]
        facts += [f"- guards: {', '.join(guards) or '(none)'}\n- tests: {', '.join(tests) or '(none)'}"]
        parts.append("\n\n".join([f"## {number}", *facts]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
