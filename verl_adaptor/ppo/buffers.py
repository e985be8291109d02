"""The two buffers of the asynchronous pipeline, and the ledger that knows where every prompt is.

All of it lives in one event loop and needs no lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from verl_adaptor.errors import PipelineError
from verl_adaptor.ppo.reward import Scores
from verl_adaptor.samples import Prompt, Trajectory

Stage = Literal["rollout", "sample_queue", "reward", "train_buffer", "update"]
"""Where a prompt can be between its admission and its end."""
_TOKEN_BYTES = 100
"""About what one token of a trajectory takes: an id, a mask value and a log-prob, as Python objects in tuples."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All samples of one prompt: what the pipeline moves. They are compared with each other, so they stay together."""

    place: int
    """The prompt's place in the run's data; each place is admitted once."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...] = ()
    rewards: tuple[float | list[float], ...] = ()
    begun: int = 0
    """The policy version that was served when its rollouts began."""

    @cached_property
    def version(self) -> int:
        """The policy version of the oldest token; of rollouts that run, or do not tell, the one that they began with."""
        told = [t.policy_version if t.version_runs else self.begun for t in self.trajectories]
        return min(told, default=self.begun)

    @cached_property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in self.trajectories)
        return tokens * _TOKEN_BYTES + sum(len(t.text) for t in self.trajectories)

    def scored(self, rewards: Scores) -> Group:
        """With its rewards, one for each trajectory."""
        return replace(self, rewards=tuple(rewards))


class Ledger:
    """Every prompt that was ever admitted is trained, dropped for a reason, or in flight at one stage (law Q1)."""

    def __init__(self) -> None:
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        """Reason -> prompts."""
        self._at: dict[int, Stage] = {}

    def admit(self, place: int) -> None:
        """A prompt enters. Raises `PipelineError` for one that is there already."""
        if place in self._at:
            raise PipelineError(f"prompt {place} was admitted twice; this is a defect of the pipeline.")
        self.admitted += 1
        self._at[place] = "rollout"

    def move(self, groups: Iterable[Group], stage: Stage) -> None:
        """Groups go on to a stage."""
        for group in groups:
            self._known(group)
            self._at[group.place] = stage

    def train(self, groups: Iterable[Group]) -> None:
        """Groups were part of an update that is done."""
        for group in groups:
            self._leave(group)
            self.trained += 1

    def drop(self, groups: Iterable[Group], reason: str) -> None:
        """Groups will never be trained on."""
        for group in groups:
            self._leave(group)
            self.dropped[reason] += 1

    def stages(self) -> dict[Stage, int]:
        """Prompts in flight at each stage, where there are any."""
        return dict(Counter(self._at.values()))

    @property
    def in_flight(self) -> int:
        """Prompts in flight."""
        return len(self._at)

    def check(self) -> None:
        """Raise `PipelineError` unless admitted = trained + dropped + in flight."""
        known = self.trained + self.dropped.total() + self.in_flight
        if self.admitted != known:
            raise PipelineError(
                f"{self.admitted} prompts were admitted and {known} are accounted for (trained {self.trained}, dropped "
                f"{dict(self.dropped)}, in flight {self.stages()}); this is a defect of the pipeline."
            )

    def metrics(self) -> dict[str, float]:
        """Counts for the log."""
        reasons = {f"pipeline/dropped_{reason}": float(count) for reason, count in self.dropped.items()}
        stages = {f"pipeline/at_{stage}": float(count) for stage, count in self.stages().items()}
        return {
            "pipeline/admitted": float(self.admitted),
            "pipeline/trained": float(self.trained),
            "pipeline/dropped": float(self.dropped.total()),
        } | reasons | stages  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The counts; what is in flight is saved as groups, which are admitted again when they are restored."""
        return {"trained": self.trained, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`, with nothing in flight yet."""
        self._at.clear()
        self.trained, self.dropped = state["trained"], Counter(state["dropped"])
        self.admitted = self.trained + self.dropped.total()

    def _known(self, group: Group) -> None:
        if group.place not in self._at:
            raise PipelineError(
                f"prompt {group.place} moves without being in flight; this is a defect of the pipeline."
            )

    def _leave(self, group: Group) -> None:
        self._known(group)
        del self._at[group.place]


class _Buffer:
    """Whole groups, oldest first, with a bound in samples and one in bytes."""

    def __init__(self, max_samples: int, max_bytes: int) -> None:
        self._max_samples, self._max_bytes = max_samples, max_bytes
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Condition()
        self.samples = 0
        self.nbytes = 0

    def __len__(self) -> int:
        """Groups held."""
        return len(self._groups)

    @property
    def groups(self) -> Sequence[Group]:
        """What is held, oldest first."""
        return tuple(self._groups)

    @property
    def fill(self) -> float:
        """How full it is: 0 to 1, or more where a single group is over a bound."""
        return max(self.samples / self._max_samples, self.nbytes / self._max_bytes)

    def _fits(self, group: Group) -> bool:
        """A group that is over a bound by itself fits where nothing else is."""
        fits = (
            self.samples + len(group.trajectories) <= self._max_samples
            and self.nbytes + group.nbytes <= self._max_bytes
        )
        return fits or not self._groups

    def restore(self, group: Group) -> None:
        """Append a group of a checkpoint, whatever the bounds."""
        self._append(group)

    def _append(self, group: Group) -> None:
        self._groups.append(group)
        self._count(group, 1)

    def _pop(self) -> Group:
        group = self._groups.popleft()
        self._count(group, -1)
        return group

    def _remove(self, groups: Sequence[Group]) -> None:
        gone = {group.place for group in groups}
        for group in groups:
            self._count(group, -1)
        self._groups = deque(group for group in self._groups if group.place not in gone)

    def _count(self, group: Group, sign: int) -> None:
        self.samples += sign * len(group.trajectories)
        self.nbytes += sign * group.nbytes


class SampleQueue(_Buffer):
    """Between rollouts and rewards: full, it makes rollouts wait."""

    def __init__(self, max_samples: int, max_bytes: int) -> None:
        super().__init__(max_samples, max_bytes)
        self._waiting = 0
        """Samples that wait to get in."""

    @property
    def pressure(self) -> float:
        """How full it would be with those that wait to get in."""
        return max(self.fill, (self.samples + self._waiting) / self._max_samples)

    async def put(self, group: Group) -> None:
        """Append a group once there is room."""
        async with self._changed:
            self._waiting += len(group.trajectories)
            try:
                await self._changed.wait_for(lambda: self._fits(group))
            finally:
                self._waiting -= len(group.trajectories)
            self._append(group)
            self._changed.notify_all()

    async def take(self, samples: int) -> list[Group]:
        """The oldest groups, as many as have at most this many samples; at least one, once there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self) > 0)
            taken = [self._pop()]
            while self._groups and _samples(taken) + len(self._groups[0].trajectories) <= samples:
                taken.append(self._pop())
            self._changed.notify_all()
            return taken


class TrainBuffer(_Buffer):
    """Between rewards and updates: full, it gives up the oldest groups, which are the furthest from the policy."""

    async def put(self, group: Group) -> list[Group]:
        """Append a group. Returns what had to go for it."""
        async with self._changed:
            gone = []
            while not self._fits(group):
                gone.append(self._pop())
            self._append(group)
            self._changed.notify_all()
            return gone

    async def remove_older(self, version: int) -> list[Group]:
        """Take out the groups with a token of an older policy than this."""
        async with self._changed:
            gone = [group for group in self._groups if group.version < version]
            self._remove(gone)
            return gone

    async def wait(self, count: int, timeout_s: float | None = None) -> bool:
        """Until there are this many groups; False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(self) >= count)
        except TimeoutError:
            return False
        return True

    async def take(self, count: int) -> list[Group]:
        """Up to this many groups: those of the oldest policy first, and of those the first of the data."""
        async with self._changed:
            taken = sorted(self._groups, key=lambda group: (group.version, group.place))[:count]
            self._remove(taken)
            self._changed.notify_all()
            return taken


def _samples(groups: Iterable[Group]) -> int:
    return sum(len(group.trajectories) for group in groups)
