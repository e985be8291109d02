"""Who steps an engine, and where its deltas go.

Every call becomes sample requests in one table. Whoever waits drives: a sync caller steps the engine in its own thread,
an event loop steps it from one driver task. Each step is taken under one lock and its deltas go to the requests they
belong to. So sync, async and streaming calls share batches, checks, versions and results (law I5), and an engine that
nobody waits for runs no thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from verl_adaptor.errors import EngineError, EnginePaused
from verl_adaptor.protocols.requests import SampleRequest
from verl_adaptor.samples import Delta

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAUSE_TIMEOUT_S = 600.0
"""Longest that an async request waits for a paused engine to be resumed."""
SETTLE_TURNS = 8
"""Turns of the event loop granted to woken callers before the next step, so that a follow-up request joins it."""


class Steppable(Protocol):
    """The primitives of a backend that the dispatcher calls, always under its lock."""

    tokenizer: PreTrainedTokenizerBase | None

    @property
    def policy_version(self) -> int:
        """What is served now."""
        ...

    def _admit(self, samples: Sequence[SampleRequest]) -> None: ...
    def _step(self) -> list[Delta]: ...
    def _drop(self, keys: Sequence[tuple[str, int]]) -> None: ...


class Dispatcher:
    """The table of running samples of one engine."""

    def __init__(self, engine: Steppable, name: str) -> None:
        self.lock = threading.RLock()
        self.samples: dict[tuple[str, int], SampleRequest] = {}
        self.held = False
        """While True nothing is stepped: the engine is paused."""
        self._engine = engine
        self._name = name
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]]
        self._drivers = weakref.WeakKeyDictionary()
        self._stepper: ThreadPoolExecutor | None = None

    # -- the table -----------------------------------------------------------------------------------------------

    def enter(self, samples: Sequence[SampleRequest]) -> None:
        """Admit new samples."""
        with self.lock:
            self._engine._admit(samples)
            self.samples.update((s.key, s) for s in samples)

    def leave(self, samples: Sequence[SampleRequest]) -> None:
        """A caller stops waiting: whatever of its samples still runs is dropped."""
        with self.lock:
            left = [s.key for s in samples if self.samples.pop(s.key, None) is not None]
            if left:
                self._engine._drop(left)

    def abort(self, request_ids: set[str]) -> None:
        """Finish these requests as they stand, and free their places."""
        with self.lock:
            running = [s for s in self.samples.values() if s.request_id in request_ids]
            self._engine._drop([s.key for s in running])
            for sample in running:
                self._deliver(sample, Delta(request_id=sample.request_id, index=sample.index, finish_reason="abort"))

    def fail_all(self, error: BaseException) -> None:
        """End every running sample with an error."""
        with self.lock:
            failed = list(self.samples.values())
            self.samples.clear()
            for sample in failed:
                sample.error = error
                sample.sink(sample, Delta(request_id=sample.request_id, index=sample.index))

    # -- stepping ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One step and its deltas; an error in it ends every running sample, and the engine lives on."""
        with self.lock:
            if not self.samples:
                return
            try:
                deltas = self._engine._step()
            except Exception as cause:
                self._engine._drop(list(self.samples))
                error = EngineError(f"a generation step failed: {cause}")
                error.__cause__ = cause
                self.fail_all(error)
                return
            for delta in deltas:
                sample = self.samples.get((delta.request_id, delta.index))
                if sample is not None:
                    self._deliver(sample, delta)

    def drain(self) -> None:
        """Step until nothing runs."""
        with self.lock:
            while self.samples:
                self.advance()

    def ensure_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have this event loop step the engine as long as anything runs."""
        driver = self._drivers.get(loop)
        if driver is None or driver.done():
            self._drivers[loop] = loop.create_task(self._drive(loop), name=f"{self._name}-engine-driver")

    def shutdown(self) -> None:
        """Let the stepping thread, if there is one, end."""
        if self._stepper is not None:
            self._stepper.shutdown(wait=False, cancel_futures=True)
            self._stepper = None

    async def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Callers that are ready submit before each step: so the same callers make the same batches every time."""
        if self._stepper is None:  # one thread, so that steps do not each warm up a thread pool of their own
            self._stepper = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-engine")
        held_since: float | None = None
        while self.samples:
            if self.held:
                held_since = held_since or time.monotonic()
                if time.monotonic() - held_since > PAUSE_TIMEOUT_S:
                    self.fail_all(EnginePaused(f"the engine was not resumed within {PAUSE_TIMEOUT_S:.0f} s."))
                await asyncio.sleep(0.002)
                continue
            held_since, before = None, len(self.samples)
            await asyncio.sleep(0)
            await loop.run_in_executor(self._stepper, self.advance)
            for _ in range(SETTLE_TURNS if len(self.samples) != before else 0):
                await asyncio.sleep(0)

    # -- delivery ------------------------------------------------------------------------------------------------

    def _deliver(self, sample: SampleRequest, delta: Delta) -> None:
        """Book a delta, add its text, stop at a stop string, and hand it on."""
        version = self._engine.policy_version
        sample.take(delta, version)
        added = ""
        if self._engine.tokenizer is not None and (sample.done or sample.wants_text):
            added = sample.new_text(self._engine.tokenizer)
            if not sample.done and any(stop in sample.text for stop in sample.params.stop):
                sample.finish_reason = "stop"
                self._engine._drop([sample.key])
        if sample.done:
            self.samples.pop(sample.key, None)
        sample.sink(
            sample,
            Delta(
                request_id=sample.request_id,
                index=sample.index,
                token_ids=delta.token_ids,
                log_probs=delta.log_probs,
                text=added,
                finish_reason=sample.finish_reason,
                policy_version=version,
            ),
        )
