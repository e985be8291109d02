"""Several engine cores in processes of their own, as one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override
from vllm import SamplingParams as VLLMParams
from vllm.outputs import RequestOutput

from verl_adaptor.backends.vllm.core import STEP_S, Core, CoreBeside
from verl_adaptor.errors import EngineError

T = TypeVar("T")
APART = 8
"""Samples of a prompt stay together, for its cached keys and values, until their replica runs this many more than another."""


class CoreReplicas(Core):
    """A request goes to the replica that runs the fewest; weights and settings go to all.

    Args:
        arguments: of vLLM's `EngineArgs`, for each.
        count: replicas.
    """

    workers_are_here = False

    def __init__(self, arguments: Mapping[str, Any], count: int) -> None:
        self._arrived: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="vllm-replicas")
        self._running: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Replica and prompt of each request."""
        self._homes: dict[tuple[int, ...], int] = {}
        """Replica that got the newest request with a prompt, while any with it runs."""
        self._waiting: dict[tuple[int, ...], int] = {}
        """How many with a prompt run."""
        self._loads = [0] * count
        starts = [self._threads.submit(CoreBeside, arguments, self._arrived) for _ in range(count)]
        errors = [error for start in starts if (error := start.exception()) is not None]
        self.cores = [start.result() for start in starts if start.exception() is None]
        if errors:
            self.close()
            raise errors[0]

    def _all(self, function: Callable[[CoreBeside], T]) -> list[T]:
        """On every replica at once; the first error is raised once all have answered."""
        calls = [self._threads.submit(function, core) for core in self.cores]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise errors[0]
        return [call.result() for call in calls]

    @override
    def add(self, name: str, token_ids: Sequence[int], params: VLLMParams) -> None:
        self._check()
        prompt = tuple(token_ids)
        replica = self._choose(prompt)
        self._running[name] = replica, prompt
        self._loads[replica] += 1
        self._homes[prompt] = replica
        self._waiting[prompt] = self._waiting.get(prompt, 0) + 1
        self.cores[replica].add(name, token_ids, params)

    def _choose(self, prompt: tuple[int, ...]) -> int:
        least = min(range(len(self.cores)), key=self._loads.__getitem__)
        home = self._homes.get(prompt, least)
        return home if self._loads[home] < self._loads[least] + APART else least

    def _check(self) -> None:
        dead = [number for number, core in enumerate(self.cores, 1) if core.llm.errored]
        if dead:
            raise EngineError(
                f"the process of vLLM replica {dead[0]} of {len(self.cores)} has died; close this engine and create a new one."
            )

    def _left(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Take requests off the table; their names by replica."""
        by_replica: dict[int, list[str]] = {}
        for name in names:
            replica, prompt = self._running.pop(name, (None, ()))
            if replica is None:
                continue
            by_replica.setdefault(replica, []).append(name)
            self._loads[replica] -= 1
            self._waiting[prompt] -= 1
            if not self._waiting[prompt]:
                del self._waiting[prompt], self._homes[prompt]
        return by_replica

    @override
    def step(self) -> list[RequestOutput]:
        try:
            first = self._arrived.get(timeout=STEP_S)
        except queue.Empty:
            raise EngineError(f"no vLLM replica gave a token for {STEP_S:.0f} s; close this engine.") from None
        return self._taken([first])

    def _taken(self, arrived: list[RequestOutput | Exception]) -> list[RequestOutput]:
        arrived += [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
        outputs = self.cores[0].checked(arrived)
        self._left([output.request_id for output in outputs if output.finished])
        return outputs

    @override
    def abort(self, names: list[str]) -> None:
        for replica, its in self._left(names).items():
            if not self.cores[replica].llm.errored:
                self.cores[replica].abort(its)

    @override
    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.call_soon(method, *arguments)()

    @override
    def call_soon(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        self._check()
        answers = [core.call_soon(method, *arguments) for core in self.cores]
        return lambda: [found for answer in answers for found in answer()]

    @override
    def halt(self) -> list[RequestOutput]:
        self._all(CoreBeside.stop)
        return self._taken([])

    @override
    def go_on(self) -> None:
        self._all(CoreBeside.go_on)

    @override
    def sleep(self) -> None:
        self._all(CoreBeside.sleep)

    @override
    def wake_up(self, tags: list[str]) -> None:
        self._all(partial(CoreBeside.wake_up, tags=tags))

    @override
    def break_off(self) -> None:
        for core in self.cores:
            core.break_off()

    @override
    def close(self) -> None:
        try:
            self._all(CoreBeside.close)
        finally:
            self._threads.shutdown()
