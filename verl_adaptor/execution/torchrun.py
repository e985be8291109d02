"""One program over the ranks that torchrun started: the first rank runs it and drives its peers.

The peers serve the same requests as Ray's workers do. Requests and replies go through a store of the rendezvous, apart
from the process group of the trainers: so each wait is bounded, and a rank that does not reply is known by its number.
"""

from __future__ import annotations

import datetime
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl_adaptor.config import ExecutionConfig
from verl_adaptor.errors import ConfigError, TrainerError, WorkerError, WorkerTimeout
from verl_adaptor.execution.group import Died, Outcome, Silent, WorkerGroup, Workers, grace, outcome
from verl_adaptor.execution.pool import RanksConfig, WorkerPool, choose_executor
from verl_adaptor.execution.worker import Request, Worker

PIECE = 4 << 20
"""Bytes of one store entry: the store refuses more than 8 MiB."""
END = "end"
_LOST = re.compile(r"connection (reset|closed)|broken pipe", re.IGNORECASE)
"""What a collective says here when a peer's process is gone: with it the peer that does not reply is dead, not late."""
JOIN_S = 300.0
"""Longest wait for the store of the rendezvous."""


def world() -> tuple[int, int]:
    """(rank, world size) that torchrun gave this process; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class TorchrunPool(WorkerPool):
    """On the first rank: hands out the one group that there is. `close` tells the peers to end."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = _TorchrunWorkers(Channel(), world()[1])
        self._group: WorkerGroup | None = None

    def group(self, config: RanksConfig, label: str, copy: int = 0) -> WorkerGroup:
        """The ranks of this world, whatever the parallel sizes: a trainer that wants another number of them says so."""
        if copy:
            raise ConfigError(
                "a pipeline's engines need ranks of their own, and torchrun's are one group; start one process instead of "
                "torchrun, or leave the recipe's pipeline out."
            )
        choose_executor(config.world_size, config.execution)  # refuses what asks for Ray
        if self._group is None:
            execution: ExecutionConfig = config.execution
            self._workers.label = label
            self._group = WorkerGroup(
                self._workers, start_timeout_s=execution.start_timeout_s, call_timeout_s=execution.call_timeout_s
            )
        return self._group

    def close(self) -> None:
        """End the peers' service; a second call does nothing."""
        if self._group is not None:
            self._group.close()
        self._workers.end()


def serve(idle_timeout_s: float) -> None:
    """On every other rank: do what the first one asks, until it ends.

    Args:
        idle_timeout_s: longest wait for the next request, in seconds.

    Raises:
        WorkerTimeout: none came.
        WorkerError: the connection to the first rank is gone.
    """
    rank, channel = world()[0], Channel()
    worker = Worker(rank, "torchrun")
    with _first_rank_decides():
        while True:
            request = channel.receive(idle_timeout_s)
            if request[0] == END:
                return
            channel.reply(rank, worker.run(request))


class Channel:
    """Requests from the first rank to all others, numbered, and a reply of each to each."""

    def __init__(self) -> None:
        self._store = _rendezvous()
        self._number = 0

    def send(self, request: Request) -> None:
        """Post a request. Large ones go in pieces."""
        data = pickle.dumps(request)
        self._number += 1
        pieces = range(0, len(data), PIECE)
        for place, start in enumerate(pieces):
            self._store.set(f"{self._number}/{place}", data[start : start + PIECE])
        self._store.set(f"{self._number}/pieces", str(len(pieces)))

    def receive(self, timeout_s: float) -> Request:
        """The next request."""
        self._number += 1
        key = f"{self._number}/pieces"
        self._wait([key], timeout_s, "rank 0 sent no request")
        count = int(self._store.get(key))
        request: Request = pickle.loads(b"".join(self._store.get(f"{self._number}/{place}") for place in range(count)))
        return request

    def reply(self, rank: int, reply: Any) -> None:
        """Answer the request received last."""
        self._store.set(self._reply(rank), pickle.dumps(reply))

    def replies(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Replies to the request sent last, of those ranks that gave one in time. Once a rank has failed, or is late, the
        others have the grace."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            with_grace = max(0.01, deadline - time.monotonic())
            try:
                self._wait([self._reply(rank)], with_grace, "")
            except WorkerTimeout:
                continue
            found[rank] = pickle.loads(self._store.get(self._reply(rank)))
            if found[rank][0] != "answer":
                deadline = min(deadline, time.monotonic() + grace(timeout_s))
        return found

    def forget(self, ranks: Sequence[int]) -> None:
        """Delete a request that all have answered, and the replies."""
        count = int(self._store.get(f"{self._number}/pieces"))
        for key in ("pieces", *range(count)):
            self._store.delete_key(f"{self._number}/{key}")
        for rank in ranks:
            self._store.delete_key(self._reply(rank))

    def _reply(self, rank: int) -> str:
        return f"{self._number}/reply/{rank}"

    def _wait(self, keys: list[str], timeout_s: float, what: str) -> None:
        import torch.distributed as dist

        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise WorkerTimeout(f"{what} within {timeout_s:g} s.") from error
        except RuntimeError as error:
            raise WorkerError(f"the connection between the ranks is gone: {error}") from error


class _TorchrunWorkers(Workers):
    """The first rank does its own share of a request between sending it and waiting for the peers."""

    restartable = False

    def __init__(self, channel: Channel, world_size: int) -> None:
        self.world_size = world_size
        self.label = "torchrun"
        self._channel = channel
        self._worker = Worker(0, self.label)
        self._ended = False

    def start(self) -> None:
        """They run already."""

    def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """The same on all; what the peers say arrives after this rank is done."""
        start, peers = time.monotonic(), range(1, self.world_size)
        self._channel.send(request)
        own = self._worker.run(request)
        left = grace(timeout_s) if own[0] != "answer" else timeout_s + grace(timeout_s) - (time.monotonic() - start)
        replies = {0: own, **self._channel.replies(peers, max(left, PING_S))}
        if len(replies) == self.world_size:
            self._channel.forget(peers)
        lost = own[0] != "answer" and _LOST.search(own[2])
        missing: Outcome = Died("its connection is gone: killed, out of memory, or crashed") if lost else Silent("")
        return [outcome(replies[rank]) if rank in replies else missing for rank in range(self.world_size)]

    def stop(self) -> None:
        """Peers out of step are past help; they end with `end`, or by torchrun, which ends all when one has failed."""

    def end(self) -> None:
        """Let the peers go; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._channel.send((END,))


PING_S = 1.0


def _rendezvous() -> Any:
    """The store that the ranks of this world share, under a prefix of our own."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise TrainerError(f"WORLD_SIZE is set, but not {', '.join(missing)}; start with torchrun, or unset it.")
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not hosted and world()[0] == 0,
        timeout=datetime.timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        multi_tenant=True,  # the process group will want the same port
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"verl_adaptor/{attempt}", store)


@contextmanager
def _first_rank_decides() -> Iterator[None]:
    """An interrupt reaches all ranks; the first one saves a checkpoint with the help of the others, so they must stay."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
