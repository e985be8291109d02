"""SIGINT and SIGTERM end a run at the next step's end, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import sys
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """Within this context the first SIGINT or SIGTERM only asks; calling the object tells whether one came.

    Elsewhere than in the main thread, where Python allows no handlers, it never asks.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether one came."""
        return self._asked

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nstopping after this step, with a checkpoint; once more to stop at once", file=sys.stderr, flush=True)
