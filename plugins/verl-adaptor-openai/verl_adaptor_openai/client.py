"""HTTP to the server: one thread with an event loop, and no more requests at a time than places."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_adaptor.errors import ConfigError, EngineClosed, EngineError, InvalidRequest
from verl_adaptor.service import CONNECT_S, DIRECT, RETRIED, Attempts, Failure, checked_url, unanswered
from verl_adaptor_openai.options import OpenAIOptions

import httpx  # isort: skip  # after `service`, which says how to install it

T = TypeVar("T")
JOIN_S = 5.0
"""Longest wait for connections to close."""
_EXCERPT = 300


class Absent(EngineError):
    """The server has no such route."""


class Client:
    """The connections to one server.

    Args:
        options: where it is, and how patiently it is asked.
        places: most requests at a time.

    Raises:
        ConfigError: the address cannot be read, or the variable with the key is not set.
    """

    def __init__(self, options: OpenAIOptions, places: int) -> None:
        self.options = options
        self.url = checked_url(str(options.base_url), "base_url").rstrip("/").removesuffix("/v1")
        headers = _authorization(options.api_key_env)
        tls = httpx.create_ssl_context()
        self._http = httpx.AsyncClient(
            verify=tls,
            mounts=DIRECT,
            headers=headers,
            limits=httpx.Limits(max_connections=places + 1, max_keepalive_connections=places + 1),
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # the whole of a request is timed here
        )
        self._places = asyncio.Semaphore(places)
        self._rng = random.Random()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-client", daemon=True)
        self._thread.start()

    # -- from other threads --------------------------------------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of this client."""
        if self._loop.is_closed():
            coroutine.close()
            raise EngineClosed("the connections to the server were closed; create a new engine.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one and wait for it; it bounds its time itself."""
        return self.start(coroutine).result()

    def close(self) -> None:
        """Cancel what runs, which aborts it on the server, and close all connections. A second call does nothing."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):  # a daemon thread: it ends with the process
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._http.aclose()

    # -- requests ------------------------------------------------------------------------------------------------

    async def get(self, route: str, timeout_s: float = 60.0) -> Any:
        """The JSON that the server has there. Raises as `post`."""
        return await self._ask("GET", route, None, timeout_s, retries=self.options.retries)

    async def post(self, route: str, body: Mapping[str, Any] | None, timeout_s: float, *, retries: int = 0) -> Any:
        """The JSON of an answer.

        Raises:
            Absent: there is no such route.
            InvalidRequest: the server refused the body.
            EngineError: no answer in time, an error of the server, or no JSON.
        """
        return await self._ask("POST", route, body, timeout_s, retries=retries)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The first choice of a completion. Raises as `post`."""
        async with self._places:
            options = self.options
            answer = await self.post("/v1/completions", body, options.request_timeout_s, retries=options.retries)
        try:
            choice = answer["choices"][0]
        except (LookupError, TypeError):
            choice = None
        if not isinstance(choice, dict):
            raise EngineError(f"{self.url} answered {_short(json.dumps(answer))}, which is no completion.")
        return choice

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The first choice of each event of a completion, as it comes. Leaving early closes the connection, which aborts it.

        Raises as `post`, and `EngineError` where the stream ends before its completion does.
        """
        limit_s = self.options.request_timeout_s
        async with self._places:
            try:
                async with asyncio.timeout(limit_s):
                    response = await self._opened("POST", "/v1/completions", body, limit_s, self.options.retries)
                    try:
                        async for choice in self._choices(response):
                            yield choice
                    finally:
                        await response.aclose()
            except (TimeoutError, httpx.RequestError) as error:
                said = unanswered(error, limit_s).outcome
                raise EngineError(
                    f"{self.url}: the stream of a completion broke off ({said}); it is not repeated, because some of it was "
                    f"answered. See the server's log; request_timeout_s={limit_s:g} is the longest it may take."
                ) from error

    async def _choices(self, response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
        ended = False
        async for line in response.aiter_lines():
            name, _, data = line.partition(":")
            if name != "data" or not data.strip():  # comments keep a connection open
                continue
            if data.strip() == "[DONE]":
                break
            event = _event(data, self.url)
            for choice in event.get("choices") or ():
                if not isinstance(choice, dict):
                    raise EngineError(f"{self.url} sent {_short(data)}, which is no event of a completion.")
                ended = choice.get("finish_reason") is not None
                yield choice
        if not ended:
            raise EngineError(
                f"{self.url} ended the stream of a completion before the completion; see the server's log."
            )

    async def _ask(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float, *, retries: int
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._opened(method, route, body, timeout_s, retries)
                try:
                    content = await response.aread()
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.RequestError) as error:
            said = unanswered(error, timeout_s).outcome
            raise EngineError(f"{self.url}{route}: {said}; see that the server runs and keeps up.") from error
        try:
            return json.loads(content or b"null")
        except (ValueError, RecursionError) as error:
            text = content.decode("utf-8", "replace")
            raise EngineError(f"{self.url}{route} answered {_short(text)} instead of JSON.") from error

    async def _opened(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float, retries: int
    ) -> httpx.Response:
        """A successful answer, its body unread. Repeated only where the server has done nothing yet."""
        attempts = Attempts(retries, self.options.backoff_s, self._rng)
        while True:
            try:
                return await self._attempt(method, route, body, timeout_s)
            except Failure as failure:
                pause = attempts.pause_after(failure)
                if pause is None:
                    raise EngineError(
                        f"{self.url}{route} cannot be had: {attempts}. See that the server runs and can be reached from here, or "
                        f"raise retries={retries} or backoff_s={self.options.backoff_s:g}."
                    ) from failure.__cause__
                await asyncio.sleep(pause)

    async def _attempt(
        self, method: str, route: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> httpx.Response:
        """One attempt. Raises `Failure` where another may bring more."""
        request = self._http.build_request(method, self.url + route, json=body)
        try:
            response = await self._http.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:  # nothing was sent
            raise unanswered(error, timeout_s) from error
        if response.is_success:
            return response
        try:
            text = (await response.aread()).decode("utf-8", "replace")
        finally:
            await response.aclose()
        said = _message(text)
        status = response.status_code
        if status in RETRIED:
            raise Failure(f"{status} {response.reason_phrase} {said}")
        if status in (404, 405) and route != "/v1/completions":
            raise Absent(f"{self.url} has no {route}.")
        if status in (401, 403):
            raise EngineError(
                f"{self.url} refuses this client ({status} {said}); name the variable with its key in api_key_env."
            )
        if status in (400, 413, 422):
            raise InvalidRequest(f"{self.url} refused the request: {said}.")
        raise EngineError(f"{self.url}{route} answered {status} {said}; see the server's log.")


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"api_key_env={variable!r}: there is no such variable in the environment; set it, or leave it out."
        )
    return {"Authorization": f"Bearer {key}"}


def _event(data: str, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("choices", []), list):
        raise EngineError(f"{url} sent {_short(data)}, which is no event of a completion.")
    if "error" in event:
        raise EngineError(f"{url} broke a completion off: {_message(data)}; see the server's log.")
    return event


def _message(text: str) -> str:
    """What an answer says of an error, in OpenAI's form or any other."""
    try:
        said = json.loads(text)
        inner = said.get("error", said)
        return _short(inner["message"] if isinstance(inner, dict) else str(inner))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return _short(text)


def _short(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}...")
