"""The built-in trainers and engines in pairs, as the tests and `benchmarks/pairs.py` run them."""

from __future__ import annotations

from typing import Any

from verl_adaptor.factory import resolve_trainer
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.testing.bench import SHARE_CPUS, WORKERS, Bench
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer, first_ratio_is_one, nothing_drifts

Settings = tuple[str, dict[str, Any]]

ENGINES: dict[str, Settings] = {
    "hf": ("hf", {}),
    "vllm": ("vllm", {}),
    "vllm beside": ("vllm", {"mode": "async"}),
    "megatron tp2": ("megatron", {"tensor_parallel_size": 2, **SHARE_CPUS}),
}
TRAINERS: dict[str, Settings] = {
    "hf": ("hf", {}),
    "fsdp x2": ("fsdp", {"data_parallel_size": 2}),
    "zero3 x2": ("zero", {"data_parallel_size": 2, "zero_stage": 3}),
    "megatron tp2": ("megatron", {"tensor_parallel_size": 2}),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},  # tied, biases
    "mixtral": {"head_dim": 32},  # experts
}
"""What differs from the tiny model: vLLM on a CPU knows no head of less than 32."""


def layout(settings: Settings, family: str) -> Settings:
    """Megatron wants sequence parallelism with experts on tensor-parallel ranks."""
    backend, own = settings
    return backend, {**own, "sequence_parallel": True} if family == "mixtral" and "tensor_parallel_size" in own else own


def make_engine(name: str, bench: Bench) -> InferenceEngine:
    """A fresh engine of `ENGINES`."""
    backend, settings = layout(ENGINES[name], bench.family)
    return bench.engine(backend, **settings)


def check_pair(trainer: str, engine: InferenceEngine, bench: Bench) -> dict[str, float]:
    """Laws P1, P2 and P3 of one of `TRAINERS` with an engine.

    Returns:
        ``largest_difference`` of P1, in nats; ``furthest_ratio`` from 1 of P2; ``syncs`` of all three.
    """
    backend, settings = layout(TRAINERS[trainer], bench.family)
    start = engine.policy_version

    def made(**more: Any) -> Any:
        plan = resolve_trainer(bench.path, backend, **SHARE_CPUS, **settings, **more)
        return plan.create(workers=WORKERS)

    with made(learning_rate=0.05) as moving:
        difference = engine_scores_as_trainer(moving, engine, bench)
    with made(learning_rate=0.02) as moving:
        ratio = first_ratio_is_one(moving, engine, bench)
    with made(learning_rate=0.0, weight_decay=0.0) as still:
        nothing_drifts(still, engine, bench)
    return {
        "largest_difference": difference,
        "furthest_ratio": ratio,
        "syncs": engine.policy_version - start,
    }
