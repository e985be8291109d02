"""What verl-adaptor costs a trainer: an update against the same framework's hand-written loop, and Ray against torchrun.

    OMP_NUM_THREADS=1 python benchmarks/trainers.py --json trainers.json

Two gloo ranks, a random Llama of 19 M parameters, eight sequences of unequal length in micro-batches of two. Both sides of
a ratio take turns step by step, in the same processes, after they have agreed on loss and grad norm:

- ``*_update``: the median of the adaptor's steps over that of the loop in `benchmarks/handwritten/`; at most 1.05.
- ``*_spread``: quartiles of the ratios of neighbouring steps. Wide ones ask for up to three times the pairs, and stand in
  ``noisy`` if that did not help: the machine was too busy for a verdict, and a noisy ratio is within no limit.
- ``*_cpu``: the ratio in processor seconds, which other jobs disturb less.
- ``ray_over_torchrun``: one trainer under two executors, in blocks of steps, the one idle meanwhile; at most 1.10.
- ``*_limit``: the targets, ``within_limits`` whether all were met (else exit code 1), ``load`` the machine's, before and after.
- ``*_export_gb_per_s``: every exported tensor pulled and copied, on all ranks at once; ``*_memcpy_gb_per_s`` copies only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from handwritten import task
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from trainer_ranks import (
    CASES,
    NOISE,
    RANKS,
    WARM_UP,
    adaptor_step,
    block,
    make_batch,
    make_trainer,
    ratio,
    until_steady,
)

from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking.environment import environment

UPDATE_LIMIT, RAY_LIMIT = 1.05, 1.10
TIMEOUT_S = 600.0
"""Longest wait for one group of processes."""


def torchrun(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """RANKS processes of `trainer_ranks.py`."""
    script = Path(__file__).with_name("trainer_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.Popen([*command, str(script), name, *arguments], env=os.environ | settings)


def measure_updates(name: str, path: str, pairs: int) -> dict[str, Any]:
    """`compare` under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        process = torchrun(name, "--model", path, "--pairs", str(pairs), "--json", str(file))
        try:
            code = process.wait(timeout=TIMEOUT_S)
        finally:
            stop(process)
        if code:
            raise SystemExit(f"{name}: torchrun ended with {code}; see above.")
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def measure_ray(name: str, path: str, blocks: int, steps: int = 3) -> dict[str, list[float]]:
    """Seconds a step of each block, under torchrun and through Ray; both are alive all the time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S))
    batch = make_batch()
    asked = iter(range(1 << 30))

    def under_torchrun(steps: int) -> float:
        number = next(asked)
        store.set(f"steps/{number}", str(steps))
        store.wait([f"seconds/{number}"])
        return float(store.get(f"seconds/{number}"))

    process = torchrun(name, "--model", path, "--port", str(store.port))
    try:
        with make_trainer(CASES[name], path, executor="ray") as trainer:
            through_ray = partial(block, partial(adaptor_step, trainer, batch))
            ways: dict[str, Callable[[int], float]] = {"ray": through_ray, "torchrun": under_torchrun}
            for way in ways.values():
                way(WARM_UP)
            runs = {name: partial(way, steps) for name, way in ways.items()}
            seconds = until_steady(runs, blocks, seconds=float, agree=bool)
        store.set(f"steps/{next(asked)}", "0")
        process.wait(timeout=TIMEOUT_S)
    finally:
        stop(process)
    return seconds


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--pairs", type=int, default=9, help="steps of each side, at least 5 (default: 9)")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--ray", choices=[*CASES, "none"], default="hf_ddp", help="trainer to compare executors with")
    options = parser.parse_args()
    if options.pairs < 5:
        parser.error("--pairs: a median of fewer than 5 runs says little")
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_tiny_model("llama", folder, **task.MODEL))
        runs: dict[str, Any] = {}
        for name in options.cases:
            runs[name] = measure_updates(name, path, options.pairs)
            print(name, update_numbers(name, runs[name]), file=sys.stderr)
        executors = {} if options.ray == "none" else measure_ray(options.ray, path, options.pairs)
    load.append(os.getloadavg()[0])
    result = summary(runs, executors)
    for key, value in result.items():
        print(f"{key:28} {value}")
    if options.json:
        details = {"ranks": RANKS, "pairs": options.pairs, "model": task.MODEL, "lengths": task.lengths(), "load": load}
        raw = {"runs": runs, "executors": executors}
        options.json.write_text(json.dumps({**result, **details, **raw, **environment()}, indent=2) + "\n")
    sys.exit(0 if result["within_limits"] else 1)


def summary(runs: Mapping[str, Any], executors: Mapping[str, list[float]]) -> dict[str, Any]:
    """The headline ratios, their limits, and whether all are shown to be within them."""
    result: dict[str, Any] = {}
    for name, run in runs.items():
        result |= update_numbers(name, run)
    within = [result[f"{name}_update"] <= UPDATE_LIMIT for name in runs]
    if executors:
        value, spread = ratio(executors["ray"], executors["torchrun"])
        result |= {"ray_over_torchrun": value, "ray_spread": spread}
        within.append(value <= RAY_LIMIT)
    for name, run in runs.items():
        for way, seconds in run["export_seconds"].items():
            result[f"{name}_{way}_gb_per_s"] = round(run["export_bytes"] / statistics.median(seconds) / 1e9, 2)
    noisy = [key for key, value in result.items() if key.endswith("_spread") and value[1] - value[0] > NOISE]
    limits = {"noisy": noisy, "update_limit": UPDATE_LIMIT, "ray_over_torchrun_limit": RAY_LIMIT}
    return result | limits | {"within_limits": all(within) and not noisy}


def update_numbers(name: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """The headline ratios of one trainer."""
    value, spread = ratio(run["seconds"]["adaptor"], run["seconds"]["handwritten"])
    cpu, _ = ratio(run["cpu_seconds"]["adaptor"], run["cpu_seconds"]["handwritten"])
    return {f"{name}_update": value, f"{name}_spread": spread, f"{name}_cpu": cpu}


if __name__ == "__main__":
    main()
