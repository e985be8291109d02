"""Prompts beside an event loop: what has come is not kept back by what is still awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from verl_adaptor.threads import in_daemon_thread

if TYPE_CHECKING:
    from verl_adaptor.data import PromptSource
    from verl_adaptor.samples import Prompt

AT_ONCE_S = 0.05
"""Prompts that come within this of the first have come at once: they are taken together."""


class PromptReader:
    """Reads a source in a daemon thread, no further than it was asked to; so a slow or silent source holds nothing up.

    Args:
        prompts: nobody else reads them meanwhile.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self.prompts = prompts
        self._found: deque[tuple[Prompt, dict[str, Any]]] = deque()
        """Not taken yet, with the position after each."""
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._told = False
        """Whether the event loop is about to look: it is told of many at once."""

    async def take(self, most: int) -> tuple[list[Prompt], dict[str, Any]]:
        """The next prompts, at least one and at most `most`, and the position after them.

        Raises:
            DataError: what the source raised, once the prompts before are taken.
        """
        while not self._found:
            self._reading = self._reading or self._read(most)
            if self._reading.done():
                self._reading.result()  # raises: one that ended well is let go
            self._news.clear()
            await self._news.wait()
        if self._reading is not None and len(self._found) < most:
            await asyncio.wait({self._reading}, timeout=AT_ONCE_S)
        taken = [self._found.popleft() for _ in range(min(most, len(self._found)))]
        return [prompt for prompt, _ in taken], taken[-1][1]

    def _read(self, most: int) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()

        def work() -> None:
            for _ in range(most):
                prompt = next(self.prompts)
                self._found.append((prompt, self.prompts.state_dict()))
                if not self._told:
                    self._told = True
                    loop.call_soon_threadsafe(self._tell)

        reading = loop.create_task(in_daemon_thread(work, "prompts"))
        reading.add_done_callback(self._end)
        return reading

    def _tell(self) -> None:
        self._told = False  # before anybody looks: what is appended from now on is told again
        self._news.set()

    def _end(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._reading = None
        self._news.set()
