"""How much the pipeline has in hand: how many prompts may be rolled out now, and when an update need not wait for all of its.

Nothing here reads a clock: what is decided depends on what has happened, so a test can run it in no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_adaptor.config.pipeline import PipelineConfig


def admissible(max_staleness: int, batch: int, in_flight: int) -> int:
    """How many more prompts may enter, so that none is trained on too late.

    AReaL's rule (arXiv 2505.24298): accepted + running <= (max_staleness + version + 1) x batch. The version counts whole
    batches that were trained on, and those are on both sides. A prompt that was dropped has given its place back.

    A prompt is trained on after those that were admitted before it. With so few of them its update comes at most
    `max_staleness` versions after its first token, unless others overtake it.
    """
    return max(0, (max_staleness + 1) * batch - in_flight)


@dataclass
class RateMatcher:
    """Rollouts at the rate at which their results are used.

    While the sample queue is above its high mark and rises, or is full, fewer prompts are rolled out at a time; while it is
    below its low mark and falls, or is empty, more again, up to `most`. That is judged each time as many groups have come as
    run at a time, so by rollouts that have felt the last change. (Judged by the marks alone, concurrency would swing from one
    end to the other: the queue adds up what is too much.) Below the train buffer's low mark updates take what there is (at least
    `fewest`), until it is above its high mark again.

    Args:
        config: the marks, as shares of the buffers' bounds.
        most: prompts rolled out at a time when nothing holds them back.
        batch: prompts of a whole update.
    """

    config: PipelineConfig
    most: int
    batch: int
    unit: int = 1
    """Prompts of a mini-batch: an update is made of whole ones."""
    concurrency: int = field(init=False)
    early: bool = field(init=False, default=False)
    """Whether updates may be smaller now."""
    slowed: int = field(init=False, default=0)
    """How often rollouts were slowed down; `quickened`: how often undone."""
    quickened: int = field(init=False, default=0)
    early_updates: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.concurrency = self.most
        self._until_next = 0
        self._fill = 0.0
        """How full the queue was when that was last judged."""

    def arrived(self, queue_fill: float) -> None:
        """A group has reached the sample queue, which is this full now, those that wait to get in included."""
        self._until_next -= 1
        if self._until_next > 0:
            return
        before, self._fill = self._fill, queue_fill
        rises = queue_fill > before or queue_fill >= max(1.0, before)
        falls = queue_fill < before or queue_fill == before == 0
        if queue_fill >= self.config.queue_high and rises and self.concurrency > 1:
            self.concurrency -= 1
            self.slowed += 1
        elif queue_fill <= self.config.queue_low and falls and self.concurrency < self.most:
            self.concurrency += 1
            self.quickened += 1
        self._until_next = self.concurrency

    def wanted(self, buffered: int) -> int:
        """Prompts that the next update waits for, while this many are in the train buffer."""
        if not (self.config.early_updates and self.config.max_staleness):
            return self.batch
        if buffered <= self.config.buffer_low * self.batch:
            self.early = True
        elif buffered >= self.config.buffer_high * self.batch:
            self.early = False
        return self.fewest if self.early else self.batch

    @property
    def fewest(self) -> int:
        """Prompts of the smallest early update."""
        return max(1, math.ceil(self.config.early_fraction * self.batch / self.unit)) * self.unit

    def taken(self, buffered: int) -> int:
        """Prompts of an update, with so many there."""
        return min(self.batch, buffered // self.unit * self.unit)

    def metrics(self) -> dict[str, float]:
        """The decisions, for the log."""
        return {
            "pipeline/concurrency": float(self.concurrency),
            "pipeline/slowed": float(self.slowed),
            "pipeline/quickened": float(self.quickened),
            "pipeline/early_updates": float(self.early_updates),
        }
