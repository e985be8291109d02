"""``verl-adaptor new-plugin NAME``: a working backend of its own package, to put a framework into."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from verl_adaptor.errors import ConfigError
from verl_adaptor.registry import registry

TEMPLATE = Path(__file__).parent / "plugin_template"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def new_plugin(name: str, output: Path | None) -> Path:
    """Write the package into `output`, by default ``verl-adaptor-NAME`` here; returns its folder.

    Raises:
        ConfigError: the name is none for a distribution, a backend has it already, or the folder exists.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name for a backend; use small letters, digits and single hyphens: 'my-engine'."
        )
    taken = {its: entry.source for entry in registry().entries for its in entry.spec.names}
    if name in taken:
        raise ConfigError(f"there is a backend named {name!r} already, from {taken[name]}; choose another name.")
    folder = output or Path(f"verl-adaptor-{name}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; give another --output, or delete it.")
    for file in sorted(file for file in TEMPLATE.rglob("*") if file.is_file() and "__pycache__" not in file.parts):
        place = folder / _renamed(file.relative_to(TEMPLATE).as_posix(), name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_renamed(file.read_text(encoding="utf-8"), name), encoding="utf-8")
    typer.echo(f"{folder}: a working backend {name!r}. Next:")
    typer.echo(f"  pip install -e '{folder}[test]'\n  verl-adaptor check {name}")
    return folder


def _renamed(text: str, name: str) -> str:
    module, camel = name.replace("-", "_"), "".join(part.title() for part in name.split("-"))
    text = text.replace("verl_adaptor_template", f"verl_adaptor_{module}")
    text = re.sub(r"\b(Test)?Template(?=Engine\b|\b)", rf"\g<1>{camel}", text)
    return re.sub(r"\btemplate\b", name, text)
