"""``verl-adaptor matrix run|diff|render``: the compatibility matrix."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from verl_adaptor.errors import ConfigError
from verl_adaptor.matrix.cells import Cell, load_cells
from verl_adaptor.matrix.results import Result, differences, read_results, result_file
from verl_adaptor.matrix.run import ensure_environment, run_cells

VENVS = ".venvs"
"""Where environments are made, beside the matrix's folder."""


def run(
    folder: Path,
    *,
    environments: Sequence[str],
    only: Sequence[str],
    smoke: bool,
    here: bool,
    again: bool,
    results: Path | None,
    pip_args: Sequence[str],
    as_json: bool,
) -> bool:
    """Measure cells; True if nothing is declared other than it was observed.

    Raises:
        ConfigError: no cell is meant, or an environment cannot be made.
    """
    cells = _chosen(load_cells(folder / "cells.toml"), environments, only, smoke=smoke)
    kept = results or folder / "results"

    def python_of(environment: str) -> Path:
        if here:
            return Path(sys.executable)
        if not as_json:
            typer.echo(f"environment {environment}")
        return ensure_environment(
            folder / f"envs/{environment}.txt", folder.parent / VENVS / environment, pip_args=pip_args
        )

    def tell(cell: Cell, result: Mapping[str, Any]) -> None:
        if not as_json:
            why = f": {result['why']}"[:200] if result.get("why") else ""
            typer.echo(f"{result['observed']:13} {cell.environment} {cell.name} {result['seconds']:.0f} s{why}")

    run_cells(cells, kept, python_of, again=again, told=tell)
    found = read_results(kept)
    measured = {key: found[key] for cell in cells if (key := (cell.environment, cell.name)) in found}
    return _judge(measured, {}, as_json=as_json)


def diff(folder: Path, *, base: str, results: Path | None, as_json: bool) -> bool:
    """Compare what was found with what was found before; True if nothing is worse.

    Raises:
        ConfigError: `base` is neither a folder of results nor a commit.
    """
    return _judge(read_results(results or folder / "results"), _before(folder, base), as_json=as_json)


def render(folder: Path, docs: Path) -> None:
    """Write ``matrix.md`` and ``matrix.html`` into a folder."""
    from verl_adaptor.matrix.render import write_pages

    for file in write_pages(load_cells(folder / "cells.toml"), read_results(folder / "results"), docs):
        typer.echo(str(file))


def _chosen(cells: Sequence[Cell], environments: Sequence[str], only: Sequence[str], *, smoke: bool) -> list[Cell]:
    known = sorted({cell.environment for cell in cells})
    for name in environments:
        if name not in known:
            raise ConfigError(f"no cell is of environment {name!r}; there are {', '.join(known)}.")
    chosen = [
        cell
        for cell in cells
        if (not environments or cell.environment in environments)
        and all(part in f"{cell.environment}/{cell.name}" for part in only)
        and (cell.smoke or not smoke)
    ]
    if not chosen:
        raise ConfigError(f"no cell has {' and '.join(only)} in its name; `matrix run --list` shows all.")
    return chosen


def _before(folder: Path, base: str) -> dict[tuple[str, str], Result]:
    if Path(base).is_dir():
        return read_results(Path(base))
    kept = (folder / "results").resolve()
    git = ["git", "-C", str(kept.parent), "archive", base, "results"]
    done = subprocess.run(git, capture_output=True, timeout=60)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"--base {base} is neither a folder of results nor a commit that has them: {said}")
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(scratch, filter="data")
        return read_results(Path(scratch) / "results")


def _judge(now: Mapping[tuple[str, str], Result], before: Mapping[tuple[str, str], Result], *, as_json: bool) -> bool:
    found = list(differences(now, before))
    counts = Counter(result["observed"] for result in now.values())
    if as_json:
        listed = [{"environment": d.environment, "cell": d.cell, "is": d.sentence} for d in found]
        print(json.dumps({"cells": len(now), "observed": counts, "differences": listed}, indent=2))
    else:
        for difference in found:
            typer.echo(f"{difference.environment} {difference.cell} {difference.sentence}")
        typer.echo(f"{len(now)} cells: " + ", ".join(f"{count} {result}" for result, count in counts.most_common()))
    return not found


def list_cells(folder: Path) -> None:
    """Print every cell, and what was found of it."""
    for cell in load_cells(folder / "cells.toml"):
        file = result_file(folder / "results", cell)
        found = json.loads(file.read_text(encoding="utf-8"))["observed"] if file.exists() else "-"
        typer.echo(f"{found:13} {cell.environment} {cell.name}{' smoke' if cell.smoke else ''}")
