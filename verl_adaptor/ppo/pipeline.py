"""The asynchronous page: rollouts, rewards and updates at the same time, and not one prompt lost.

    prompts -> rollout -> sample queue -> reward -> train buffer -> update -> new weights
       ^          |  waits while the queue is full       |  full, it drops the oldest
       '----------'  waits while more would be too stale  '- full or early batches

Each stage is a task of one event loop; what computes runs in threads and in other processes. `ledger` knows where every
prompt is. The algorithm itself is `learn` of ``loop.py``, the synchronous page; with ``max_staleness=0`` this is the same run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_adaptor.config.pipeline import PipelineConfig
from verl_adaptor.errors import (
    EngineError,
    InvalidRequest,
    PipelineError,
    RewardError,
    RolloutTimeout,
    VerlAdaptorError,
)
from verl_adaptor.ppo.buffers import Group, Ledger, SampleQueue, Stage, TrainBuffer
from verl_adaptor.ppo.gate import GatedEngine
from verl_adaptor.ppo.loop import PPO, Clock, evaluate_at, learn
from verl_adaptor.ppo.rates import RateMatcher, admissible
from verl_adaptor.ppo.reading import PromptReader
from verl_adaptor.ppo.reward import Scores
from verl_adaptor.ppo.rollout import first_failure, rollout_all
from verl_adaptor.ppo.watchdog import Watchdog
from verl_adaptor.protocols.requests import mix_seed
from verl_adaptor.threads import in_daemon_thread

if TYPE_CHECKING:
    from verl_adaptor.protocols import InferenceEngine, InFlight

logger = logging.getLogger(__name__)

HOLD_S = 0.02
"""How often an update that waits for samples on their way looks for them."""
POLL_S = 0.5
"""How often a stage that waits looks whether the run is to be stopped."""


class Pipeline:
    """One run, its stages overlapping.

    Args:
        run: as for the synchronous loop.
        config: how far stages may run ahead.
    """

    def __init__(self, run: PPO, config: PipelineConfig) -> None:
        self.run, self.config = run, config
        if config.max_staleness and run.config.rollout_correction.level is None:
            correction = run.config.rollout_correction.replace(level="token")
            run.config = run.config.replace(rollout_correction=correction)
        batch = run.config.train_batch_size
        self.total = run.config.total_steps * batch
        """Prompts to be trained on."""
        self.step = 0
        """Updates so far."""
        self.ledger = Ledger()
        self.queue = SampleQueue(config.queue_samples, config.queue_bytes)
        self.buffer = TrainBuffer(config.buffer_samples, config.buffer_bytes)
        most = config.concurrency or (config.max_staleness + 1) * batch
        self.rates = RateMatcher(config, most, batch, run.config.mini_batch_size or 1)
        self.reader = PromptReader(run.prompts)
        self.gates = [GatedEngine(run.engine)]
        """One an engine; the first is the run's, which evaluates too."""
        self.watchdog = Watchdog(config.stall_timeout_s, run.checkpoints.folder.parent / "stacks.txt")
        self._restarts = 0
        self._rolling: dict[int, Group] = {}
        """By place."""
        self._scoring: dict[int, Group] = {}
        self._again: list[Group] = []
        """Restored prompts whose rollouts begin again."""
        self._next_place = 0
        self._room = asyncio.Condition()
        """Told whenever a rollout may be let in that was not before."""
        self._position = run.prompts.state_dict()
        """Of the prompts, after the last that was admitted."""
        self._mending = asyncio.Lock()
        self._actor = asyncio.Lock()
        """Held while the actor computes, or hands out its weights."""

    async def train(self) -> None:
        """All updates that are left; resumes from the newest checkpoint where there is one.

        Raises:
            PipelineError: a stage failed or stands still; names it, and what made it fail is its cause.
            KeyboardInterrupt: `run.stop_requested`; a checkpoint is saved.
        """
        run = self.run
        self.step = run.checkpoints.restore(run, self.load_state_dict)
        try:
            async with asyncio.TaskGroup() as stages:
                others = [stages.create_task(self.watchdog.watch(self.ledger.check))]
                await self._named("update", self._begin())
                others += [
                    stages.create_task(self._named("rollout", self._rollouts())),
                    stages.create_task(self._named("reward", self._rewards())),
                ]
                await self._named("update", self._updates())
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as failures:
            failure = first_failure(failures)
            raise failure from failure.__cause__

    async def _named(self, stage: Stage, work: Coroutine[Any, Any, None]) -> None:
        """A stage's work; what makes it fail is told with its name."""
        try:
            await work
        except Exception as failure:  # also an ExceptionGroup
            error = first_failure(failure) if isinstance(failure, BaseExceptionGroup) else failure
            if isinstance(error, PipelineError):
                raise error from error.__cause__
            raise _failed(stage, error) from error

    # -- prompts -> rollout -> sample queue ----------------------------------------------------------------------

    async def _rollouts(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with self._room:
                    await self._room.wait_for(lambda: self._places() > 0)
                for group in self._restored(self._places()) or await self._read(self._places()):
                    self._rolling[group.place] = group
                    tasks.create_task(self._roll(group))

    def _places(self) -> int:
        """How many prompts may be let in now."""
        free = self.rates.concurrency - len(self._rolling)
        batch = self.run.config.train_batch_size
        room = len(self._again) or admissible(self.config.max_staleness, batch, self.ledger.in_flight)
        return max(0, min(free, room))

    def _restored(self, most: int) -> list[Group]:
        taken, self._again = self._again[:most], self._again[most:]
        return taken

    async def _read(self, most: int) -> list[Group]:
        """The next prompts, admitted. A source may take its time: nothing else waits for it, a checkpoint neither."""
        found, position = await self.reader.take(most)
        groups = [Group(place=place, prompt=prompt) for place, prompt in enumerate(found, self._next_place)]
        self._position, self._next_place = position, self._next_place + len(groups)
        for group in groups:
            self.ledger.admit(group.place)
        return groups

    async def _roll(self, group: Group) -> None:
        run = self.run
        step, place = divmod(group.place, run.config.train_batch_size)
        while True:
            gate = min(self.gates, key=lambda gate: (gate.is_shut, gate.prompts))
            engine = gate.engine
            group = self._rolling[group.place] = replace(group, begun=engine.policy_version)
            try:
                with self.watchdog.busy("rollout"), gate.rolling():
                    trajectories = await rollout_all(
                        run.rollout,
                        gate,  # type: ignore[arg-type]
                        [group.prompt],
                        run.params,
                        n=run.rollout_config.n,
                        seed=mix_seed(run.seed, step),
                        first=place,
                        timeout_s=run.rollout_config.timeout_s,
                    )
                break
            except (InvalidRequest, RolloutTimeout):  # the engine may be well
                raise
            except EngineError as error:
                await self._mend(gate, engine, error)
        group = self._rolling[group.place] = replace(group, trajectories=tuple(trajectories))
        await self.queue.put(group)
        del self._rolling[group.place]
        self.ledger.move([group], "sample_queue")
        self.rates.arrived(self.queue.pressure)
        await self._let_in()

    async def _let_in(self) -> None:
        if self._places() > 0:
            async with self._room:
                self._room.notify_all()

    # -- sample queue -> reward -> train buffer ------------------------------------------------------------------

    async def _rewards(self) -> None:
        places = asyncio.Semaphore(self.config.reward_calls)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                groups = await self.queue.take(self.config.reward_samples)
                self.ledger.move(groups, "reward")
                self._scoring |= {group.place: group for group in groups}
                tasks.create_task(self._score(groups, places))

    async def _score(self, groups: Sequence[Group], places: asyncio.Semaphore) -> None:
        try:
            with self.watchdog.busy("reward"):
                scores = await self.run.reward.score([t for group in groups for t in group.trajectories])
        except RewardError as error:
            if self.config.on_reward_failure == "stop":
                raise
            logger.warning("%d prompts are dropped without their rewards: %s", len(groups), error)
            for group in groups:
                del self._scoring[group.place]
            return await self._drop(groups, "reward_failed")
        finally:
            places.release()
        for group in groups:
            its, scores = scores[: len(group.trajectories)], scores[len(group.trajectories) :]
            if self.config.drop_silent and _silent(its):
                del self._scoring[group.place]
                await self._drop([group], "silent")
                continue
            gone = await self.buffer.put(group.scored(its))
            del self._scoring[group.place]
            self.ledger.move([group], "train_buffer")
            await self._drop(gone, "overflow")
            if gone and len(self.buffer) < self.rates.fewest:
                raise PipelineError(
                    f"the train buffer is full with {len(self.buffer)} prompts of {self.buffer.nbytes >> 20} MiB, fewer than an "
                    "update takes; raise pipeline.buffer_bytes or buffer_samples.",
                    stage="train_buffer",
                )
        return None

    async def _drop(self, groups: Sequence[Group], reason: str) -> None:
        """Count them, and let others in instead."""
        if groups:
            self.ledger.drop(groups, reason)
            await self._let_in()

    # -- train buffer -> update -> new weights -------------------------------------------------------------------

    async def _begin(self) -> None:
        for number in range(1, self.config.engines):
            self.gates.append(GatedEngine(await self._new_engine(number)))
        await self._sync("wait")
        if self.step == 0:
            await self._evaluate(last=False)

    async def _evaluate(self, *, last: bool) -> float:
        """As the loop's; an engine that fails meanwhile is made anew."""
        while True:
            engine = self.gates[0].engine
            try:
                with self.watchdog.busy("evaluation"):
                    return await evaluate_at(self.run, self.step, last=last)
            except (InvalidRequest, RolloutTimeout):
                raise
            except EngineError as error:
                await self._mend(self.gates[0], engine, error)

    async def _updates(self) -> None:
        run, clock = self.run, Clock()
        while self.ledger.trained < self.total:
            with clock("wait"):
                groups = await self._batch()
            self.ledger.move(groups, "update")
            metrics = self._levels(groups)
            async with self._actor:
                with self.watchdog.busy("update"):
                    metrics |= await in_daemon_thread(lambda: self._learn(groups, clock), "update")  # noqa: B023 awaited here
            self.step += 1
            with clock("weight_sync"):
                await self._sync(self.config.in_flight)
            self.ledger.train(groups)
            metrics |= self.ledger.metrics() | self.rates.metrics() | clock.metrics()
            last = self.ledger.trained >= self.total
            if last or (run.evaluation_config.every and self.step % run.evaluation_config.every == 0):
                metrics["eval/reward"] = await self._evaluate(last=last)
            # after an evaluation: without staleness, the engine's batches are the synchronous run's
            await self._let_in()
            run.tracker.expect(self.step + math.ceil((self.total - self.ledger.trained) / run.config.train_batch_size))
            run.tracker.log(self.step, metrics)
            if run.checkpoints.due(self.step, last=last):
                await self._save()
            clock = Clock()

    async def _batch(self) -> list[Group]:
        """The oldest prompts of a whole or an early update, in the order of the data."""
        left = self.total - self.ledger.trained
        while True:
            if self.run.stop_requested():
                await self._save()
                raise KeyboardInterrupt
            oldest = self.run.engine.policy_version - self.config.max_staleness
            await self._drop(await self.buffer.remove_older(oldest), "stale")  # again, after a recovery too (C23)
            held = self._would_make_too_old()
            wanted = min(self._wanted(), left)
            if len(self.buffer) >= wanted and not held:
                most = min(left, self.run.config.train_batch_size)
                groups = await self.buffer.take(min(left, self.rates.taken(len(self.buffer)) or most))
                self.rates.early_updates += len(groups) < most
                return sorted(groups, key=lambda group: group.place)
            await self.buffer.wait(max(wanted, len(self.buffer) + 1), HOLD_S if held else POLL_S)

    def _wanted(self) -> int:
        """Prompts that the next update needs: whole ones where early ones would come too often for those that wait."""
        wanted, batch = self.rates.wanted(len(self.buffer)), self.rates.batch
        if wanted == batch:
            return batch
        versions = sorted(group.version for group in (*self._on_their_way(), *self.buffer.groups))
        after, served = versions[self.rates.taken(len(self.buffer)) :], self.run.engine.policy_version
        ages = (served + 1 + place // batch - version for place, version in enumerate(after))
        return wanted if max(ages, default=0) <= self.config.max_staleness else batch

    def _on_their_way(self) -> list[Group]:
        return [*self._rolling.values(), *self.queue.groups, *self._scoring.values()]

    def _would_make_too_old(self) -> bool:
        """Whether an update now would make samples too old that are on their way.

        It waits for them: else the longest responses would never be trained on, and with a larger bound no more often.
        """
        oldest = self.run.engine.policy_version - self.config.max_staleness
        return self.config.max_staleness > 0 and any(group.version <= oldest for group in self._on_their_way())

    def _learn(self, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
        trajectories = [t for group in groups for t in group.trajectories]
        rewards: Scores = [reward for group in groups for reward in group.rewards]
        return learn(self.run, self.step, trajectories, rewards, clock)

    def _levels(self, groups: Sequence[Group]) -> dict[str, float]:
        """What the next update is made of, and how full the buffers are."""
        now = self.run.engine.policy_version
        ages = [now - group.version for group in groups]
        return {
            "pipeline/prompts": float(len(groups)),
            "pipeline/staleness_mean": sum(ages) / len(ages),
            "pipeline/staleness_max": float(max(ages)),
            "pipeline/queue_samples": float(self.queue.samples),
            "pipeline/queue_bytes": float(self.queue.nbytes),
            "pipeline/buffer_samples": float(self.buffer.samples),
            "pipeline/buffer_bytes": float(self.buffer.nbytes),
        }

    async def _sync(self, in_flight: InFlight) -> None:
        """The actor's weights into every engine, whatever of them is left."""
        for gate in self.gates:
            engine = gate.engine
            try:
                with gate.shut(), self.watchdog.busy("weight_sync"):
                    if in_flight == "wait":
                        await gate.settled()
                    await self._update(engine, in_flight)
            except EngineError as error:
                await self._mend(gate, engine, error)

    async def _update(self, engine: InferenceEngine, in_flight: InFlight) -> None:
        async with self._actor:
            await in_daemon_thread(
                lambda: engine.update_weights(self.run.actor.export_weights(), in_flight=in_flight), "weight_sync"
            )

    async def _mend(self, gate: GatedEngine, failed: InferenceEngine, error: EngineError) -> None:
        """A new engine in place of the failed one, with the newest weights; who finds it replaced already has nothing to do."""
        async with self._mending:
            if gate.engine is not failed:
                return
            if self.run.new_engine is None or self._restarts >= self.config.engine_restarts:
                raise error
            self._restarts += 1
            most = self.config.engine_restarts
            logger.warning("the engine failed and is made anew (%d of %d): %s", self._restarts, most, error)
            with gate.shut():
                with suppress(VerlAdaptorError), self.watchdog.busy("engine"):
                    await in_daemon_thread(failed.close, "engine")
                with self.watchdog.busy("engine"):
                    engine = await self._new_engine(self.gates.index(gate))
                with self.watchdog.busy("engine"):
                    await self._update(engine, "wait")
                gate.engine = engine
                self.run.engine = self.gates[0].engine

    async def _new_engine(self, number: int) -> InferenceEngine:
        make = self.run.new_engine
        if make is None:
            raise PipelineError("this run cannot make engines: give PPO.new_engine.", stage="rollout")
        return await in_daemon_thread(lambda: make(number), "engine")

    # -- resume --------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """A checkpoint: everything that is in flight is in it."""
        state = self.state_dict()
        async with self._actor:
            with self.watchdog.busy("checkpoint"):
                await in_daemon_thread(lambda: self.run.checkpoints.save(self.run, self.step, state), "checkpoint")

    def state_dict(self) -> dict[str, Any]:
        """Counts, and all groups in flight as far as they have come. There is no update running."""
        stages = (self._again, self._rolling.values(), self.queue.groups, self._scoring.values(), self.buffer.groups)
        # one that is handed on just now is at two stages: the later counts
        groups = {group.place: group for stage in stages for group in stage}
        if len(groups) != self.ledger.in_flight:
            raise PipelineError(
                f"{self.ledger.in_flight} prompts are in flight and {len(groups)} were found; this is a defect of the pipeline."
            )
        return {
            "ledger": self.ledger.state_dict(),
            "prompts": self._position,
            "next_place": self._next_place,
            "groups": list(groups.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, before anything runs: what was rolled out is scored next, what was not is rolled out first."""
        self.ledger.load_state_dict(state["ledger"])
        self.run.prompts.load_state_dict(state["prompts"])
        self._position, self._next_place = state["prompts"], state["next_place"]
        for group in state["groups"]:
            self.ledger.admit(group.place)
            if group.rewards:
                self.buffer.restore(group)
                self.ledger.move([group], "train_buffer")
            elif group.trajectories:
                self.queue.restore(group)
                self.ledger.move([group], "sample_queue")
            else:
                self._again.append(group)


def _failed(stage: str, error: BaseException) -> PipelineError:
    return PipelineError(
        f"stage {stage} failed: {type(error).__name__}: {error} Resume from the newest checkpoint once it is mended.",
        stage=stage,
    )


def _silent(rewards: Scores) -> bool:
    """All the same: no sample is better than another."""
    return all(reward == rewards[0] for reward in rewards)
