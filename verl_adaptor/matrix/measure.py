"""One cell, measured in this process: ``python -m verl_adaptor.matrix.measure RESULT < CELL``, both JSON.

A cell is *declared* by what the checks before any work say (versions, capabilities, rules), and *observed* by laws that are
run whatever the versions are.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_adaptor.errors import BackendNotInstalled, UnknownBackend, VerlAdaptorError
from verl_adaptor.matrix.cells import Cell
from verl_adaptor.preflight.versions import UNMEASURED


def measure(cell: Cell) -> dict[str, Any]:
    """``declared`` and ``observed``, why, and the numbers that were found."""
    from verl_adaptor.tracking import environment

    began = time.monotonic()
    if cell.needs and not _has(cell.needs):
        found: dict[str, Any] = {"observed": "not run", "why": f"needs {cell.needs}"}
    else:
        found = _declared(cell) | _observed(cell)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "seconds": round(time.monotonic() - began, 1), "peak_rss_mib": round(peak), **environment()}


def _has(device: str) -> bool:
    from verl_adaptor.testing.suite import DEVICES

    return device in DEVICES and DEVICES[device]()


def _declared(cell: Cell) -> dict[str, str]:
    try:
        with _bench(cell) as bench, _measured_versions_only():
            _plan(cell, bench.path)
    except VerlAdaptorError as error:
        return {"declared": "refused", "declared_why": str(error)}
    return {"declared": "works", "declared_why": ""}


def _observed(cell: Cell) -> dict[str, Any]:
    try:
        with _bench(cell) as bench:
            _plan(cell, bench.path)
    except (BackendNotInstalled, UnknownBackend) as error:
        return {"observed": "not installed", "why": str(error)}
    except VerlAdaptorError as error:
        return {"observed": "refused", "why": str(error)}
    return _pair(cell) if cell.kind == "pair" else _laws(cell)


def _laws(cell: Cell) -> dict[str, Any]:
    from verl_adaptor.testing.check import check_backend, summary

    outcomes = check_backend(
        cell.backend,
        family=cell.family,
        model=cell.model,
        roles=(cell.kind,),
        laws=cell.laws or None,
        engine_settings=cell.settings if cell.kind == "inference" else None,
        trainer_settings=cell.settings if cell.kind == "training" else None,
    )
    found = summary(outcomes)
    broken = [outcome for outcome in outcomes if outcome.result == "failed"]
    kept = found["counts"]["passed"]
    why = "; ".join(f"{law.law} {law.name}: {law.detail.splitlines()[0] if law.detail else ''}" for law in broken)
    return {"observed": "broken" if broken or not kept else "works", "why": why, "numbers": found["counts"], **found}


def _pair(cell: Cell) -> dict[str, Any]:
    from verl_adaptor.testing.pairs import check_pair, make_engine

    trainer, engine_name = cell.backend.split(" + ")
    try:
        with _bench(cell) as bench, make_engine(engine_name, bench) as engine:
            return {"observed": "works", "why": "", "numbers": check_pair(trainer, engine, bench)}
    except (AssertionError, VerlAdaptorError) as error:
        first = (str(error).splitlines() or [""])[0]
        return {"observed": "broken", "why": f"{type(error).__name__}: {first}", "numbers": {}}


def _plan(cell: Cell, path: str) -> None:
    """All that is checked before any work."""
    from verl_adaptor.factory import resolve_engine, resolve_trainer
    from verl_adaptor.testing.pairs import ENGINES, TRAINERS, layout

    if cell.kind == "pair":
        trainer, engine = cell.backend.split(" + ")
        for resolve, (backend, settings) in (
            (resolve_trainer, layout(TRAINERS[trainer], cell.family)),
            (resolve_engine, layout(ENGINES[engine], cell.family)),
        ):
            resolve(path, backend, **settings)
    else:
        (resolve_engine if cell.kind == "inference" else resolve_trainer)(path, cell.backend, **cell.settings)


@contextmanager
def _bench(cell: Cell) -> Iterator[Any]:
    from verl_adaptor.registry import get_spec
    from verl_adaptor.testing.bench import Bench
    from verl_adaptor.testing.pairs import FAMILIES

    pair = cell.kind == "pair"
    bench = Bench(
        get_spec("hf" if pair else cell.backend),  # which makes no engine or trainer of its own in a pair
        family=cell.family,
        model={**FAMILIES.get(cell.family, {}), **cell.model} if pair else cell.model,
    )
    try:
        yield bench
    finally:
        bench.close()


@contextmanager
def _measured_versions_only() -> Iterator[None]:
    before = os.environ.pop(UNMEASURED, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[UNMEASURED] = before


def main(arguments: list[str]) -> None:
    """Read the cell from standard input, and write what was found into the file."""
    [file] = arguments
    given: Mapping[str, Any] = json.load(sys.stdin)
    os.environ[UNMEASURED] = "1"
    Path(file).write_text(json.dumps(measure(Cell(**given))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
