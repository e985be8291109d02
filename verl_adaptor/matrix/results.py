"""What was found, one JSON a cell: ``results/ENVIRONMENT/CELL.json``; and what two lots of them differ in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_adaptor.errors import ConfigError
from verl_adaptor.matrix.cells import Cell

Result = Mapping[str, Any]
GOOD, UNTOLD = "works", ("not run", "not installed")
"""``observed``: what works, and what says nothing about the backend."""


def result_file(folder: Path, cell: Cell) -> Path:
    """Where a cell's result is kept."""
    return folder / cell.environment / f"{cell.name}.json"


def read_results(folder: Path) -> dict[tuple[str, str], Result]:
    """(environment, cell) -> what was found.

    Raises:
        ConfigError: a file is no result.
    """
    found: dict[tuple[str, str], Result] = {}
    for file in sorted(folder.glob("*/*.json")):
        try:
            found[file.parent.name, file.stem] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} cannot be read ({error}); delete it and measure that cell again.") from error
    return found


@dataclass(frozen=True)
class Difference:
    """Something that should not be."""

    environment: str
    cell: str
    sentence: str


def differences(
    now: Mapping[tuple[str, str], Result], before: Mapping[tuple[str, str], Result]
) -> Iterator[Difference]:
    """Cells that worked before and do not now, and those whose declaration is not what was observed."""
    for key, result in now.items():
        declared, observed = result.get("declared", ""), result["observed"]
        was = before.get(key, {}).get("observed")
        if was == GOOD and observed not in (GOOD, *UNTOLD):
            yield Difference(*key, f"worked before and is {observed} now: {result['why']}")
        elif observed not in UNTOLD and declared == GOOD != observed:
            yield Difference(*key, f"is declared to work and is {observed}: {result['why']}")
        elif observed == GOOD != declared:
            yield Difference(*key, f"works and is declared refused: {result['declared_why']}")


def missing(cells: Sequence[Cell], found: Mapping[tuple[str, str], Result]) -> list[Cell]:
    """Cells without a result."""
    return [cell for cell in cells if (cell.environment, cell.name) not in found]
