"""What all configs share: frozen, unknown keys refused with the nearest name, errors in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from verl_adaptor.errors import ConfigError, UnknownKey, nearest


class Config(BaseModel):
    """Base of all configs: frozen, unknown keys refused (C09), errors in our own words."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems, unknown = _problems(error, type(self))
            raise (UnknownKey if unknown else ConfigError)("\n".join(problems)) from None

    def replace(self, **changes: Any) -> Any:
        """A checked copy with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def _problems(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], bool]:
    """One sentence a problem, and whether an unknown key is among them."""
    sentences: list[str] = []
    unknown = False
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        cause = problem.get("ctx", {}).get("error")
        if problem["type"] == "extra_forbidden":
            unknown = True
            sentences.append(f"{path}: unknown key; {nearest(path, model.model_fields)}.")
        elif isinstance(cause, ConfigError):  # a nested config has already put it into words
            unknown |= isinstance(cause, UnknownKey)
            sentences += [_under(path, line) for line in str(cause).splitlines()]
        elif cause is not None:
            sentences.append(_under(path, str(cause)))
        else:
            sentences.append(f"{path}={problem['input']!r} is not allowed: {problem['msg']}.")
    return sentences, unknown


def _under(path: str, sentence: str) -> str:
    """The sentence with the path of its section before it: ``ppo`` + ``epochs=0 is ...`` -> ``ppo.epochs=0 is ...``."""
    if not path:
        return sentence
    return f"{path}.{sentence}" if re.match(r"[\w.]+[=:]", sentence) else f"{path}: {sentence}"


def _module_colon_name(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError(f"{value!r} names no Python object; write 'package.module:name'.")
    return value


ObjectPath = Annotated[str, AfterValidator(_module_colon_name)]
"""A Python object by ``package.module:name``."""

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LONGEST_PAUSE_S = 60.0
"""Longest pause before a request to a service is repeated, in seconds, whatever backoff or service ask for."""


def _http_url(value: str) -> str:
    try:
        url = urlsplit(value)
        fits = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port that is none, a bracket that stays open
        fits = False
    if not fits:
        raise ValueError(f"{value!r} is no address of a service; write 'http://host:port/path', or https.")
    if url.username is not None or url.password is not None:
        raise ValueError("it holds a user or password, which would end in config.yaml and in logs; leave them out.")
    return value


HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""``http://host:port/path``, or https; no user or password in it."""
Retries = Annotated[int, Field(ge=0, le=100)]
BackoffSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


def flatten_fields(model: type[Config], nested: Mapping[str, type[Config]]) -> dict[str, str | None]:
    """Keyword -> name of the nested config it belongs to (None: the model itself). For flat keyword arguments."""
    flat: dict[str, str | None] = {name: None for name in model.model_fields if name not in nested}
    for name, inner in nested.items():
        flat.update(dict.fromkeys(inner.model_fields, name))
    return flat


def refuse_idle(config: Config, readers: Mapping[str, tuple[str, bool]]) -> None:
    """Raise for settings that somebody changed and nobody reads: name -> (who would, whether that is set)."""
    idle = [
        f"{name}={getattr(config, name)!r} is for {reader}, which is not set; delete it."
        for name, (reader, is_set) in readers.items()
        if not is_set and getattr(config, name) != type(config).model_fields[name].default
    ]
    if idle:
        raise ConfigError("\n".join(idle))
