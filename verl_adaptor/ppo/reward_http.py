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
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime as _date
from itertools import groupby
from typing import Any

from verl_adaptor.config import RewardConfig
from verl_adaptor.config.recipe import LONGEST_PAUSE_S
from verl_adaptor.data.encode import to_builtins
from verl_adaptor.errors import BackendNotInstalled, ConfigError, DataError, RewardError
from verl_adaptor.ppo.reward import Scores, check_scores
from verl_adaptor.samples import Trajectory

try:
    import httpx
except ImportError as error:
    raise BackendNotInstalled(
        f"reward.url needs httpx, which is not installed ({error}); pip install 'verl-adaptor[reward-service]'"
    ) from error

logger = logging.getLogger(__name__)

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses that may be another one a moment later; any other than these and 2xx would only be repeated."""
CONNECT_S = 10.0
"""Longest wait for a connection: an address that swallows packets is told from a slow scorer."""
CLOSE_S = 5.0
"""Longest wait for connections to close."""
DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""Hosts that no proxy of the environment could reach for us."""


class RewardService:
    """Asks a service over HTTP, a batch of samples a request, several requests at a time.

    A request that finds no service, no answer in time, one of the statuses 429, 502, 503 and 504, or an answer that
    cannot be read is repeated after a pause: so a service may score a sample more than once. Connections are open while
    a `score` is under way, and closed when the last one ends: there is nothing to close, and one object may be used in
    several event loops, one after the other or at once. `RewardConfig.concurrency` bounds the requests of each loop.

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
        try:
            self.url = str(httpx.URL(config.url))
        except httpx.InvalidURL as error:
            raise ConfigError(f"reward.url={config.url!r} is no address of a service: {error}.") from error
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
            async with self._line() as line, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._score_batch(line, trajectories[first : first + size], first))
                    for first in range(0, len(trajectories), size)
                ]
        except ExceptionGroup as failures:
            first_failure = failures.exceptions[0]
            raise first_failure from first_failure.__cause__
        return [reward for task in tasks for reward in task.result()]

    @contextlib.asynccontextmanager
    async def _line(self) -> AsyncIterator[_Line]:
        """This event loop's connections, which all its calls share; the last to leave closes them."""
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            most = self.config.concurrency
            client = httpx.AsyncClient(
                verify=self._tls,
                mounts=DIRECT,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                timeout=httpx.Timeout(None, connect=CONNECT_S),  # the whole of a request is timed in _post
            )
            self._lines[loop] = _Line(client, asyncio.Semaphore(most))
        line = self._lines[loop]
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[loop]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await line.client.aclose()

    async def _score_batch(self, line: _Line, batch: Sequence[Trajectory], first: int) -> Scores:
        async with line.places:  # kept while pausing: a service in trouble is asked less, not more
            body = _encode(batch, first)
            answer = await self._ask(line.client, body, f"trajectories {first} to {first + len(batch) - 1}")
        return check_scores(answer, batch, self.url, kind="reward service", first=first)

    async def _ask(self, client: httpx.AsyncClient, body: bytes, which: str) -> list[Any]:
        """The answer to a request, repeated where that may help."""
        outcomes: list[str] = []
        while True:
            self.attempts += 1
            try:
                return await self._post(client, body)
            except _Failure as failure:
                outcomes.append(failure.outcome)
                if failure.final or len(outcomes) > self.config.retries:
                    raise self._error(which, outcomes, final=failure.final) from failure.__cause__
                pause = pause_s(len(outcomes), self.config.backoff_s, self._rng, failure.retry_after_s)
            logger.warning(
                "reward service %s, %s, attempt %d of %d: %s; the next in %.1f s.",
                *(self.url, which, len(outcomes), self.config.retries + 1, outcomes[-1], pause),
            )
            await self._sleep(pause)

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> list[Any]:
        """One attempt. Raises `_Failure`."""
        try:
            async with asyncio.timeout(self.config.timeout_s):
                response = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        except TimeoutError as error:
            raise _Failure(f"no answer within {self.config.timeout_s:g} s") from error
        except httpx.ConnectTimeout as error:
            raise _Failure(f"no connection within {CONNECT_S:g} s") from error
        except httpx.RequestError as error:  # refused, reset, cut short, compressed wrongly
            raise _Failure(f"{type(error).__name__}: {_innermost(error)}") from error
        if response.is_success:
            return _decode(response)
        outcome = f"{response.status_code} {response.reason_phrase} {_excerpt(response)}"
        if response.has_redirect_location:
            outcome += f", a redirection to {response.headers['location']}: give that as reward.url"
        final = response.status_code not in RETRIED
        raise _Failure(outcome, final=final, retry_after_s=_retry_after_s(response))

    def _error(self, which: str, outcomes: list[str], *, final: bool) -> RewardError:
        """What happened in each attempt, equal neighbours together, and what to do."""
        told, number = [], 1
        for outcome, same in groupby(outcomes):
            last = number + len(list(same)) - 1
            told.append(f"attempt {number}: {outcome}" if last == number else f"attempts {number} to {last}: {outcome}")
            number = last + 1
        patience = self.config
        cure = (
            "Such an answer is not asked for again: see the service's log, and docs/rewards.md for what it is sent."
            if final
            else f"See that it runs, can be reached from here and keeps up; or raise reward.retries={patience.retries}, "
            f"reward.backoff_s={patience.backoff_s:g} or reward.timeout_s={patience.timeout_s:g}. "
            "A run goes on with --resume, with another reward.url too."
        )
        return RewardError(f"reward service {self.url} gave no rewards for {which}: {'; '.join(told)}. {cure}")


def backoff_cap_s(attempt: int, backoff_s: float) -> float:
    """Longest pause that is drawn after failed attempt number `attempt` (from 1), in seconds: it doubles, up to 60."""
    return min(LONGEST_PAUSE_S, backoff_s * 2.0 ** min(attempt - 1, 60))


def pause_s(attempt: int, backoff_s: float, rng: random.Random, retry_after_s: float = 0.0) -> float:
    """Pause after failed attempt number `attempt` (from 1), in seconds.

    It is drawn evenly between 0 and the cap (full jitter), so that clients which failed together do not come back
    together, not even at the moment that the service has named.
    """
    return min(LONGEST_PAUSE_S, retry_after_s + rng.uniform(0.0, backoff_cap_s(attempt, backoff_s)))


@dataclass
class _Line:
    """The connections of one event loop."""

    client: httpx.AsyncClient
    places: asyncio.Semaphore
    users: int = 0


class _Failure(Exception):
    """One attempt brought no rewards."""

    def __init__(self, outcome: str, *, final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(outcome)
        self.outcome, self.final, self.retry_after_s = outcome, final, retry_after_s


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
            "info": {str(key): _plain_json(value, index, key) for key, value in t.info.items()},
        }
        for index, t in enumerate(batch, first)
    ]
    return json.dumps({"samples": samples}).encode()


def _plain_json(value: Any, index: int, key: str) -> Any:
    where = f"info[{key!r}]"
    try:
        plain = to_builtins(value, where)
        json.dumps(plain, allow_nan=False)
    except DataError as error:
        raise RewardError(f"trajectory {index} cannot be sent to a reward service: {error}") from error
    except ValueError as error:
        raise RewardError(
            f"trajectory {index} cannot be sent to a reward service: {where} holds a NaN or an infinity, for which JSON has no "
            "word; make it null, or leave the field out."
        ) from error
    return plain


def _decode(response: httpx.Response) -> list[Any]:
    """The rewards in an answer, unchecked."""
    try:
        answer = json.loads(response.content, parse_int=float)  # an integer beyond floats is inf, which is then refused
    except (ValueError, RecursionError) as error:
        raise _Failure(f"{_excerpt(response)} instead of JSON") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
        raise _Failure(f'{_excerpt(response)} instead of {{"rewards": [...]}}')
    return list(answer["rewards"])


def _innermost(error: BaseException) -> str:
    """What the operating system said, from beneath the layers that only say that connecting failed."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        # __context__, because httpcore raises "from None"
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return str(error) or type(error).__name__


def _excerpt(response: httpx.Response) -> str:
    return repr(response.text if len(response.text) <= 300 else f"{response.text[:300]}...")


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that the answer's Retry-After asks for, at most 60; 0 where there is none that can be read."""
    asked = response.headers.get("retry-after", "").strip()
    try:
        # a date is compared with the answer's own: the clocks of two machines may differ
        seconds = (
            float(asked) if asked.isdecimal() else (_date(asked) - _date(response.headers["date"])).total_seconds()
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0
    return min(LONGEST_PAUSE_S, max(0.0, seconds))
