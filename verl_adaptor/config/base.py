"""What all configs share: frozen, unknown keys refused with the nearest name, errors in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from verl_adaptor.errors import ConfigError, UnknownKey, nearest


class Config(BaseModel):
    """Base of all configs: frozen, unknown keys refused, errors in our own words."""

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
