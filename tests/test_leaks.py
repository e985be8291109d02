"""What steps and syncs leave behind: nothing (C25)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from verl_adaptor.ppo.loss import PolicyLoss
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.bench import Bench

WARM, STEPS = 3, 8


def held() -> dict[str, int]:
    """What grows where something leaks."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return {
        "tensors": len(tensors),
        "bytes": sum(tensor.untyped_storage().nbytes() for tensor in tensors),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "segments": len(list(Path("/dev/shm").glob("verl-adaptor-*"))),
    }


PAIRS = [
    *(("hf", wish) for wish in ("wait", "abort", "keep")),
    *((name, "wait") for name in ("fsdp", "zero", "megatron")),
]


@pytest.mark.parametrize(("backend", "in_flight"), PAIRS)
def test_c25_steps_and_syncs_leave_nothing_behind(backend: str, in_flight: str) -> None:
    bench = Bench(get_spec(backend), trainer_settings={"device": "cpu", "executor": "inline"})
    try:
        step = stepping(bench.trainer(learning_rate=1e-3), bench.engine("hf"), bench, in_flight)
        for _ in range(WARM):
            step()
        before = held()
        for _ in range(STEPS):
            step()
        assert held() == before
    finally:
        bench.close()


def stepping(trainer: TrainerBackend, engine: InferenceEngine, bench: Bench, in_flight: str) -> Callable[[], None]:
    batch = bench.batch(4)
    batch["old_log_probs"] = batch["rollout_log_probs"]

    def step() -> None:
        engine.generate(bench.prompts(2, seed=1), SamplingParams(max_tokens=6, seed=2))
        trainer.compute_log_probs(batch)
        trainer.update(batch, PolicyLoss())
        engine.update_weights(trainer.export_weights(), in_flight=in_flight)  # type: ignore[arg-type]

    return step
