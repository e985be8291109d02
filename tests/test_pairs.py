"""Every trainer with every engine: laws P1 to P3 (see `verl_adaptor/testing/laws_pairs.py`). One start an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_adaptor.factory import resolve_trainer
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import SHARE_CPUS, WORKERS, Bench
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer
from verl_adaptor.testing.pairs import ENGINES, FAMILIES, TRAINERS, check_pair, make_engine


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=[] if f == "llama" else pytest.mark.slow) for f in FAMILIES]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(get_spec("hf"), family=request.param, model=FAMILIES[request.param])
    yield bench
    bench.close()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, bench: Bench) -> Iterator[InferenceEngine]:
    with make_engine(request.param, bench) as engine:
        yield engine


@pytest.mark.parametrize("trainer", TRAINERS)
def test_pair(trainer: str, engine: InferenceEngine, bench: Bench) -> None:
    found = check_pair(trainer, engine, bench)
    assert found["syncs"] >= 25  # three, one and twenty-one, and those that set the start


@pytest.fixture(scope="module")
def adapting(bench: Bench) -> Iterator[InferenceEngine]:
    if bench.family == "mixtral":
        pytest.skip("vLLM refuses adapters of experts on a CPU: see tests/test_vllm_engine.py")
    with bench.engine("vllm", lora_rank=8) as engine:
        yield engine


@pytest.mark.parametrize("trainer", ["hf", "fsdp x2", pytest.param("zero3 x2", marks=pytest.mark.slow)])
def test_adapters_from_any_trainer(trainer: str, adapting: InferenceEngine, bench: Bench) -> None:
    backend, settings = TRAINERS[trainer]
    plan = resolve_trainer(
        bench.path, backend, **SHARE_CPUS, **settings, lora_rank=4, lora_alpha=6.0, learning_rate=0.05
    )
    with plan.create(workers=WORKERS) as moving:
        assert moving.export_weights().adapters is not None
        engine_scores_as_trainer(moving, adapting, bench)
