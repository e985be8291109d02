"""How far the run is: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

FIELDS = (
    ("reward/mean", "reward", ".3f"),
    ("eval/reward", "held-out", ".3f"),
    ("kl/reference", "kl", ".4f"),
    ("tokens_per_second", "tok/s", ".0f"),
)
"""Metrics on the line: key, label, format."""
QUIET_SECONDS = 2.0
"""Shortest time between two plain lines, so that a fast run does not flood a log; first and last always show."""
_LONGEST = timedelta(days=9999)
"""Estimated at most: a loop of one's own may log any number as a step's time."""


class ProgressDisplay:
    """Shows one line a step on a stream.

    `stream` is standard error by default; a live line if it is a terminal, plain lines if not. `start` is the step
    that is already done, `clock` returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._clock = total_steps, clock
        self._stream = stream or sys.stderr
        self._seconds: deque[float] = deque(maxlen=10)  # of the last steps, for the estimate
        self._last_time: float | None = None
        self._last_shown = -math.inf
        self._live = _live_line(self._stream, total_steps, start) if self._stream.isatty() else None

    def expect(self, total_steps: int) -> None:
        """It takes that many steps, as it turns out."""
        self._total = total_steps

    def update(self, step: int, metrics: Mapping[str, float]) -> str:
        """Show a finished step; returns its plain line: ``step 12/60 reward 0.512 kl 0.0031 tok/s 1234 eta 0:01:02``."""
        facts = self._facts(step, metrics)
        line = f"step {step}/{self._total} {facts}".rstrip()
        if self._live:
            self._live.update(self._live.task_ids[0], completed=step, total=self._total, facts=facts)
        elif step >= self._total or self._clock() - self._last_shown >= QUIET_SECONDS:
            self._last_shown = self._clock()
            self.note(line)
        return line

    def _facts(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"{label} {metrics[key]:{form}}" for key, label, form in FIELDS if key in metrics]
        remaining = self._remaining(step, metrics)
        return " ".join(parts if remaining is None else [*parts, f"eta {remaining}"])

    def _remaining(self, step: int, metrics: Mapping[str, float]) -> timedelta | None:
        """Mean time of the last steps x steps to go; None before the first step was timed."""
        now = self._clock()
        seconds = metrics.get("time/step", math.nan if self._last_time is None else now - self._last_time)
        self._last_time = now
        if 0 <= seconds < math.inf:
            self._seconds.append(seconds)
        if not self._seconds:
            return None
        left = statistics.fmean(self._seconds) * max(self._total - step, 0)
        return timedelta(seconds=round(min(left, _LONGEST.total_seconds())))

    def note(self, text: str) -> None:
        """Print a line, above the live one where there is one."""
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state of the live line on the screen. May be called again."""
        if self._live:
            self._live.stop()


def _live_line(stream: TextIO, total_steps: int, start: int) -> Progress:
    live = Progress(
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        console=Console(file=stream, force_terminal=True),
    )
    live.add_task("train", total=total_steps, completed=start, facts="")
    live.start()
    return live


class NoteHandler(logging.Handler):
    """Passes warnings to a display, so that they stand above the live line instead of tearing it."""

    def __init__(self, display: ProgressDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._display.note(f"{record.levelname.lower()}: {self.format(record)}")
