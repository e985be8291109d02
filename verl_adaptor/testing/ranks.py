"""Processes in one gloo group that run functions of a test: for what is smaller than a trainer."""

from __future__ import annotations

import datetime
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from verl_adaptor.backends.world import Axis

TIMEOUT_S = 180.0
"""Longest wait for a rank, in seconds; a rank alone in a collective gives up in a third of that."""


def own_axis() -> Axis:
    """All ranks as one axis; for the functions that run on them."""
    return Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


class Ranks:
    """`count` processes; calling this runs a function, which they must be able to import, on all of them.

    Args:
        folder: where they meet; of their own.
        count: how many.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, count, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned, in order; the first error of any is raised."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = [self._result(rank) for rank in range(len(self._pipes))]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def _result(self, rank: int) -> Any:
        if not self._pipes[rank].poll(TIMEOUT_S):
            raise AssertionError(f"rank {rank} does not answer")
        return self._pipes[rank].recv()

    def close(self) -> None:
        """End the processes. Raises AssertionError if one ends badly."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(TIMEOUT_S)
            if process.exitcode != 0:
                raise AssertionError(f"a rank ended with exit code {process.exitcode}")


def _serve(rank: int, count: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S / 3)
    dist.init_process_group("gloo", store=FileStore(store, count), rank=rank, world_size=count, timeout=timeout)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(function(*args))
        except BaseException as error:  # an assertion, too, goes to the test
            pipe.send(error)
    dist.destroy_process_group()
