"""Python objects by name: what ``package.module:name`` in a recipe means, and whether its arguments fit."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verl_adaptor.errors import ConfigError, UnknownKey, nearest


def load_object(path: str, *, key: str) -> Any:
    """The object that ``package.module:name`` names; the name may have dots.

    Args:
        path: for example ``my_rewards:length_penalty``.
        key: the setting it was given in, for the error.

    Raises:
        ConfigError: no such module or name. An exception of the module itself is passed on as the cause.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key}: {path!r} names no Python object; write 'package.module:name'.")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key}: there is no module {error.name!r}; install it, or put its folder on PYTHONPATH."
            ) from error
        raise ConfigError(f"{key}: importing {module_name} failed with {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = [known for known in vars(found) if not known.startswith("_")]
            raise ConfigError(f"{key}: {path!r} does not exist: no {part!r} there; {nearest(part, public)}.")
        found = getattr(found, part)
    return found


def load_callable(path: str, *, key: str) -> Callable[..., Any]:
    """`load_object`, which must be callable."""
    found: Callable[..., Any] = load_object(path, key=key)
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is a {type(found).__name__}, not a function.")
    return found


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any], *, key: str, positional: int = 0) -> None:
    """Raise unless `function` can be called with `positional` arguments and these keywords.

    Raises:
        UnknownKey: it has no such parameter; the nearest ones are named.
        ConfigError: a parameter without a default is missing, or it takes another number of positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a few built-ins tell no signature; the call itself will
        return
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][positional:]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in args:
            if name not in named:
                raise UnknownKey(f"{key}.{name}: unknown argument; {nearest(name, named)}.")
    try:
        signature.bind(*[None] * positional, **args)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}; its signature is {signature}.") from error


def departures(found: type, base: type) -> list[str]:
    """Where a subclass cannot be called as its base class is, or leaves something out: a sentence each.

    Public methods may be called by position or by name; those with an underscore, and the constructor, by position.

    >>> class Base:
    ...     def score(self, token_ids, temperature=1.0): ...
    >>> class Mine(Base):
    ...     def score(self, token_ids, top_p): ...
    >>> departures(Mine, Base)
    ["score() is no score(self, token_ids, temperature=1.0): missing a required argument: 'top_p'"]
    """
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    problems = [f"{name}() is not written" for name in missing]
    for name, meant in inspect.getmembers(base, inspect.isfunction):
        own = getattr(found, name)
        if name in missing or own is meant:
            continue
        if not callable(own):
            problems.append(f"{name} is no method")
            continue
        wanted = inspect.signature(meant)
        why = _unlike(wanted, own, by_name=not name.startswith("_"))
        if inspect.iscoroutinefunction(meant) and not inspect.iscoroutinefunction(inspect.unwrap(own)):
            why = why or "it is not async"
        if why:
            problems.append(f"{name}() is no {name}{wanted}: {why}")
    return problems


def _unlike(wanted: inspect.Signature, own: Callable[..., Any], *, by_name: bool) -> str:
    """Why a call that fits the signature does not fit the function; empty if all do, or the function does not tell."""
    try:
        have = inspect.signature(own)
    except (TypeError, ValueError):  # of an extension module
        return ""
    listed = [p for p in wanted.parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    needed = [p for p in listed if p.default is p.empty]
    named = {p.name: None for p in wanted.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    calls: list[tuple[int, Mapping[str, None]]] = [(len(needed), {}), (len(listed), named)]
    if by_name:
        calls.append((1, {**{p.name: None for p in listed[1:]}, **named}))
    for count, keywords in calls:
        try:
            have.bind(*[None] * count, **keywords)
        except TypeError as error:
            return str(error)
    return ""
