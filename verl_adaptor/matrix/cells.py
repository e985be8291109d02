"""What is to be measured: ``compat_matrix/cells.toml``, its groups spread out into cells."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from verl_adaptor.config.base import Config
from verl_adaptor.errors import ConfigError, VerlAdaptorError

Kind = Literal["inference", "training", "pair"]


class Cell(Config):
    """One thing that works or does not."""

    environment: str
    """Whose versions: the name of a file in ``envs/``."""
    kind: Kind
    backend: str
    """A registered name; of a pair, TRAINER + ENGINE as `testing.pairs` names them."""
    layout: str
    family: str
    precision: str
    settings: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    """What differs from the family's tiny model."""
    laws: tuple[str, ...] = ()
    """Numbers or names; none: all that the backend declares."""
    needs: str = ""
    """A device that it cannot be measured without: ``cuda``."""
    smoke: bool = False
    """Whether it is one of the few that every change is measured with."""
    timeout_s: float = 300.0

    @property
    def name(self) -> str:
        """What distinguishes it within its environment, fit for a file's name."""
        parts = (self.backend, self.kind, self.layout, self.family, self.precision)
        return ".".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)


class Group(Config):
    """Cells that differ in environment, backend, layout, family and precision alone: one for each combination."""

    environments: Sequence[str]
    kind: Kind
    backends: Sequence[str]
    layouts: Mapping[str, Mapping[str, Any]] = {"one process": {}}
    """Name -> settings."""
    families: Sequence[str] = ("llama",)
    precisions: Mapping[str, Mapping[str, Any]] = {"float32": {}}
    """Name -> settings."""
    models: str = "plain"
    """Which table of ``models`` says how a family's tiny model is made."""
    laws: str = "all"
    """Which list of ``laws``."""
    needs: str = ""
    smoke: Sequence[str] = ()
    """Families whose cells of the first environment and layout are smoke cells."""
    timeout_s: float = 300.0


class Matrix(Config):
    """The file."""

    laws: Mapping[str, Sequence[str]] = {}
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = {}
    group: Sequence[Group] = Field(default=())


def load_cells(file: Path) -> list[Cell]:
    """All cells, in the file's order.

    Raises:
        ConfigError: it cannot be read, or names the same cell twice.
    """
    try:
        matrix = Matrix(**tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    except VerlAdaptorError as error:
        raise ConfigError(f"{file}: {error}") from error
    cells = [cell for group in matrix.group for cell in _spread(group, matrix)]
    twice = [key for key, count in Counter((c.environment, c.name) for c in cells).items() if count > 1]
    if twice:
        raise ConfigError(f"{file} names cells more than once: {', '.join(' '.join(key) for key in twice)}.")
    return cells


def _spread(group: Group, matrix: Matrix) -> Iterator[Cell]:
    for table, key, names in (("laws", group.laws, matrix.laws), ("models", group.models, matrix.models)):
        if key not in ("all", "plain") and key not in names:
            raise ConfigError(f"{table}={key!r} of a group is none of {', '.join(names)}.")
    models = matrix.models.get(group.models, {})
    for environment in group.environments:
        for backend in group.backends:
            for layout, settings in group.layouts.items():
                for precision, more in group.precisions.items():
                    for family in group.families:
                        first = environment == group.environments[0] and layout == next(iter(group.layouts))
                        yield Cell(
                            environment=environment,
                            kind=group.kind,
                            backend=backend,
                            layout=layout,
                            family=family,
                            precision=precision,
                            settings={**settings, **more},
                            model=models.get(family, {}),
                            laws=tuple(matrix.laws.get(group.laws, ())),
                            needs=group.needs,
                            smoke=first and family in group.smoke,
                            timeout_s=group.timeout_s,
                        )
