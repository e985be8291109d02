"""Every trainer with every engine: laws P1 to P3 (see `verl_adaptor/testing/laws_pairs.py`). One start an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from verl_adaptor.factory import resolve_trainer
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import SHARE_CPUS, WORKERS, Bench
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer, first_ratio_is_one, nothing_drifts

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "hf": ("hf", {}),
    "vllm": ("vllm", {}),
    "vllm beside": ("vllm", {"mode": "async"}),
}
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
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


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=[] if f == "llama" else pytest.mark.slow) for f in FAMILIES]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(get_spec("hf"), family=request.param, model=FAMILIES[request.param])
    yield bench
    bench.close()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, bench: Bench) -> Iterator[InferenceEngine]:
    backend, settings = ENGINES[request.param]
    with bench.engine(backend, **settings) as engine:
        yield engine


@pytest.mark.parametrize("name", TRAINERS)
def test_pair(name: str, engine: InferenceEngine, bench: Bench) -> None:
    backend, layout = TRAINERS[name]
    if bench.family == "mixtral" and "tensor_parallel_size" in layout:
        layout = {**layout, "sequence_parallel": True}  # Megatron wants it with experts

    def trainer(**settings: Any) -> Any:
        plan = resolve_trainer(bench.path, backend, **SHARE_CPUS, **layout, **settings)
        return plan.create(workers=WORKERS)

    with trainer(learning_rate=0.05) as moving:
        engine_scores_as_trainer(moving, engine, bench)
    with trainer(learning_rate=0.02) as moving:
        first_ratio_is_one(moving, engine, bench)
    with trainer(learning_rate=0.0, weight_decay=0.0) as still:
        nothing_drifts(still, engine, bench)
