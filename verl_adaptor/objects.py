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

    >>> class Base:
    ...     def score(self, token_ids, temperature=1.0): ...
    >>> class Mine(Base):
    ...     def score(self, token_ids, top_p): ...
    >>> departures(Mine, Base)
    ["score() takes no 'temperature' and needs 'top_p', unlike score(self, token_ids, temperature=1.0)"]
    """
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    problems = [f"{name}() is not written" for name in missing]
    for name, meant in inspect.getmembers(base, inspect.isfunction):
        own = inspect.getattr_static(found, name)
        if name in missing or own is meant:
            continue
        if not inspect.isfunction(own):
            problems.append(f"{name} is no method")
            continue
        wanted, have = inspect.signature(meant), inspect.signature(own)
        wrong = _unlike(wanted, have)
        if inspect.iscoroutinefunction(meant) and not inspect.iscoroutinefunction(own):
            wrong.append("is not async")
        if wrong:
            problems.append(f"{name}() {' and '.join(wrong)}, unlike {name}{wanted}")
    return problems


def _unlike(wanted: inspect.Signature, have: inspect.Signature) -> list[str]:
    """What a call that fits the first would meet in the second."""
    kinds = {parameter.kind for parameter in have.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    any_order = inspect.Parameter.VAR_POSITIONAL in kinds
    wrong = []
    for name, parameter in wanted.parameters.items():
        by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if name not in have.parameters and not (takes_all and (by_name or any_order)) and not _is_rest(parameter):
            wrong.append(f"takes no {name!r}")
    for name, parameter in have.parameters.items():
        if name not in wanted.parameters and parameter.default is parameter.empty and not _is_rest(parameter):
            wrong.append(f"needs {name!r}")
    return wrong


def _is_rest(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
