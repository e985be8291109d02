"""`WorkerGroup`: one call on all ranks at once, and the judgement of who failed.

How ranks are started and reached is the business of `Workers`: Ray actors, or the processes that torchrun made.
"""

from __future__ import annotations

import abc
import atexit
import functools
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_adaptor import errors
from verl_adaptor.errors import VerlAdaptorError, WorkerDied, WorkerError, WorkerTimeout
from verl_adaptor.execution.wire import decode, encode
from verl_adaptor.execution.worker import Reply, Request


def grace(timeout_s: float) -> float:
    """Once a rank has failed or is overdue, the others get this long, in seconds, to say how they fared."""
    return min(30.0, max(2.0, timeout_s / 2))


_ECHO = re.compile(r"gloo|nccl|c10d|connection (reset|closed|refused)|broken pipe|timed out", re.IGNORECASE)
"""What a rank says when it is another that failed."""


@dataclass(frozen=True)
class Answer:
    """The rank did it; `value` is its result, where it was asked for."""

    value: Any = None


@dataclass(frozen=True)
class Raised:
    """The rank's process lives, and the operation raised."""

    kind: str
    """Name of the class in `verl_adaptor.errors`; empty for any other exception."""
    sentence: str
    trace: str = ""

    @property
    def is_echo(self) -> bool:
        """Whether it only tells that another rank is gone or late."""
        return not self.kind and bool(_ECHO.search(self.sentence))


@dataclass(frozen=True)
class Died:
    """The rank's process is gone."""

    how: str


@dataclass(frozen=True)
class Silent:
    """No answer in time."""

    doing: str
    """Where the rank was when asked; empty if it did not answer even that."""


Outcome = Answer | Raised | Died | Silent


def outcome(reply: Reply) -> Outcome:
    """What a worker's reply says."""
    return Answer(*reply[1:]) if reply[0] == "answer" else Raised(*reply[1:])


class Workers(abc.ABC):
    """The processes of a group: one implementation a way of starting them."""

    label: str
    """What the ranks are called in sentences: ``fsdp``."""
    world_size: int
    restartable = True
    share_memory = False
    """Whether the first rank is another process of this machine, so that shared memory reaches it."""

    @abc.abstractmethod
    def start(self) -> None:
        """Bring all ranks up. Raises `ConfigError` where there is no room, `WorkerError` where one does not come up."""

    @abc.abstractmethod
    def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Run `request` on all ranks; what became of each, by rank, no later than `timeout_s` and the grace."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End all processes, whatever they are doing; a second call does nothing."""

    def interrupt(self) -> None:  # noqa: B027
        """Make a `run` of another thread end, where that can be: its ranks are ended. `stop` follows."""


class WorkerGroup:
    """The ranks that one or more trainers and engines live on.

    After a failure that leaves ranks out of step the group is broken: its processes are ended, every call raises at once,
    and `restart` starts it afresh. An error of ours that every rank raised alike leaves it usable.

    Args:
        workers: the processes, not started yet.
        start_timeout_s: longest that `create` may take, in seconds.
        call_timeout_s: the same for `call`.
    """

    def __init__(self, workers: Workers, *, start_timeout_s: float, call_timeout_s: float) -> None:
        self.workers = workers
        self.start_timeout_s = start_timeout_s
        self.call_timeout_s = call_timeout_s
        self.broken: str | None = None
        """Why no call is possible; None while all is well."""
        self._closed = False
        self._lock = threading.RLock()
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._keys = 0
        workers.start()
        _open.add(self)
        _close_at_exit()

    @property
    def usable(self) -> bool:
        """Whether calls are possible: neither broken nor closed."""
        return self.broken is None and not self._closed

    def new_key(self, what: str) -> str:
        """A name for an object on this group, as it will stand in error sentences."""
        self._keys += 1
        return f"{what} #{self._keys}"

    def create(self, key: str, builder: str, arguments: Mapping[str, Any]) -> None:
        """Build an object on every rank by ``package.module:function`` and keyword arguments."""
        self._run(key, "create", ("create", key, builder, dict(arguments)), self.start_timeout_s)

    def derive(self, key: str, method: str, new_key: str, **kwargs: Any) -> None:
        """Keep what ``object.method(**kwargs)`` returns on every rank as an object of its own."""
        self._run(key, method, ("derive", key, method, new_key, kwargs), self.start_timeout_s)

    def call(self, key: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """``object.method(*args, **kwargs)`` on every rank; the first rank's result.

        Raises:
            VerlAdaptorError: what every rank raised alike; the group stays usable.
            WorkerDied, WorkerTimeout, WorkerError: ranks failed; the sentence names them, the operation and the last
                metrics. The group is broken.
        """
        return self._run(key, method, ("call", key, method, args, kwargs), self.call_timeout_s)[0]

    def call_each(self, key: str, method: str, *args: Any) -> list[Any]:
        """As `call`; every rank's result, by rank."""
        return self._run(key, method, ("ask", key, method, args), self.call_timeout_s)

    def note(self, key: str, metrics: Mapping[str, float]) -> None:
        """Remember the last metrics of an object, for the sentence of a later failure."""
        self._metrics[key] = metrics

    def drop(self, key: str) -> None:
        """Close an object on every rank; does nothing on a group that is broken or closed."""
        if self.usable:
            self._run(key, "close", ("drop", key), self.call_timeout_s)

    def restart(self) -> None:
        """Fresh processes if the group is broken; objects must be created again."""
        with self._lock:
            if self._closed:
                raise WorkerError("the worker group was closed; make a new trainer.")
            if self.broken and not self.workers.restartable:
                raise WorkerError(f"{self.broken} Start the run again; it goes on from its newest checkpoint.")
            if self.broken:
                self.workers.stop()
                self.workers.start()
                self.broken = None

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        if not self._closed:
            self._closed = True
            _open.discard(self)
            self.workers.stop()

    def _run(self, key: str, operation: str, request: Request, timeout_s: float) -> list[Any]:
        with self._lock:
            if self._closed or self.broken:
                raise WorkerError(self.broken or "the worker group was closed; make a new trainer.")
            try:
                outcomes = self.workers.run(encode(request), timeout_s)
            except BaseException:  # an interrupt, say: nobody knows how far each rank came
                self._break(f"{operation} of {key} was interrupted")
                raise
            error, usable = judge(outcomes, f"{operation} of the {key}", timeout_s, self._last(key))
            if error is None:
                return [decode(found.value) for found in outcomes if isinstance(found, Answer)]
            if not usable:
                self._break(str(error))
            raise error

    def _break(self, why: str) -> None:
        cure = "restart(checkpoint) starts fresh ones" if self.workers.restartable else "start the run again"
        self.broken = f"the worker processes were ended, because {why.rstrip('.')}; {cure}."
        self.workers.stop()

    def _last(self, key: str) -> str:
        shown = [f"{name}={value:.4g}" for name, value in self._metrics.get(key, {}).items()]
        return f" Last metrics: {', '.join(shown[:4])}." if shown else " No update was done before."


def judge(outcomes: Sequence[Outcome], what: str, timeout_s: float, last: str) -> tuple[VerlAdaptorError | None, bool]:
    """Who failed: the error to raise (None: nobody), and whether the group is still in step.

    A death counts before the echo that it leaves on other ranks, an error before the wait of the others for that rank.

    Args:
        outcomes: by rank.
        what: the operation, for the sentence.
        timeout_s: how long the ranks had.
        last: the sentence about the last metrics.
    """
    failures = {rank: found for rank, found in enumerate(outcomes) if not isinstance(found, Answer)}
    if not failures:
        return None, True
    raised = {rank: found for rank, found in failures.items() if isinstance(found, Raised)}
    if len(raised) == len(outcomes) and len({found.kind for found in raised.values()}) == 1 and raised[0].kind:
        return _ours(raised[0]), True  # every rank refused alike
    died = {rank: found for rank, found in failures.items() if isinstance(found, Died)}
    if died:
        how = "; ".join(dict.fromkeys(found.how for found in died.values()))
        return WorkerDied(f"{_ranks(died)} died in {what} ({how}).{last}"), False
    causes = {rank: found for rank, found in raised.items() if not found.is_echo}
    silent = {rank: found for rank, found in failures.items() if isinstance(found, Silent)}
    if silent and not causes:
        return _timeout(silent, what, timeout_s, last), False
    alien = {
        rank: found for rank, found in causes.items() if not found.kind
    }  # an error of ours may retell another rank's
    rank, cause = next(iter((alien or causes or raised).items()))
    name = f"{cause.kind}: " if cause.kind else ""
    return _noted(WorkerError(f"rank {rank} failed in {what}: {name}{cause.sentence}.{last}"), cause), False


def _timeout(silent: Mapping[int, Silent], what: str, timeout_s: float, last: str) -> WorkerTimeout:
    """Blames the ranks whose process does not react at all, if there are such; else all that are late."""
    frozen = {rank: found for rank, found in silent.items() if not found.doing}
    late = frozen or silent
    where = "; ".join(f"rank {rank}: {found.doing or 'its process does not react'}" for rank, found in silent.items())
    return WorkerTimeout(f"{_ranks(late)} did not finish {what} within {timeout_s:g} s ({where}).{last}")


def _ranks(ranks: Mapping[int, Any]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _ours(found: Raised) -> VerlAdaptorError:
    kind: Callable[[str], VerlAdaptorError] = getattr(errors, found.kind)
    return _noted(kind(found.sentence), found)


def _noted(error: VerlAdaptorError, found: Raised) -> VerlAdaptorError:
    error.add_note(f"In the worker's process:\n{found.trace}")
    return error


_open: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """No process outlives this one. Registered with the first group, so that it runs before what that group's start
    registered."""
    atexit.register(_close_open)


def _close_open() -> None:
    for group in list(_open):
        group.close()
