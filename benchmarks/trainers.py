"""What verl-adaptor costs a trainer: an update against the same framework's hand-written loop, and Ray against torchrun.

    OMP_NUM_THREADS=1 python benchmarks/trainers.py --json trainers.json

Two gloo ranks, a random Llama of 19 M parameters, eight sequences of unequal length in micro-batches of two. Both sides of
a ratio take turns step by step, in the same processes, after they have agreed on loss and grad norm:

- ``*_update``: the median of the adaptor's steps over that of the loop in `benchmarks/handwritten/`; at most 1.05.
- ``*_spread``: quartiles of the ratios of neighbouring steps; ``*_cpu``: the first ratio, of processor seconds.
- ``ray_over_torchrun``: one trainer under two executors, in blocks of steps, the one idle meanwhile; at most 1.10.
- ``*_export_gb_per_s``: every exported tensor pulled and copied, on all ranks at once; ``*_memcpy_gb_per_s`` copies only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from handwritten import task
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_adaptor import create_trainer_backend
from verl_adaptor.batch import collate
from verl_adaptor.protocols import LossOutput, TrainerBackend
from verl_adaptor.samples import Trajectory
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking.environment import environment

T = TypeVar("T")

RANKS = 2
UPDATE_LIMIT, RAY_LIMIT = 1.05, 1.10
AGREE = 1e-4
"""Relative difference of loss and grad norm, over the first steps."""
WARM_UP = 2
"""Steps of each side before the clock runs."""
TIMEOUT_S = 300.0
"""Longest wait for one group of processes."""


@dataclass(frozen=True)
class Case:
    """One trainer and its peer."""

    backend: str
    settings: Mapping[str, Any]
    """What the adaptor's trainer is given beside the common settings."""
    handwritten: str
    """Module of `handwritten`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What its build() is given beside model and data."""


CASES = {
    "hf_ddp": Case("hf", {"data_parallel_size": RANKS}, "ddp"),
    "fsdp": Case("fsdp", {"data_parallel_size": RANKS}, "fsdp"),
    "zero2": Case("zero", {"data_parallel_size": RANKS, "zero_stage": 2}, "zero", {"stage": 2}),
    "zero3": Case("zero", {"data_parallel_size": RANKS, "zero_stage": 3}, "zero", {"stage": 3}),
    "megatron_tp2": Case("megatron", {"tensor_parallel_size": RANKS}, "megatron"),
}


def make_batch() -> TensorDict:
    """The mini-batch, the same in every process."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, task.MODEL["vocab_size"], (count,), generator=generator).tolist())

    rows = [
        Trajectory(
            prompt_ids=ids(prompt), response_ids=ids(response), response_mask=(1,) * response,
            rollout_log_probs=(0.0,) * response, finish_reason="stop", temperature=task.TEMPERATURE,
        )
        for prompt, response in zip(*task.lengths(), strict=True)
    ]  # fmt: skip
    batch = collate(rows, pad_token_id=0)
    batch["advantages"] = torch.randn(batch["responses"].shape, generator=generator)
    return batch


def policy_gradient(outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
    """-log p * advantage, as `task.policy_loss` has it."""
    return LossOutput(-outputs["log_probs"] * batch["advantages"])


def make_trainer(case: Case, path: str, **settings: Any) -> TrainerBackend:
    return create_trainer_backend(
        path,
        backend=case.backend,
        learning_rate=task.LEARNING_RATE,
        weight_decay=task.WEIGHT_DECAY,
        max_grad_norm=task.MAX_GRAD_NORM,
        micro_batch_size=task.MICRO_ROWS,
        device="cpu",
        **case.settings,
        **settings,
    )


def adaptor_step(trainer: TrainerBackend, batch: TensorDict) -> tuple[float, float]:
    metrics = trainer.update(batch, policy_gradient)
    return metrics["loss"], metrics["grad_norm"]


# -- in each rank that torchrun starts ---------------------------------------------------------------------------


def compare(case: Case, path: str, pairs: int) -> dict[str, Any]:
    """Seconds of each step of both sides, and what an export costs."""
    batch = make_batch()
    trainer = make_trainer(case, path)
    build = import_module(f"handwritten.{case.handwritten}").build
    sides: dict[str, task.Step] = {
        "adaptor": partial(adaptor_step, trainer, batch),
        "handwritten": build(path, dict(batch.items()), **case.options),
    }
    for _ in range(WARM_UP):
        check_agreement(*(step() for step in sides.values()))
    turns = in_turns({side: partial(timed, step) for side, step in sides.items()}, pairs)
    exports = in_turns({name: partial(timed, way) for name, way in export_ways(trainer).items()}, 5)
    size = sum(t.numel() * t.element_size() for bucket in trainer.export_weights().buckets() for t in bucket.values())
    trainer.close()
    return {
        "seconds": {side: [wall for wall, _ in runs] for side, runs in turns.items()},
        "cpu_seconds": {side: [cpu for _, cpu in runs] for side, runs in turns.items()},
        "export_seconds": {way: [wall for wall, _ in runs] for way, runs in exports.items()},
        "export_bytes": size,
    }


def check_agreement(ours: tuple[float, float], theirs: tuple[float, float]) -> None:
    """Raise unless both sides did the same step: only then is their ratio worth anything."""
    for name, mine, other in zip(("loss", "grad norm"), ours, theirs, strict=True):
        if not abs(mine - other) <= AGREE * max(1.0, abs(other)):
            raise RuntimeError(f"the two sides disagree on the {name}: {mine} and {other} by hand.")


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the last rank is through, and processor seconds of all ranks, which other jobs disturb less."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    used = torch.tensor(time.process_time() - busy, dtype=torch.float64)
    dist.all_reduce(used)
    return time.perf_counter() - start, used.item()


def export_ways(trainer: TrainerBackend) -> dict[str, Callable[[], None]]:
    """Two ways to fill buffers on this rank: from an export, and from other buffers of the same sizes."""
    source = {name: t.clone() for bucket in trainer.export_weights().buckets() for name, t in bucket.items()}
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}

    def export() -> None:
        for bucket in trainer.export_weights().buckets():
            for name, tensor in bucket.items():
                target[name].copy_(tensor)

    def memcpy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    return {"export": export, "memcpy": memcpy}


def serve(case: Case, path: str, port: int) -> None:
    """Run a block of steps whenever the store that `port` leads to asks for one, until it asks for 0."""
    store = TCPStore("127.0.0.1", port)
    batch = make_batch()
    trainer = make_trainer(case, path)
    step = partial(adaptor_step, trainer, batch)
    for number in range(1 << 30):
        store.wait([f"steps/{number}"])
        steps = int(store.get(f"steps/{number}"))
        if not steps:
            break
        seconds = block(step, steps)
        if dist.get_rank() == 0:
            store.set(f"seconds/{number}", str(seconds))
    trainer.close()


def block(step: Callable[[], object], steps: int) -> float:
    """Seconds a step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def worker(options: argparse.Namespace) -> None:
    """What torchrun runs."""
    case = CASES[options.worker]
    if options.port:
        return serve(case, options.model, options.port)
    result = compare(case, options.model, options.pairs)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(result))


# -- in the process that the user starts -------------------------------------------------------------------------


def torchrun(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """RANKS processes of this script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    settings = {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.Popen([*command, "--worker", name, *arguments], env=os.environ | settings)


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
            ways: dict[str, Callable[[int], float]] = {"torchrun": under_torchrun, "ray": through_ray}
            for way in ways.values():
                way(WARM_UP)
            seconds = in_turns({name: partial(way, steps) for name, way in ways.items()}, blocks)
        store.set(f"steps/{next(asked)}", "0")
        process.wait(timeout=TIMEOUT_S)
    finally:
        stop(process)
    return seconds


def in_turns(ways: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """What each way returns in each turn, in an order that is the same on all ranks, and nobody always after another."""
    found: dict[str, list[T]] = {way: [] for way in ways}
    order = random.Random(0)
    for _ in range(turns):
        for way in order.sample(list(ways), len(ways)):
            found[way].append(ways[way]())
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=60)


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, list[float]]:
    """Ratio of medians, and the quartiles of the ratios of neighbours."""
    quartiles = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return round(statistics.median(ours) / statistics.median(theirs), 3), [round(quartiles[i], 3) for i in (0, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--pairs", type=int, default=9, help="steps of each side, at least 5 (default: 9)")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--ray", choices=[*CASES, "none"], default="hf_ddp", help="trainer to compare executors with")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if options.pairs < 5:
        parser.error("--pairs: a median of fewer than 5 runs says little")
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_tiny_model("llama", folder, **task.MODEL))
        runs = {name: measure_updates(name, path, options.pairs) for name in options.cases}
        executors = {} if options.ray == "none" else measure_ray(options.ray, path, options.pairs)
    result = summary(runs, executors)
    for key, value in result.items():
        print(f"{key:28} {value}")
    if options.json:
        details = {"ranks": RANKS, "pairs": options.pairs, "model": task.MODEL, "lengths": task.lengths()}
        raw = {"runs": runs, "executors": executors}
        options.json.write_text(json.dumps({**result, **details, **raw, **environment()}, indent=2) + "\n")
    sys.exit(0 if result["within_limits"] else 1)


def summary(runs: Mapping[str, Any], executors: Mapping[str, list[float]]) -> dict[str, Any]:
    """The headline ratios and whether all are within their limits."""
    result: dict[str, Any] = {}
    within = []
    for name, run in runs.items():
        value, spread = ratio(run["seconds"]["adaptor"], run["seconds"]["handwritten"])
        cpu, _ = ratio(run["cpu_seconds"]["adaptor"], run["cpu_seconds"]["handwritten"])
        result |= {f"{name}_update": value, f"{name}_spread": spread, f"{name}_cpu": cpu}
        within.append(value <= UPDATE_LIMIT)
    if executors:
        value, spread = ratio(executors["ray"], executors["torchrun"])
        result |= {"ray_over_torchrun": value, "ray_spread": spread}
        within.append(value <= RAY_LIMIT)
    for name, run in runs.items():
        for way, seconds in run["export_seconds"].items():
            result[f"{name}_{way}_gb_per_s"] = round(run["export_bytes"] / statistics.median(seconds) / 1e9, 2)
    return result | {"within_limits": all(within)}


if __name__ == "__main__":
    main()
