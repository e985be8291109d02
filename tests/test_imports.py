"""Who may import whom, and what stays unloaded. The rooms are those of docs/architecture.md."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verl_adaptor

PACKAGE = Path(verl_adaptor.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "tensordict", "vllm", "megatron", "deepspeed", "ray")

BASE = {"errors", "samples", "config", "capabilities"}
DOMAIN = BASE | {"batch", "protocols"}
GIVEN = DOMAIN - {"capabilities"} | {"objects"}  # for rooms that are given their engine and trainer
MAY_IMPORT = {
    "": {"capabilities", "errors", "factory", "hookspecs", "protocols", "registry", "samples"},
    "errors": set(),
    "findings": set(),
    "samples": {"errors"},
    "batch": {"errors", "samples", "protocols"},  # protocols: the Denominators of a loss
    "capabilities": {"errors", "findings"},
    "config": {"errors"},
    "protocols": DOMAIN | {"weights", "threads"},  # batch at call time only, so that the contracts load without torch
    "hookspecs": DOMAIN,
    "registry": {"errors", "capabilities", "hookspecs"},
    "preflight": {"errors", "config", "capabilities", "findings"},
    "objects": {"errors"},
    "threads": set(),
    "service": {"errors", "config"},
    "tokenizer": {"errors"},
    "tasks": GIVEN,
    "data": GIVEN | {"tasks", "service"},
    "weights": {"errors"},
    "memory": GIVEN,
    "tracking": GIVEN,
    "execution": GIVEN
    | {
        "capabilities",
        "weights",
        "heap",
        "tokenizer",
    },  # what is elsewhere shows its spec here; its weights and texts pass
    "ppo": GIVEN | {"weights", "data", "tasks", "tracking", "service", "threads"},
    "backends": DOMAIN | {"preflight", "findings", "hookspecs", "weights", "memory", "tokenizer"},
    "factory": BASE | {"protocols", "registry", "preflight", "execution", "objects"},
    "testing": None,  # None: everything but the command line
    "matrix": None,
    "cli": None,
}
"""Room -> the other rooms it may import. A room is a module or folder of the package; its own files see each other."""


def imports(file: Path) -> set[str]:
    """Every module that a file imports, at any depth; ``from verl_adaptor.a import b`` counts as verl_adaptor.a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}: write absolute imports"
    return found


def room(path: Path) -> str:
    """``verl_adaptor/ppo/loss.py`` -> ``ppo``; the package's own ``__init__`` is the empty room."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def rooms_seen(file: Path) -> set[str]:
    """The rooms of this package that a file imports."""
    ours = [name.split(".")[1] for name in imports(file) if name.startswith("verl_adaptor.")]
    return {name if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists() else "" for name in ours}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_run_one_way(file: Path) -> None:
    here = room(file)
    assert here in MAY_IMPORT, f"a new room: say in MAY_IMPORT what {here!r} may import"
    allowed = MAY_IMPORT[here]
    seen = rooms_seen(file) - {here}
    if allowed is None:
        allowed = MAY_IMPORT.keys() - ({"cli"} if here != "matrix" else set())
    assert seen <= allowed, f"{here} must not import {sorted(seen - allowed)}"


@pytest.mark.parametrize("file", [f for f in FILES if room(f) == "backends"], ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_backend_sees_no_other_backend(file: Path) -> None:
    inits = (PACKAGE / "backends").glob("*/__init__.py")
    folders = {init.parent.name for init in inits if "def verl_adaptor_backends" in init.read_text()}
    mine = file.relative_to(PACKAGE / "backends").parts[0]
    seen = {name.split(".")[2] for name in imports(file) if name.startswith("verl_adaptor.backends.")}
    assert not (seen & folders) - {mine}


def test_only_the_registry_knows_entry_points_and_only_it_and_the_hook_know_pluggy() -> None:
    users = {f.relative_to(PACKAGE).as_posix() for f in FILES if {n.split(".")[0] for n in imports(f)} & {"pluggy"}}
    assert users == {"hookspecs.py", "registry.py"}
    assert [f.name for f in FILES if re.search(r"\bentry_points\(", f.read_text())] == ["registry.py"]


def test_nobody_asks_for_a_backend_by_name() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                asks = any(re.search(r"\b(backend(_name)?|spec\.name)$", side) for side in sides)
                literal = any(re.match(r"[\[({]?['\"]", side) for side in sides)
                assert not (asks and literal), f"{file}:{node.lineno}: ask for a capability, not for a name"


@pytest.mark.parametrize(
    "code",
    [
        "import verl_adaptor",
        "from verl_adaptor import create_inference_engine, BackendSpec, SamplingParams, TrainerBackend, hookimpl",
        "from verl_adaptor.cli import main\ntry: main(['backends'])\nexcept SystemExit as e: assert e.code == 0",
        "from verl_adaptor.cli import main\ntry: main(['doctor', '--json'])\nexcept SystemExit: pass",
        "from verl_adaptor import resolve_trainer; resolve_trainer(None, 'hf', packing=True)",
    ],
    ids=["import", "names", "backends", "doctor", "resolve"],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    code += (
        f"\nimport sys; loaded = set(sys.modules) & set({HEAVY!r}); sys.exit(f'loaded: {{loaded}}' if loaded else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    assert {name for name in verl_adaptor.__all__ if not hasattr(verl_adaptor, name)} == set()
    assert set(dir(verl_adaptor)) == set(verl_adaptor.__all__)
    source = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {a.name for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for a in node.names}
    assert set(verl_adaptor.__all__) - {"__version__"} <= typed  # what a type checker sees is what there is
    with pytest.raises(AttributeError, match="no attribute 'create_engine'"):
        verl_adaptor.create_engine  # noqa: B018
