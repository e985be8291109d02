"""Engines whose ranks are processes of their own: replicas, and engines elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest

from verl_adaptor.errors import EngineError, UnsupportedCapability
from verl_adaptor.execution import WorkerPool
from verl_adaptor.execution.remote_engine import RemoteEngine
from verl_adaptor.factory import resolve_engine
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.bench import SHARE_CPUS, WORKERS, Bench, policy_gradient
from verl_adaptor.testing.laws_pairs import sync

TestReplicas = pytest.mark.slow(
    conformance_suite("hf", roles=("inference",), engine_settings={"replicas": 2, **SHARE_CPUS})
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("hf"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def two(bench: Bench) -> Iterator[RemoteEngine]:
    with resolve_engine(bench.path, replicas=2, **SHARE_CPUS).create(workers=WORKERS) as engine:
        assert isinstance(engine, RemoteEngine)
        yield engine


def test_replicas_share_the_requests_and_change_no_token(two: RemoteEngine, bench: Bench) -> None:
    prompts, params = bench.prompts(9), SamplingParams(max_tokens=12, seed=5, n=3)
    with bench.engine() as one:
        expected, scores = one.generate(prompts, params), one.score(prompts)
    assert [c.token_ids for c in two.generate(prompts, params)] == [c.token_ids for c in expected]
    found = [value for row in two.score(prompts) for value in row]
    assert found == pytest.approx([value for row in scores for value in row], abs=1e-5)
    samples = [sample for prompt in prompts for sample in two._expand(prompt, params)]
    two._enter(samples)
    placed = [{two._serving[s.key] for s in samples[start : start + 3]} for start in range(0, 27, 3)]
    assert all(len(replicas) == 1 for replicas in placed)  # samples of a prompt stay together, for its cache
    assert sorted(sum(replica in found for found in placed) for replica in (0, 1)) == [4, 5]
    two._dispatch.leave(samples)
    assert not two._serving


def test_streams_stops_and_aborts_reach_the_ranks(two: RemoteEngine, bench: Bench) -> None:
    async def joined() -> tuple[int, ...]:
        params = SamplingParams(max_tokens=10, seed=2, ignore_eos=True)
        return tuple([t async for delta in two.stream(prompt, params) for t in delta.token_ids])

    async def aborted() -> None:
        async for _ in two.stream(prompt, SamplingParams(max_tokens=100, ignore_eos=True)):
            break

    [prompt] = bench.prompts(1)
    [whole] = two.generate(prompt, SamplingParams(max_tokens=10, seed=2, ignore_eos=True))
    assert asyncio.run(joined()) == whole.token_ids
    asyncio.run(aborted())
    assert two.running == () and not two._serving
    if two.tokenizer is not None:
        stop = two.tokenizer.decode(whole.token_ids[3:4])
        with bench.engine() as one:
            asked = SamplingParams(max_tokens=10, seed=2, ignore_eos=True, stop=(stop,))
            assert two.generate(prompt, asked)[0].token_ids == one.generate(prompt, asked)[0].token_ids


@pytest.mark.parametrize("room", [True, False])
def test_an_update_reaches_every_replica(
    two: RemoteEngine, bench: Bench, room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Through shared memory, or with the calls where that has no room; the log says so."""
    if not room:
        monkeypatch.setattr("os.posix_fallocate", _no_room)
    two._way = ""
    probe = bench.prompts(4, seed=9, longest=30)
    with bench.trainer(learning_rate=0.05) as trainer, bench.engine() as one, caplog.at_level("INFO"):
        trainer.update(bench.batch(), policy_gradient)
        sync(trainer, two)
        assert ("through shared memory" if room else "no shared memory for a bucket") in caplog.text
        sync(trainer, one)
        expected = one.score(probe)
    found = two.score(probe)  # rows go to both
    assert [v for row in found for v in row] == pytest.approx([v for row in expected for v in row], abs=1e-5)


def test_a_dead_rank_ends_the_requests_and_the_engine_closes(bench: Bench) -> None:
    with WorkerPool() as pool:
        engine = resolve_engine(bench.path, replicas=2, **SHARE_CPUS).create(workers=pool)
        assert isinstance(engine, RemoteEngine)
        samples = engine._expand(bench.prompts(1)[0], SamplingParams(max_tokens=50, ignore_eos=True))
        engine._enter(samples)
        engine._group.create("killer", f"{__name__}:Killer", {})
        start = time.monotonic()
        with pytest.raises(Exception, match="rank 1 died"):
            engine._group.call("killer", "strike")
        with pytest.raises(EngineError, match="worker processes were ended"):
            engine._dispatch.run(samples)
            samples[0].completion()
        assert time.monotonic() - start < 60
        engine.close()


def test_an_engine_of_one_rank_can_be_sent_elsewhere(bench: Bench) -> None:
    with WorkerPool() as pool:
        plan = resolve_engine(bench.path, executor="ray", **SHARE_CPUS)
        with plan.create(workers=pool) as engine:
            assert isinstance(engine, RemoteEngine)
            with pytest.raises(UnsupportedCapability):
                engine.sleep()
            assert engine.generate(bench.prompts(2), SamplingParams(max_tokens=3))


def _no_room(*_: int) -> None:
    raise OSError(28, "No space left on device")


class Killer:
    """Ends the second rank's process."""

    def strike(self) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        pass
