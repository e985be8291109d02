"""Reading and writing a run's files: strict JSON, exact floats, and never a half-written file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from verl_adaptor.errors import ConfigError

TIMINGS = ("time/", "tokens_per_second")


def is_timing(key: str) -> bool:
    """True for metrics that measure the clock: all others repeat when a run with one seed is repeated."""
    return key.startswith(TIMINGS)


def plain(value: Any) -> Any:
    """The value in built-ins that strict JSON can hold.

    JSON has no NaN and no infinity, and half its readers stop at them: they become the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, which `float` and `read_rows` understand.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return _number(float(value))
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON; floats as the shortest text that reads back to the same bits."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the file and rename, so that a reader sees the old content or the new, never a part."""
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); delete it or restore it.") from error


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(step, line) of each complete line of a metrics file; empty where there is no file.

    A last line that is torn (the machine stopped while it was written) is left out.
    """
    raw = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    lines = []
    for number, line in enumerate(raw, start=1):
        try:
            lines.append((int(json.loads(line)["step"]), line))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(raw):
                raise ConfigError(
                    f"{path}, line {number} is not a JSON object with a 'step': {line[:80]!r}; delete that line."
                ) from error
            break
        if not line.endswith(b"\n"):
            lines.pop()
    return lines


def read_rows(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics file in order: ``step`` and the metrics. A torn last line is left out.

    Raises `ConfigError` naming the line where any other one cannot be read.
    """
    return [
        {key: float(value) if isinstance(value, str) else value for key, value in json.loads(line).items()}
        for _, line in read_lines(path)
    ]
