"""Records of an HTTP service, asked for as they are needed.

::

    GET url?start=N&limit=M    {"records": [{...}, ...]}    at most M, from number N on; [] where there are none yet

docs/data.md explains it, and what happens when the service fails.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from verl_adaptor.config import DataConfig
from verl_adaptor.data.records import Record, as_record
from verl_adaptor.data.streams import Stream
from verl_adaptor.errors import ConfigError, DataError
from verl_adaptor.service import CONNECT_S, DIRECT, Attempts, Failure, checked_url, listed, unanswered

import httpx  # isort: skip  # after `service`, which says how to install it

logger = logging.getLogger(__name__)


class ServedRecords(Stream):
    """Records of an HTTP service, at most ``config.limit`` at a time, and none before they are needed.

    Args:
        config: where it is (`DataConfig.url`), and how patiently it is asked.
        sleep: pauses, given seconds.
        rng: draws the pauses before repetitions.

    Raises:
        ConfigError: there is no url, or httpx cannot read it.
    """

    longest_pause_s = 2.0

    def __init__(
        self, config: DataConfig, sleep: Callable[[float], object] | None = None, rng: random.Random | None = None
    ) -> None:
        if config.url is None:
            raise ConfigError("data.url is not set; a service of records needs an address: http://host:port/path.")
        super().__init__(config.url, config.follow_timeout_s, sleep)
        self.config = config
        self.url = httpx.URL(checked_url(config.url, "data.url"))
        self._rng = rng or random.Random()
        self._tls = httpx.create_ssl_context()  # takes longer to make than a small request

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Records before `start` are not asked for."""
        timeout = httpx.Timeout(self.config.timeout_s, connect=CONNECT_S)
        with httpx.Client(verify=self._tls, mounts=DIRECT, timeout=timeout) as client:
            while True:
                for record in self._next(client, start):
                    where = f"{self.name} record {start}"
                    yield where, as_record(record, where)
                    start += 1

    def _next(self, client: httpx.Client, start: int) -> list[Any]:
        """At least one record, from number `start` on."""
        silence = self._silence()
        while not (found := self._ask(client, start)):
            silence()
        if len(found) > self.config.limit:
            raise DataError(
                f"{self.name} gave {len(found)} records from number {start} on, and was asked for limit={self.config.limit} at "
                "most; see the service, and docs/data.md for what it is asked."
            )
        return found

    def _ask(self, client: httpx.Client, start: int) -> list[Any]:
        """The answer to a request, repeated where that may help."""
        attempts = Attempts(self.config.retries, self.config.backoff_s, self._rng)
        while True:
            self._check_open()
            try:
                return self._get(client, start)
            except Failure as failure:
                pause = attempts.pause_after(failure)
                if pause is None:
                    raise DataError(
                        f"{self.name} gave no records from number {start} on: {attempts}. {self._cure(failure)}"
                    ) from failure.__cause__
            logger.warning(
                "%s, records from number %d on, attempt %d of %d: %s; the next in %.1f s.",
                *(self.name, start, len(attempts.outcomes), attempts.retries + 1, attempts.outcomes[-1], pause),
            )
            self._pause(pause)

    def _get(self, client: httpx.Client, start: int) -> list[Any]:
        """One attempt. Raises `Failure`."""
        url = self.url.copy_merge_params({"start": start, "limit": self.config.limit})
        begun, body = time.monotonic(), bytearray()
        try:
            with client.stream("GET", url) as response:
                for piece in response.iter_bytes():  # httpx bounds the wait for each piece, not for all of them
                    body += piece
                    if time.monotonic() - begun > self.config.timeout_s:
                        raise TimeoutError
        except (TimeoutError, httpx.RequestError) as error:
            raise unanswered(error, self.config.timeout_s) from error
        headers = [(k, v) for k, v in response.headers.multi_items() if k != "content-encoding"]  # it is decoded
        whole = httpx.Response(response.status_code, headers=headers, content=bytes(body))
        return listed(whole, "records", key="data.url")

    def _cure(self, failure: Failure) -> str:
        if failure.final:
            return (
                "Such an answer is not asked for again: see the service's log, and docs/data.md for what it is asked."
            )
        config = self.config
        return (
            f"See that it runs and can be reached from here; or raise data.retries={config.retries}, "
            f"data.backoff_s={config.backoff_s:g} or data.timeout_s={config.timeout_s:g}. A run goes on with --resume, with "
            "another data.url too."
        )
