"""Host memory over the steps of a run, and a warning long before it is out."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

WINDOW = 20
"""Steps over which memory must shrink all the time to be told."""


def available_bytes() -> int | None:
    """What this machine can still give, all its processes considered; None where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


class MemoryWatch:
    """Warns where each step costs memory that does not come back, so that the run would not reach its end (C25).

    It looks at the machine and not at this process, because what leaks may be a rank elsewhere on it. The loss of a step is the
    median of those of the window: what is loaded once counts for nothing.

    Args:
        read: bytes that are available, or None.
    """

    def __init__(self, read: Callable[[], int | None] = available_bytes) -> None:
        self._read = read
        self._free: deque[int] = deque(maxlen=WINDOW + 1)
        self._told = False

    def look(self, step: int, total_steps: int) -> None:
        """To be called after each step."""
        free = self._read()
        if free is None or self._told:
            return
        self._free.append(free)
        losses = [before - after for before, after in zip(self._free, list(self._free)[1:], strict=False)]
        if len(losses) < WINDOW or (loss := statistics.median(losses)) <= 0:
            return
        fell = sum(each > 0 for each in losses)
        steps = free // int(loss)
        if fell >= 0.9 * WINDOW and steps < total_steps - step:
            self._told = True
            logger.warning(
                "host memory shrinks by %.0f MiB a step and would be out at about step %d of %d: something keeps what it should "
                "let go (a reward or rollout function, a sink, another process of this machine). A run can be stopped with "
                "Ctrl-C and resumed.",
                loss / 2**20, step + steps, total_steps,
            )  # fmt: skip
