"""``verl-adaptor check BACKEND``: every law that a backend's declaration asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from verl_adaptor.cli.recipes import apply_override
from verl_adaptor.errors import BackendNotInstalled, UnknownKey

if TYPE_CHECKING:
    from verl_adaptor.testing.check import Outcome

_SECTIONS = {"engine": "engine_settings", "trainer": "trainer_settings"}
_LISTS = ("roles", "laws")
_KEYS = ("family", "model", *_LISTS, *_SECTIONS)


def check(
    backend: str, overrides: Sequence[str], *, junit: Path | None, timeout_s: float | None, as_json: bool
) -> bool:
    """Check a backend; True if no law is broken.

    Raises:
        UnknownBackend: there is no such backend.
        UnknownKey: a setting is none of family, model, roles, laws, engine.KEY and trainer.KEY.
        BackendNotInstalled: pytest is missing.
    """
    if find_spec("pytest") is None or find_spec("pytest_timeout") is None:
        raise BackendNotInstalled("the laws run on pytest; install it with: pip install 'verl-adaptor[testing]'")
    from verl_adaptor.testing.check import RESULTS, TIMEOUT_S, check_backend, summary

    def tell(outcome: Outcome) -> None:
        if not as_json:
            typer.echo(_line(outcome))

    outcomes = check_backend(
        backend,
        junit=None if junit is None else junit.absolute(),
        told=tell,
        timeout_s=timeout_s or TIMEOUT_S,
        **_settings(overrides),
    )
    found = {"backend": backend, "settings": list(overrides), **summary(outcomes)}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        typer.echo(", ".join(f"{count} {result}" for result, count in found["counts"].items() if count))
        for result in ("skipped", "not run"):
            if found["counts"][result]:
                typer.echo(f"  {result}: {RESULTS[result]}")
    return bool(outcomes) and all(outcome.result != "failed" for outcome in outcomes)


def _line(outcome: Outcome) -> str:
    first, *rest = outcome.detail.splitlines() or [""]
    line = f"{outcome.result:8} {outcome.law:3} {outcome.name}" + (f": {first}" if first else "")
    return "\n".join([line, *(f"{'':13}{more}" for more in rest)])


def _settings(overrides: Sequence[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for override in overrides:
        apply_override(tree, override)
    unknown = sorted(tree.keys() - set(_KEYS))
    if unknown:
        raise UnknownKey(
            f"unknown: {', '.join(unknown)}; allowed: {', '.join(_KEYS)} (engine.KEY=VALUE, trainer.KEY=VALUE)."
        )
    for name in _LISTS:
        if isinstance(tree.get(name), str):
            tree[name] = [tree[name]]
    return {_SECTIONS.get(key, key): value for key, value in tree.items()}
