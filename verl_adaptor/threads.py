"""Blocking work beside an event loop, in threads that cannot keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

T = TypeVar("T")
_Work = tuple[Future[Any], Callable[[], Any]]


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """As `asyncio.to_thread`, in a daemon thread.

    Args:
        function: is called in a new thread.
        name: of the thread, for whoever reads a stack.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not answered.done():
            answered.set_exception(error) if error else answered.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await answered


class DaemonExecutor(Executor):
    """As `ThreadPoolExecutor` with one thread, in a daemon thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_do, args=(self._work,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._work.put, None)

    @override
    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if not self._end.alive:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        self._work.put((future, partial(function, *args, **kwargs)))
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and not self._work.empty():
            with contextlib.suppress(queue.Empty):
                if (work := self._work.get_nowait()) is not None:
                    work[0].cancel()
        self._end()
        if wait:
            self._thread.join()


def _do(work: queue.SimpleQueue[_Work | None]) -> None:
    while (found := work.get()) is not None:
        future, function = found
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        del found, future, function  # nothing is kept while nothing is done
