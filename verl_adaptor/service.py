"""Asking an HTTP service: what is worth another attempt, how long to pause before it, and how failures are told.

The client is the caller's, with or without an event loop: `ppo.reward_http` awaits rewards, `data.streams` blocks for
records.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from email.utils import parsedate_to_datetime as _date
from itertools import groupby
from typing import Any

from verl_adaptor.config.base import LONGEST_PAUSE_S
from verl_adaptor.errors import BackendNotInstalled, ConfigError

try:
    import httpx
except ImportError as error:
    raise BackendNotInstalled(
        f"reward.url and data.url need httpx, which is not installed ({error}); pip install 'verl-adaptor[reward-service]'"
    ) from error

RETRIED = frozenset({429, 502, 503, 504})
"""Statuses that may be another one a moment later; any other than these and 2xx would only be repeated."""
CONNECT_S = 10.0
"""Longest wait for a connection: an address that swallows packets is told from a slow service."""
DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""Hosts that no proxy of the environment could reach for us."""


class Failure(Exception):
    """One attempt brought nothing.

    Args:
        outcome: what came instead.
        final: the next attempt would bring the same.
        retry_after_s: pause that the service asked for, in seconds.
    """

    def __init__(self, outcome: str, *, final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(outcome)
        self.outcome, self.final, self.retry_after_s = outcome, final, retry_after_s


class Attempts:
    """The failed attempts at one request.

    Args:
        retries: how often it is repeated.
        backoff_s: longest pause before the first repetition, in seconds.
        rng: draws the pauses.
    """

    def __init__(self, retries: int, backoff_s: float, rng: random.Random) -> None:
        self.retries, self.backoff_s = retries, backoff_s
        self.outcomes: list[str] = []
        self._rng = rng

    def pause_after(self, failure: Failure) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        self.outcomes.append(failure.outcome)
        if failure.final or len(self.outcomes) > self.retries:
            return None
        return pause_s(len(self.outcomes), self.backoff_s, self._rng, failure.retry_after_s)

    def __str__(self) -> str:
        """What happened in each attempt, equal neighbours together."""
        told, number = [], 1
        for outcome, same in groupby(self.outcomes):
            last = number + len(list(same)) - 1
            told.append(f"attempt {number}: {outcome}" if last == number else f"attempts {number} to {last}: {outcome}")
            number = last + 1
        return "; ".join(told)


def backoff_cap_s(attempt: int, backoff_s: float) -> float:
    """Longest pause that is drawn after failed attempt number `attempt` (from 1), in seconds: it doubles, up to 60."""
    return min(LONGEST_PAUSE_S, backoff_s * 2.0 ** min(attempt - 1, 60))


def pause_s(attempt: int, backoff_s: float, rng: random.Random, retry_after_s: float = 0.0) -> float:
    """Pause after failed attempt number `attempt` (from 1), in seconds.

    It is drawn evenly between 0 and the cap (full jitter), so that clients which failed together do not come back
    together, not even at the moment that the service has named.
    """
    return min(LONGEST_PAUSE_S, retry_after_s + rng.uniform(0.0, backoff_cap_s(attempt, backoff_s)))


def checked_url(url: str, key: str) -> str:
    """The address as httpx reads it. Raises `ConfigError`, which names the setting `key`, where it cannot."""
    try:
        return str(httpx.URL(url))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{key}={url!r} is no address of a service: {error}.") from error


def unanswered(error: BaseException, timeout_s: float) -> Failure:
    """A request that got no whole answer (refused, reset, cut short, compressed wrongly, too late) as a `Failure`."""
    if isinstance(error, httpx.ConnectTimeout):
        return Failure(f"no connection within {CONNECT_S:g} s")
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return Failure(f"no answer within {timeout_s:g} s")
    return Failure(f"{type(error).__name__}: {_innermost(error)}")


def listed(response: httpx.Response, name: str, *, key: str, parse_int: Callable[[str], Any] = int) -> list[Any]:
    """The list under `name` in the JSON object of a whole answer, its items unchecked.

    Args:
        response: read.
        name: ``rewards`` or ``records``.
        key: the setting with the address, for the sentence about a redirection.
        parse_int: makes a number of an integer's digits.

    Raises:
        Failure: another status than 2xx, no JSON, or another object.
    """
    if not response.is_success:
        outcome = f"{response.status_code} {response.reason_phrase} {_excerpt(response)}"
        if response.has_redirect_location:
            outcome += f", a redirection to {response.headers['location']}: give that as {key}"
        final = response.status_code not in RETRIED
        raise Failure(outcome, final=final, retry_after_s=_retry_after_s(response))
    try:
        answer = json.loads(response.content, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{_excerpt(response)} instead of JSON") from error
    if not isinstance(answer, dict) or not isinstance(answer.get(name), list):
        raise Failure(f'{_excerpt(response)} instead of {{"{name}": [...]}}')
    return list(answer[name])


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
