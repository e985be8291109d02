"""What runs in each rank of `trainers.py`: the adaptor's trainer beside the hand-written loop, or alone beside Ray's.

torchrun --nproc-per-node=2 trainer_ranks.py fsdp --model FOLDER --pairs 9 --json FILE     compares
torchrun --nproc-per-node=2 trainer_ranks.py fsdp --model FOLDER --port PORT               runs blocks on request
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from operator import itemgetter
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

T = TypeVar("T")

RANKS = 2
AGREE = 1e-4
"""Relative difference of loss and grad norm, over the first steps."""
WARM_UP = 2
"""Steps of each side before the clock runs."""
NOISE = 0.1
"""Quartiles of a ratio that lie farther apart ask for more turns."""


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


def in_turns(ways: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """What each way returns in each turn, in an order that is the same on all ranks, and nobody always after another."""
    found: dict[str, list[T]] = {way: [] for way in ways}
    order = random.Random(0)
    for _ in range(turns):
        for way in order.sample(list(ways), len(ways)):
            found[way].append(ways[way]())
    return found


def until_steady(
    ways: Mapping[str, Callable[[], T]], turns: int, *, seconds: Callable[[T], float], agree: Callable[[bool], bool]
) -> dict[str, list[T]]:
    """`in_turns`, again and at most three times in all while the ratio of the two ways is noisy.

    Args:
        ways: ours, then theirs.
        turns: of each, each time.
        seconds: of what a way returns.
        agree: own opinion -> everybody's, whether it is noisy.
    """
    found: dict[str, list[T]] = {way: [] for way in ways}
    for _ in range(3):
        for way, more in in_turns(ways, turns).items():
            found[way] += more
        _, (low, high) = ratio(*([seconds(run) for run in runs] for runs in found.values()))
        if not agree(high - low > NOISE):
            break
    return found


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, list[float]]:
    """Ratio of medians, and the quartiles of the ratios of neighbours."""
    quartiles = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return round(statistics.median(ours) / statistics.median(theirs), 3), [round(quartiles[i], 3) for i in (0, 2)]


def as_first_rank(opinion: bool) -> bool:
    """The first rank's opinion, on all."""
    opinions = [opinion]
    dist.broadcast_object_list(opinions, src=0)
    return opinions[0]


# -- against the hand-written loop -------------------------------------------------------------------------------


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
    runs = {side: partial(timed, step) for side, step in sides.items()}
    turns = until_steady(runs, pairs, seconds=itemgetter(0), agree=as_first_rank)
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


# -- against Ray -------------------------------------------------------------------------------------------------


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--pairs", type=int, default=9, help="steps of each side")
    parser.add_argument("--json", type=Path, help="where the first rank writes the seconds")
    parser.add_argument("--port", type=int, help="of the store that asks for blocks")
    options = parser.parse_args()
    case = CASES[options.case]
    if options.port:
        return serve(case, options.model, options.port)
    result = compare(case, options.model, options.pairs)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
