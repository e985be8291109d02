"""A reward service: whatever answers HTTP, on this machine or another, as a `Reward`.

::

    POST url   {"samples": [{"prompt_ids": [...], "response_ids": [...], "response_mask": [...], "text": "...",
                             "finish_reason": "stop", "group_id": "...", "info": {...}}, ...]}
    200        {"rewards": [0.5, [0.0, 1.0], ...]}        in the samples' order: a number, or one for each sampled token

docs/rewards.md explains the fields and what happens when the service fails; ``examples/reward_service.py`` is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_adaptor.config import RewardConfig
from verl_adaptor.data.encode import to_builtins
from verl_adaptor.errors import ConfigError, DataError, RewardError
from verl_adaptor.ppo.reward import Scores, check_scores
from verl_adaptor.samples import Trajectory
from verl_adaptor.service import CONNECT_S, DIRECT, Attempts, Failure, checked_url, listed, unanswered

import httpx  # isort: skip  # after `service`, which says how to install it

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""Connections are closed once nobody has used them for this long."""
CLOSE_S = 5.0
"""Longest wait for connections to close."""


class RewardService:
    """Asks a service over HTTP, a batch of samples a request, several requests at a time.

    A request that finds no service, no answer in time, one of the statuses 429, 502, 503 and 504, or an answer that
    cannot be read is repeated after a pause: so a service may score a sample more than once. Connections stay open from
    one `score` to the next, and are closed when they are idle or their event loop ends (as `asyncio.run` ends it): there is
    nothing to close, and one object may be used in several event loops, one after the other or at once.
    `RewardConfig.concurrency` bounds the requests of each loop.

    Args:
        config: where it is (`RewardConfig.url`), and how patiently it is asked.
        sleep: waits between two attempts, given seconds.
        rng: draws the pauses; rewards do not depend on it.

    Raises:
        ConfigError: there is no url, or httpx cannot read it.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        if config.url is None:
            raise ConfigError("reward.url is not set; a RewardService needs the address of one: http://host:port/path.")
        self.url = checked_url(config.url, "reward.url")
        self.config = config
        self.attempts = 0
        """Requests made so far, repetitions included."""
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._tls = httpx.create_ssl_context()  # takes longer to make than a small request
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}

    async def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The service's rewards, checked, in the trajectories' order. The first batch that fails cancels the others.

        Raises:
            RewardError: a batch got no answer in all its attempts, was refused, or its rewards are not one finite number
                (or one for each sampled token) for each trajectory.
        """
        size = self.config.batch_size
        try:
            with self._line() as line:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._score_batch(line, trajectories[first : first + size], first))
                        for first in range(0, len(trajectories), size)
                    ]
        except ExceptionGroup as failures:
            first_failure = failures.exceptions[0]
            raise first_failure from first_failure.__cause__
        return [reward for task in tasks for reward in task.result()]

    @contextlib.contextmanager
    def _line(self) -> Iterator[_Line]:
        """This event loop's connections, which all its calls share."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            line = self._lines[loop] = _Line(asyncio.Semaphore(self.config.concurrency))
            line.closer = loop.create_task(self._close(loop, line))
        line = self._lines[loop]
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            line.left_at = loop.time()

    async def _close(self, loop: asyncio.AbstractEventLoop, line: _Line) -> None:
        try:
            while line.users or loop.time() < line.left_at + IDLE_S:
                await asyncio.sleep(IDLE_S)
        finally:  # also where the event loop ends
            del self._lines[loop]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.gather(*(client.aclose() for client in line.clients))

    @contextlib.contextmanager
    def _client(self, line: _Line) -> Iterator[httpx.AsyncClient]:
        """One that nobody else uses meanwhile."""
        if not line.idle:
            client = httpx.AsyncClient(
                verify=self._tls,
                mounts=DIRECT,
                limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
                timeout=httpx.Timeout(None, connect=CONNECT_S),  # the whole of a request is timed in _post
            )
            line.clients.append(client)
            line.idle.append(client)
        client = line.idle.pop()
        try:
            yield client
        finally:
            line.idle.append(client)

    async def _score_batch(self, line: _Line, batch: Sequence[Trajectory], first: int) -> Scores:
        async with line.places:  # kept while pausing: a service in trouble is asked less, not more
            body = _encode(batch, first)
            with self._client(line) as client:
                answer = await self._ask(client, body, f"trajectories {first} to {first + len(batch) - 1}")
        return check_scores(answer, batch, self.url, kind="reward service", first=first)

    async def _ask(self, client: httpx.AsyncClient, body: bytes, which: str) -> list[Any]:
        """The answer to a request, repeated where that may help."""
        attempts = Attempts(self.config.retries, self.config.backoff_s, self._rng)
        while True:
            self.attempts += 1
            try:
                return await self._post(client, body)
            except Failure as failure:
                pause = attempts.pause_after(failure)
                if pause is None:
                    raise self._error(which, attempts, final=failure.final) from failure.__cause__
            logger.warning(
                "reward service %s, %s, attempt %d of %d: %s; the next in %.1f s.",
                *(self.url, which, len(attempts.outcomes), attempts.retries + 1, attempts.outcomes[-1], pause),
            )
            await self._sleep(pause)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> list[Any]:
        """One attempt. Raises `Failure`."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                response = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        except (TimeoutError, httpx.RequestError) as error:
            raise unanswered(error, self.config.timeout_s) from error
        # an integer beyond floats is inf, which is then refused
        return listed(response, "rewards", key="reward.url", parse_int=float)

    def _error(self, which: str, attempts: Attempts, *, final: bool) -> RewardError:
        patience = self.config
        cure = (
            "Such an answer is not asked for again: see the service's log, and docs/rewards.md for what it is sent."
            if final
            else f"See that it runs, can be reached from here and keeps up; or raise reward.retries={patience.retries}, "
            f"reward.backoff_s={patience.backoff_s:g} or reward.timeout_s={patience.timeout_s:g}. "
            "A run goes on with --resume, with another reward.url too."
        )
        return RewardError(f"reward service {self.url} gave no rewards for {which}: {attempts}. {cure}")


@dataclass
class _Line:
    """The connections of one event loop: a client for each, since a shared one asks all of them several times a request."""

    places: asyncio.Semaphore
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    idle: list[httpx.AsyncClient] = field(default_factory=list)
    """Those of them that no request uses; the one used last is used next."""
    users: int = 0
    left_at: float = math.inf
    """When the last one left, on the event loop's clock."""
    closer: asyncio.Task[None] | None = None


def _encode(batch: Sequence[Trajectory], first: int) -> bytes:
    """The body of a request. Raises `RewardError` where a trajectory's info is not for JSON."""
    samples = [
        {
            "prompt_ids": t.prompt_ids,
            "response_ids": t.response_ids,
            "response_mask": t.response_mask,
            "text": t.text,
            "finish_reason": t.finish_reason,
            "group_id": t.group_id,
            "info": {str(key): _plain(value, index, key) for key, value in t.info.items()},
        }
        for index, t in enumerate(batch, first)
    ]
    try:
        return json.dumps({"samples": samples}, allow_nan=False).encode()
    except ValueError as error:
        raise _not_for_json(samples, first) from error


def _plain(value: Any, index: int, key: str) -> Any:
    try:
        return to_builtins(value, f"info[{key!r}]")
    except DataError as error:
        raise RewardError(f"trajectory {index} cannot be sent to a reward service: {error}") from error


def _not_for_json(samples: Sequence[dict[str, Any]], first: int) -> RewardError:
    """Which info it is; nothing else of a sample can hold such a number."""
    for index, sample in enumerate(samples, first):
        for key, value in sample["info"].items():
            try:
                json.dumps(value, allow_nan=False)
            except ValueError:
                return RewardError(
                    f"trajectory {index} cannot be sent to a reward service: info[{key!r}] holds a NaN or an infinity, for "
                    "which JSON has no word; make it null, or leave the field out."
                )
    return RewardError(f"trajectories from {first} on cannot be sent to a reward service as JSON.")
