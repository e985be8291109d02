"""Tells a stage that stands still from one that has nothing to do, and where it stands."""

from __future__ import annotations

import asyncio
import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_adaptor.errors import PipelineError

WATCH_S = 0.5
"""Between two looks."""


class Watchdog:
    """Raises for the first stage that had work for `timeout_s` and began or finished none of it.

    Args:
        timeout_s: longest time without progress, in seconds.
        stacks: file for all stacks, of threads and tasks, when that happens.
        clock: seconds.
    """

    def __init__(self, timeout_s: float, stacks: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.stacks = stacks
        self._clock = clock
        self._busy: dict[str, int] = {}
        self._since: dict[str, float] = {}

    @contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """A piece of work of a stage; its beginning and its end are progress."""
        self._busy[stage] = self._busy.get(stage, 0) + 1
        self._since[stage] = self._clock()
        try:
            yield
        finally:
            self._busy[stage] -= 1
            self._since[stage] = self._clock()

    def check(self) -> None:
        """Raise `PipelineError` for a stage that stands still: the first that did, others may wait for it."""
        late = self._clock() - self.timeout_s
        stalled = [stage for stage, pieces in self._busy.items() if pieces and self._since[stage] < late]
        if stalled:
            stage = min(stalled, key=self._since.__getitem__)
            self._tell_stacks()
            raise PipelineError(
                f"stage {stage} has {self._busy[stage]} pieces of work and made no progress for {self.timeout_s:.0f} s; where it "
                f"stands is in {self.stacks}. Raise pipeline.stall_timeout_s if it is only slow; else resume from the newest "
                "checkpoint.",
                stage=stage,
            )

    async def watch(self, also: Callable[[], None]) -> None:
        """Check until cancelled, and `also` each time. Should the event loop itself stand still, the stacks are told too."""
        with self.stacks.open("a") as late:
            try:
                while True:
                    faulthandler.dump_traceback_later(self.timeout_s + 10 * WATCH_S, file=late)
                    await asyncio.sleep(WATCH_S)
                    self.check()
                    also()
            finally:
                faulthandler.cancel_dump_traceback_later()

    def _tell_stacks(self) -> None:
        with self.stacks.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            for task in asyncio.all_tasks():
                task.print_stack(file=file)
