"""The pure parts of the asynchronous pipeline: ledger, buffers, admission, rates, watchdog. No clock, no engine."""

from __future__ import annotations

import asyncio
import heapq
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from verl_adaptor.config import PipelineConfig
from verl_adaptor.errors import ConfigError, PipelineError
from verl_adaptor.ppo.buffers import Group, Ledger, SampleQueue, TrainBuffer
from verl_adaptor.ppo.rates import RateMatcher, admissible
from verl_adaptor.ppo.watchdog import Watchdog
from verl_adaptor.samples import Prompt, Trajectory


def group(place: int, samples: int = 2, version: int = 0) -> Group:
    trajectory = Trajectory(
        prompt_ids=(1,),
        response_ids=(2,),
        response_mask=(1,),
        rollout_log_probs=(-1.0,),
        finish_reason="stop",
        version_runs=((version, 1),),
    )
    return Group(place=place, prompt=Prompt(token_ids=(1,)), trajectories=(trajectory,) * samples)


# -- Q1: the ledger ----------------------------------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, every prompt is in one place; what cannot happen is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.alive: list[Group] = []
        self.places = 0

    @rule()
    def admit(self) -> None:
        self.ledger.admit(self.places)
        self.alive.append(group(self.places))
        self.places += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), end=st.sampled_from(["move", "train", "stale", "overflow"]))
    def go_on(self, data: st.DataObject, end: str) -> None:
        one = data.draw(st.sampled_from(self.alive))
        if end == "move":
            return self.ledger.move([one], "reward")
        self.alive.remove(one)
        if end == "train":
            self.ledger.train([one])
        else:
            self.ledger.drop([one], end)
        for again in (self.ledger.train, lambda groups: self.ledger.move(groups, "update")):
            with pytest.raises(PipelineError, match=str(one.place)):
                again([one])  # twice
        return None

    @rule()
    def save_and_restore(self) -> None:
        restored = Ledger()
        restored.load_state_dict(self.ledger.state_dict())
        for one in self.alive:
            restored.admit(one.place)
        assert restored.admitted == self.ledger.admitted
        self.ledger = restored

    @invariant()
    def balances(self) -> None:
        self.ledger.check()
        assert self.ledger.in_flight == len(self.alive)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# -- Q3: the buffers ---------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30), take=st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_the_sample_queue_pushes_back_and_loses_nothing(sizes: list[int], take: int) -> None:
    async def scenario() -> None:
        queue = SampleQueue(6, 1 << 20)
        highest, found = 0, []

        async def produce() -> None:
            nonlocal highest
            for place, size in enumerate(sizes):
                await queue.put(group(place, size))
                highest = max(highest, queue.samples)

        producer = asyncio.create_task(produce())
        while len(found) < len(sizes):
            groups = await queue.take(take)
            assert groups and (len(groups) == 1 or sum(len(g.trajectories) for g in groups) <= take)
            found += [g.place for g in groups]
        await producer
        assert found == list(range(len(sizes)))
        assert highest <= 6 and queue.samples == queue.nbytes == len(queue) == 0

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_group_over_the_bound_passes_alone() -> None:
    async def scenario() -> None:
        queue = SampleQueue(4, 1 << 20)
        await queue.put(group(0, 9))
        second = asyncio.create_task(queue.put(group(1, 1)))
        await asyncio.sleep(0)
        assert not second.done() and queue.fill > 1
        assert [g.place for g in await queue.take(1)] == [0]
        await second

    asyncio.run(asyncio.wait_for(scenario(), 20))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=30), limit=st.integers(5, 12))
@settings(deadline=None, max_examples=60)
def test_the_train_buffer_gives_up_the_oldest(sizes: list[int], limit: int) -> None:
    async def scenario() -> None:
        buffer, gone = TrainBuffer(limit, 1 << 20), []
        for place, size in enumerate(sizes):
            gone += [g.place for g in await buffer.put(group(place, size))]
            assert buffer.samples <= limit
        kept = [g.place for g in buffer.groups]
        assert gone + kept == list(range(len(sizes)))

    asyncio.run(scenario())


def test_the_train_buffer_bounds_bytes_too_and_finds_what_is_stale() -> None:
    async def scenario() -> None:
        one = group(0).nbytes
        buffer = TrainBuffer(1000, 3 * one)
        for place in range(3):
            assert await buffer.put(group(place, version=place)) == []
        assert [g.place for g in await buffer.put(group(3, version=3))] == [0]
        assert [g.place for g in await buffer.remove_older(2)] == [1]
        assert not await buffer.wait(3, 0.01)
        assert [g.place for g in await buffer.take(5)] == [2, 3] and buffer.nbytes == 0

    asyncio.run(scenario())


# -- admission and rates -----------------------------------------------------------------------------------------


@given(eta=st.integers(0, 4), batch=st.integers(1, 9), trained=st.integers(0, 50), in_flight=st.integers(0, 60))
def test_admission_is_areals_rule(eta: int, batch: int, trained: int, in_flight: int) -> None:
    room = admissible(eta, batch, in_flight)
    assert room == max(0, (eta + trained + 1) * batch - (trained * batch + in_flight))


class Plant:
    """Rollouts, one server for rewards and updates, on a virtual clock: how long each takes is all that is known of it."""

    def __init__(self, rates: RateMatcher, capacity: int, rollout_s: float, use_s: float, seed: int) -> None:
        self.rates, self.capacity, self.rollout_s, self.use_s = rates, capacity, rollout_s, use_s
        self.random = random.Random(seed)
        self.now, self.queue, self.running, self.blocked, self.used = 0.0, 0, 0, 0, 0
        self.events: list[tuple[float, int, str]] = [(use_s, 0, "use")]
        self.history: list[int] = []
        self.idle = 0

    def start(self) -> None:
        while self.running + self.blocked < self.rates.concurrency:
            self.running += 1
            heapq.heappush(
                self.events,
                (self.now + self.rollout_s * self.random.uniform(0.8, 1.2), self.random.getrandbits(30), "done"),
            )

    def arrive(self) -> None:
        self.queue += 1
        self.rates.arrived((self.queue + self.blocked) / self.capacity)
        self.history.append(self.rates.concurrency)

    def run(self, groups: int) -> None:
        while self.used < groups:
            self.start()
            self.now, _, kind = heapq.heappop(self.events)
            if kind == "done":
                self.running -= 1
                if self.queue < self.capacity:
                    self.arrive()
                else:
                    self.blocked += 1
            else:
                if self.queue:
                    self.queue -= 1
                    self.used += 1
                    if self.blocked:
                        self.blocked -= 1
                        self.arrive()
                else:
                    self.idle += 1
                heapq.heappush(self.events, (self.now + self.use_s, self.random.getrandbits(30), "use"))


@given(most=st.integers(8, 24), ratio=st.floats(0.05, 4.0), seed=st.integers(0, 2**20))
@settings(deadline=None, max_examples=60)
def test_rates_match_without_oscillation_or_starvation(most: int, ratio: float, seed: int) -> None:
    """`ratio`: how many rollouts at a time the stages behind can take. In the long run the queue is neither full nor empty."""
    rates = RateMatcher(PipelineConfig(), most, batch=8)
    rollout_s = 10.0
    needed = ratio * most
    plant = Plant(rates, capacity=24, rollout_s=rollout_s, use_s=rollout_s / needed, seed=seed)
    plant.run(1500)
    late = plant.history[len(plant.history) // 2 :]
    steady = min(float(most), max(1.0, needed))
    assert max(late) - min(late) <= max(4, 0.5 * steady), "it oscillates"
    if needed <= most:
        plant.idle = 0
        plant.run(3000)
        assert plant.idle <= 0.05 * 1500, "the stages behind starve although there is enough"
        assert plant.blocked <= max(1, most - needed + 3)


def test_early_updates_begin_at_the_low_mark_and_end_at_the_high_one() -> None:
    rates = RateMatcher(PipelineConfig(buffer_low=0.25, buffer_high=1.0, early_fraction=0.5), most=8, batch=8)
    wanted = [rates.wanted(buffered) for buffered in (8, 5, 3, 2, 5, 7, 8, 5)]
    assert wanted == [8, 8, 8, 4, 4, 4, 8, 8]
    for off in (PipelineConfig(max_staleness=0), PipelineConfig(early_updates=False)):
        assert RateMatcher(off, most=8, batch=8).wanted(0) == 8


def test_marks_that_touch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue_low=0\.8 is not below queue_high=0\.75"):
        PipelineConfig(queue_low=0.8)


# -- Q4: the watchdog --------------------------------------------------------------------------------------------


def test_the_watchdog_names_the_stage_that_stands_still(tmp_path: Path) -> None:
    now = 0.0
    dog = Watchdog(5.0, tmp_path / "stacks.txt", clock=lambda: now)

    async def scenario() -> None:
        nonlocal now
        with dog.busy("reward"), dog.busy("rollout"):
            for _ in range(4):
                now += 4.0
                with dog.busy("rollout"):  # progress
                    pass
                if now <= 4.0:
                    dog.check()
            with pytest.raises(PipelineError, match="stage reward") as stalled:
                dog.check()
            assert stalled.value.stage == "reward"
        now += 100.0
        dog.check()  # nothing to do is no stall

    asyncio.run(scenario())
    assert "scenario" in (tmp_path / "stacks.txt").read_text()
