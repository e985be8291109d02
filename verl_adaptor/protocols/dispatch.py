"""Who steps an engine, and where its deltas go.

Every call becomes sample requests in one table. Whoever waits drives: a sync caller steps the engine in its own thread,
an event loop steps it from one driver task, in a thread of its own, which also admits what callers of the loop have submitted
and drops what they have left: an engine elsewhere may take its time for that, or never answer, and the event loop waits for
none of it. Each step is taken under one lock and its deltas go to the requests they
belong to. So sync, async and streaming calls share batches, checks, versions and results (law I5), and an engine that
nobody waits for runs no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from verl_adaptor.errors import EngineError, EnginePaused
from verl_adaptor.protocols.requests import SampleRequest
from verl_adaptor.samples import Delta
from verl_adaptor.threads import DaemonExecutor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAUSE_TIMEOUT_S = 600.0
"""Longest that a request waits for a paused engine to be resumed."""
PAUSE_POLL_S = 0.002
SETTLE_TURNS = 8
"""Turns of the event loop granted to woken callers before the next step, so that a follow-up request joins it."""


class Steppable(Protocol):
    """The primitives of a backend that the dispatcher calls, always under its lock."""

    tokenizer: PreTrainedTokenizerBase | None

    @property
    def policy_version(self) -> int:
        """What is served now."""
        ...

    def _check_serving(self) -> None: ...
    def _admit(self, samples: Sequence[SampleRequest]) -> None: ...
    def _step(self) -> list[Delta]: ...
    def _drop(self, keys: Sequence[tuple[str, int]]) -> None: ...
    def _wake(self) -> None: ...
    def _rest(self) -> None: ...


class FairLock:
    """A re-entrant lock that is granted in turn (C13).

    With a plain one, a thread that steps in a loop takes it again before a thread that wants to abort has woken up.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._held = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, timeout_s: float = threading.TIMEOUT_MAX) -> bool:
        """Whether it was had within that time."""
        me = threading.get_ident()
        if self._owner != me:
            until = time.monotonic() + timeout_s
            if not self._turn.acquire(timeout=timeout_s):
                return False
            try:  # who waits keeps the turn, so that who releases cannot overtake
                if not self._held.acquire(timeout=max(0.0, until - time.monotonic())):
                    return False
            finally:
                self._turn.release()
            self._owner = me
        self._depth += 1
        return True

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Undo one `acquire`."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._held.release()


class Dispatcher:
    """The table of running samples of one engine."""

    def __init__(self, engine: Steppable, name: str) -> None:
        self.lock = FairLock()
        self.samples: dict[tuple[str, int], SampleRequest] = {}
        self.held = False
        """While True nothing is stepped: the engine is paused."""
        self._engine = engine
        self._awake = False
        self._name = name
        self._inbox: deque[SampleRequest] = deque()
        """Submitted and not yet admitted."""
        self._departed: deque[SampleRequest] = deque()
        """Of callers that wait no longer, and not yet dropped."""
        self._outbox: deque[tuple[SampleRequest, Delta]] = deque()
        self._drivers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._stepper: DaemonExecutor | None = None
        self._guard = threading.Lock()
        """Of drivers and deliveries, never held for long: an event loop may wait for it, and never for `lock`."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of all that is not finished, oldest first; what was only submitted comes last."""
        ids = [request_id for request_id, _ in self.samples]
        return tuple(dict.fromkeys(ids + [sample.request_id for sample in tuple(self._inbox)]))

    # -- the table -----------------------------------------------------------------------------------------------

    def enter(self, samples: Sequence[SampleRequest]) -> None:
        """Admit new samples."""
        with self.lock:
            self._rouse()
            try:
                self._engine._admit(samples)
                self.samples.update((s.key, s) for s in samples)
            finally:
                self._settle_down()

    def submit(self, samples: Sequence[SampleRequest], loop: asyncio.AbstractEventLoop) -> None:
        """Have new samples admitted before the next step that this event loop drives. Returns at once."""
        self._inbox.extend(samples)
        self._ensure_driver(loop)

    def _take_in(self) -> None:
        """Admit what was submitted, all at once; where that fails, its callers are told."""
        with self.lock:
            self.let_go()
            samples = [self._inbox.popleft() for _ in range(len(self._inbox))]
            if not samples:
                return
            try:
                self._engine._check_serving()
                self.enter(samples)
            except Exception as cause:
                error: Exception = cause
                if not isinstance(cause, EngineError):
                    error = EngineError(f"requests could not be admitted: {cause}")
                    error.__cause__ = cause
                self._fail(samples, error)

    def leave(self, samples: Sequence[SampleRequest]) -> None:
        """A caller stops waiting: whatever of its samples still runs is dropped."""
        self._departed.extend(samples)
        self.let_go()

    def depart(self, samples: Sequence[SampleRequest]) -> None:
        """The same for a caller on an event loop: as soon as the engine can be had. Returns at once."""
        self._departed.extend(sample for sample in samples if not sample.done)
        if self._departed and self._stepper is not None:
            with contextlib.suppress(RuntimeError):  # it was shut down: nothing runs any more
                self._stepper.submit(self.let_go)

    def let_go(self) -> None:
        """Drop what callers have left. An error in it ends every running sample."""
        if not self._departed:
            return
        with self.lock:
            gone = [self._departed.popleft() for _ in range(len(self._departed))]
            for sample in gone:
                with contextlib.suppress(ValueError):  # it was admitted
                    self._inbox.remove(sample)
            left = [s.key for s in gone if self.samples.pop(s.key, None) is not None]
            if not left:
                return
            try:
                self._engine._drop(left)
                self._settle_down()
            except Exception as cause:
                error = EngineError(f"a request could not be dropped: {cause}")
                error.__cause__ = cause
                self.fail_all(error)
                raise error from cause

    def abort(self, request_ids: set[str]) -> None:
        """Finish these requests as they stand, and free their places."""
        with self.lock:
            self._take_in()
            running = [s for s in self.samples.values() if s.request_id in request_ids]
            self._engine._drop([s.key for s in running])
            for sample in running:
                self._deliver(sample, Delta(request_id=sample.request_id, index=sample.index, finish_reason="abort"))
            self._settle_down()
            self.flush()

    def fail_all(self, error: BaseException) -> None:
        """End every running sample with an error, and free their places."""
        with self.lock:
            failed = list(self.samples.values())
            self.samples.clear()
            self._fail([*failed, *(self._inbox.popleft() for _ in range(len(self._inbox)))], error)
            self.flush()
            self._engine._drop(
                [s.key for s in failed]
            )  # last: an engine that is beyond dropping must not hide the error
            self._settle_down()

    def abandon(self, error: BaseException) -> None:
        """Tell callers on event loops that nothing will come, without the lock: the step that holds it does not return."""
        self._fail([*self.samples.values(), *self._inbox], error)
        self.flush()

    def _fail(self, samples: Sequence[SampleRequest], error: BaseException) -> None:
        """Post an error to those who wait for these samples."""
        for sample in samples:
            sample.error = error
            self._post(sample, Delta(request_id=sample.request_id, index=sample.index))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within this block the engine is awake, whether anything runs or not."""
        with self.lock:
            self._rouse()
            try:
                yield
            finally:
                self._settle_down()

    def _rouse(self) -> None:
        if not self._awake:
            self._engine._wake()
            self._awake = True

    def _settle_down(self) -> None:
        """Let the engine rest once nothing runs."""
        if self._awake and not self.samples:
            self._awake = False
            self._engine._rest()

    # -- stepping ------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One step and its deltas; an error in it ends every running sample, and the engine lives on."""
        with self.lock:
            self._step()
            self.flush()

    def run(self, samples: Sequence[SampleRequest]) -> None:
        """Step until these samples are done; while the engine is held, wait for it."""
        held_since: float | None = None
        while not all(s.done for s in samples):
            if self.held:
                held_since = held_since or time.monotonic()
                if time.monotonic() - held_since > PAUSE_TIMEOUT_S:
                    self._fail_held()
                time.sleep(PAUSE_POLL_S)
            else:
                held_since = None
                self.advance()

    def drain(self) -> None:
        """Step until nothing runs."""
        with self.lock:
            while self.samples:
                self.advance()

    def book(self, deltas: Sequence[Delta]) -> None:
        """Deltas of the policy that is served now, for their samples; those of samples that are gone are dropped."""
        for delta in deltas:
            sample = self.samples.get((delta.request_id, delta.index))
            if sample is not None:
                self._deliver(sample, delta)

    def flush(self) -> bool:
        """Hand the deltas booked so far to those who wait for them; True if there were any."""
        with self._guard:
            count = len(self._outbox)
            for _ in range(count):
                sample, delta = self._outbox.popleft()
                if sample.sink is not None:
                    sample.sink(sample, delta)
            return count > 0

    def _step(self) -> None:
        """One step; its deltas are booked and wait for `flush`."""
        with self.lock:
            try:
                self.let_go()
                if not self.samples or self.held:
                    return
                self.book(self._engine._step())
                self._settle_down()
            except Exception as cause:
                error = EngineError(f"a generation step failed: {cause}")
                error.__cause__ = cause
                self.fail_all(error)

    def _step_until_news(self) -> None:
        """Steps until somebody must be told something: an event loop is not woken for tokens that nobody awaits."""
        self._take_in()
        while self.samples and not self.held and not self._outbox:
            self._step()
            self._take_in()

    def _fail_held(self) -> None:
        """Nobody waits for a held engine for ever."""
        self.fail_all(EnginePaused(f"the engine was not resumed within {PAUSE_TIMEOUT_S:.0f} s."))

    # -- the event loop's side -----------------------------------------------------------------------------------

    def _ensure_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have this event loop step the engine as long as anything runs."""
        with self._guard:
            if self._stepper is None:  # one thread, so that steps do not each warm up a thread pool of their own
                self._stepper = DaemonExecutor(f"{self._name}-engine")
            self._drivers = {known: task for known, task in self._drivers.items() if not known.is_closed()}
            driver = self._drivers.get(loop)
            if driver is None or driver.done():
                coroutine = self._drive(loop, self._stepper)
                self._drivers[loop] = loop.create_task(coroutine, name=f"{self._name}-engine-driver")

    def shutdown(self) -> None:
        """End the stepping thread, if there is one. Not to be called under the lock, which that thread may want."""
        with self._guard:
            stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.shutdown(cancel_futures=True)

    async def _drive(self, loop: asyncio.AbstractEventLoop, stepper: DaemonExecutor) -> None:
        """Callers that are ready submit before each step: so the same callers make the same batches every time.

        For that, deltas are handed out here, between two steps, and not while the step that made them still runs.
        """
        held_since: float | None = None
        woken = True
        try:
            while self.samples or self._inbox:
                for _ in range(SETTLE_TURNS if woken else 1):
                    await asyncio.sleep(0)
                if self.held:
                    held_since = held_since or time.monotonic()
                    if time.monotonic() - held_since > PAUSE_TIMEOUT_S:
                        await loop.run_in_executor(stepper, self._fail_held)
                    await asyncio.sleep(PAUSE_POLL_S)
                    continue
                held_since = None
                await loop.run_in_executor(stepper, self._step_until_news)
                woken = self.flush()
        except Exception as cause:  # nobody awaits this task: those who wait for it must hear of it
            error = EngineError(f"the engine's driver failed: {cause}")
            error.__cause__ = cause
            self.fail_all(error)
        finally:
            with self._guard:
                self._drivers.pop(loop, None)
            self.flush()

    # -- delivery ------------------------------------------------------------------------------------------------

    def _deliver(self, sample: SampleRequest, delta: Delta) -> None:
        """Book a delta, add its text, stop at a stop string, and post it."""
        version = self._engine.policy_version
        sample.take(delta, version)
        added = ""
        if self._engine.tokenizer is not None and (sample.done or sample.wants_text):
            added = sample.new_text(self._engine.tokenizer)
            if sample.finish_reason in (None, "length") and any(stop in sample.text for stop in sample.params.stop):
                if not sample.done:
                    self._engine._drop([sample.key])
                sample.finish_reason = "stop"
        if sample.done:
            self.samples.pop(sample.key, None)
        self._post(sample, delta, added, version)

    def _post(self, sample: SampleRequest, delta: Delta, text: str = "", version: int = 0) -> None:
        """Put a delta into the outbox, if anybody waits for it."""
        if sample.sink is None or not (sample.done or sample.streams):
            return
        whole = Delta(
            request_id=sample.request_id,
            index=sample.index,
            token_ids=delta.token_ids,
            log_probs=delta.log_probs,
            text=text,
            finish_reason=sample.finish_reason,
            policy_version=version,
        )
        self._outbox.append((sample, whole))
