"""How long until something happens: importing the package, reaching the factory, listing the backends.

    python benchmarks/startup.py --json startup.json

Every number is the median of fresh processes with warm file caches; the first run of each is thrown away.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from verl_adaptor.tracking.environment import environment

TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
STATEMENTS = {
    "import_seconds": "import verl_adaptor",
    "factory_import_seconds": "from verl_adaptor import create_inference_engine, create_trainer_backend",
    "resolve_seconds": "from verl_adaptor import resolve_trainer; resolve_trainer(None, 'hf')",
}
COMMANDS = {
    "python_seconds": ["-c", "pass"],
    "backends_seconds": ["-c", "from verl_adaptor.cli import main; main(['backends'])"],
    "backends_json_seconds": ["-c", "from verl_adaptor.cli import main; main(['backends', '--json'])"],
    "doctor_seconds": ["-c", "from verl_adaptor.cli import main; main(['doctor'])"],
}
LIMITS = {"import_seconds": 0.150, "backends_seconds": 1.0}


def timed_inside(statement: str) -> float:
    """Seconds that a statement takes in a fresh interpreter, the interpreter's own start left out."""
    code = TIMED.format(statement)
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def timed_outside(arguments: list[str]) -> float:
    """Seconds from starting a process to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, list[float]]:
    """Name -> seconds of each run. The measurements take turns, so that a busy moment hits them all."""
    seconds: dict[str, list[float]] = {name: [] for name in (*STATEMENTS, *COMMANDS)}
    for _ in range(repeats + 1):
        for name, statement in STATEMENTS.items():
            seconds[name].append(timed_inside(statement))
        for name, arguments in COMMANDS.items():
            seconds[name].append(timed_outside(arguments))
    return {name: runs[1:] for name, runs in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each (default: 7)")
    options = parser.parse_args()
    runs = measure(options.repeats)
    medians = {name: round(statistics.median(its), 4) for name, its in runs.items()}
    within = all(medians[name] <= limit for name, limit in LIMITS.items())
    result = {**medians, "limits": LIMITS, "within_limits": within, "repeats": options.repeats, "runs": runs}
    for name, seconds in medians.items():
        print(
            f"{name:24} {seconds * 1000:8.1f} ms" + (f"   limit {LIMITS[name] * 1000:.0f} ms" if name in LIMITS else "")
        )
    if options.json:
        options.json.write_text(json.dumps({**result, **environment()}, indent=2) + "\n")
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
