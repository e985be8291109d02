"""Every trainer with every engine: laws P1 to P3 (see `verl_adaptor/testing/laws_pairs.py`). One start an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench
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
