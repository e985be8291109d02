"""Recipes: YAML plus dotted overrides, checked into a `Recipe`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from verl_adaptor.config import Recipe
from verl_adaptor.errors import ConfigError, nearest

EMBEDDED = Path(__file__).resolve().parent.parent / "recipes"
"""Recipes that come with the package, found by their bare name."""
PATIENCE = tuple(f"reward.{name}" for name in ("batch_size", "concurrency", "retries", "backoff_s", "timeout_s"))
PATIENCE += tuple(f"data.{name}" for name in ("limit", "retries", "backoff_s", "timeout_s", "follow_timeout_s"))
MAY_CHANGE = ("tracking", "checkpoint", "evaluation.every", *PATIENCE)
"""What may differ between a run and its resumption: the numbers of the steps do not depend on it."""
MAY_MOVE = ("reward.url", "data.url")
"""Addresses of what may be elsewhere when a run is resumed; there must have been one, and be one."""


def load_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """Read a recipe and apply ``key=value`` overrides.

    Args:
        path: a YAML file, or the name of an embedded recipe (``digits``).
        overrides: ``ppo.epochs=2``; ``+key=value`` and ``++key=value`` mean the same; ``~key`` takes a key out. Values are
            YAML, so ``null``, ``[a, b]`` and ``1e-4`` work as Hydra and verl users type them.

    Raises:
        ConfigError: the file, an override or a value is wrong; all wrong values at once.
    """
    tree = _read(_find(path))
    for override in overrides:
        apply_override(tree, override)
    return Recipe(**tree)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set or delete one dotted key, in place."""
    key, equals, text = override.lstrip("+~").partition("=")
    delete = override.startswith("~")
    if not key or (not equals and not delete):
        raise ConfigError(f"override {override!r} is not allowed; write key=value, like ppo.epochs=2, or ~key.")
    *parents, last = key.split(".")
    branch = tree
    for depth, parent in enumerate(parents, 1):
        child = branch.setdefault(parent, {})
        if child is None:
            child = branch[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[:depth])} is {child!r}, which has no keys.")
        branch = child
    if delete:
        if last not in branch:
            raise ConfigError(f"override {override!r}: the recipe has no {key}; {nearest(last, branch)}.")
        del branch[last]
        return
    try:
        branch[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is no YAML ({error}).") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, those in `MAY_CHANGE` and what has moved left out; a sentence each."""
    before, after = dict(_flat(old)), dict(_flat(new))

    def allowed(key: str) -> bool:
        moved = key in MAY_MOVE and None not in (before.get(key), after.get(key))
        return moved or any(key == k or key.startswith(f"{k}.") for k in MAY_CHANGE)

    return [
        f"{key}: {before.get(key)!r} then, {after.get(key)!r} now"
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key) and not allowed(key)
    ]


def _find(path: Path) -> Path:
    embedded = EMBEDDED / path.with_suffix(".yaml").name
    if path.is_file():
        return path
    if path.parent in (Path(), Path("recipes")) and embedded.is_file():
        return embedded
    known = sorted(p.stem for p in EMBEDDED.glob("*.yaml"))
    raise ConfigError(f"{path}: no such recipe file; embedded recipes: {nearest(path.stem, known)}.")


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} holds {type(tree).__name__}; a recipe is a mapping of sections (model, data, ppo, ...)."
        )
    return tree


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
