"""vLLM's OpenAI-compatible HTTP server on an engine that goes on to get new weights."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, cast, get_args

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from verl_adaptor.backends.folder import folder_update
from verl_adaptor.backends.vllm.client import Client, no_tokenizer, versions_used
from verl_adaptor.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    EnginePaused,
    InvalidRequest,
    ModelError,
    VerlAdaptorError,
    WeightUpdateError,
)
from verl_adaptor.protocols import InferenceEngine, InFlight

START_S = 60.0
"""Longest that the server may take to listen."""
GRACE_S = 5
"""What running HTTP requests get to finish when the server ends; then they are aborted."""
HEADER = b"x-policy-version"
_CHAT = ("/v1/chat/completions", "/v1/chat/completions/batch", "/generative_scoring")
Loop = asyncio.AbstractEventLoop
Send = Callable[[Any], Awaitable[None]]


class Server:
    """Serves over HTTP in the loop of the engine's outputs, from its making until `end`.

    Besides vLLM's own routes there are ``GET /policy_version`` and ``POST /update_weights``; each response has the version
    that its request was admitted under in the header ``x-policy-version``: no token of it is older.

    Args:
        engine: whose weights are updated.
        client: what vLLM's routes run on.
        loop: where it runs.
        host: address to listen at.
        port: 0 takes a free one.

    Raises:
        ConfigError: the port cannot be had.
        EngineError: the server does not come up.
    """

    def __init__(self, engine: InferenceEngine, client: Client, loop: Loop, host: str, port: int) -> None:
        self._engine = engine
        self.client = client
        self._loop = loop
        self._socket = _listen(host, port)
        name, at = self._socket.getsockname()[:2]
        self.url = f"http://{f'[{name}]' if ':' in name else name}:{at}"
        """Where it listens."""
        self._updater = ThreadPoolExecutor(1, thread_name_prefix="vllm-update")
        self._serving: Future[None] | None = None
        try:
            config = uvicorn.Config(
                self._run(self._app(), START_S),
                log_config=None,
                log_level="error",
                access_log=False,
                lifespan="off",  # vLLM's freezes all that this process holds
                ws="none",
                timeout_graceful_shutdown=GRACE_S,
            )
            self._server = uvicorn.Server(config)
            self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), loop)
            self._wait_started()
        except BaseException:
            self.end()
            raise

    def check(self) -> None:
        """Raise `EngineError` if nothing can be served any more."""
        if self._serving is None or self._serving.done():
            raise EngineError(f"the server at {self.url} has ended; start it again.")
        if self.client.errored:
            raise EngineError("vLLM's engine process has died; start the server again.")
        with suppress(EnginePaused):  # it wakes up again
            self.client.check()

    def end(self) -> None:
        """Free the port; requests that do not finish in time are aborted. A second call does nothing."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.should_exit = True
            try:
                serving.result(GRACE_S + 10)
            except (
                TimeoutError,
                CancelledError,
            ):  # cancelled: with its process, which stood still when the engine was closed
                serving.cancel()
        self._socket.close()
        self._updater.shutdown(wait=False, cancel_futures=True)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)
        except TimeoutError:
            raise EngineError(f"vLLM's server did not come up within {timeout_s:.0f} s; close this engine.") from None

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._server.started:
            if self._serving is None or self._serving.done() or time.monotonic() > deadline:
                raise EngineError(
                    f"vLLM's server does not listen at {self.url} after {START_S:.0f} s; choose another port."
                )
            time.sleep(0.005)

    # -- routes --------------------------------------------------------------------------------------------------

    async def _app(self) -> Any:
        bare = self._engine.tokenizer is None
        given = ["--model", self._engine.path, *(["--return-tokens-as-token-ids"] if bare else [])]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
        client = cast(Any, self.client)
        tasks = await client.get_supported_tasks()
        app = build_app(args, tasks, client.model_config)
        await init_app_state(client, app.state, args, tasks)
        for serving in (app.state.openai_serving_completion, app.state.openai_serving_chat):
            if serving is not None:
                serving.beam_search = _no_beam_search
        routes = [
            Route("/policy_version", self._tell_version, methods=["GET"]),
            Route("/update_weights", self._update_weights, methods=["POST"]),
            *(Route(path, _no_chat, methods=["POST"]) for path in _CHAT if bare),
            Mount("/", app),
        ]
        return _Versioned(Starlette(routes=routes), lambda: self._engine.policy_version)

    async def _tell_version(self, request: Request) -> JSONResponse:
        return JSONResponse({"policy_version": self._engine.policy_version})

    async def _update_weights(self, request: Request) -> JSONResponse:
        """``{"path": folder, "version": n, "in_flight": "wait"}``; without a version it is the next one."""
        try:
            wish = self._wish(await request.body())
            version = await asyncio.get_running_loop().run_in_executor(self._updater, self._update, *wish)
        except VerlAdaptorError as error:
            return _refusal(error)
        return JSONResponse({"policy_version": version})

    def _wish(self, body: bytes) -> tuple[str, int | None, InFlight]:
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not isinstance(asked, dict) or not isinstance(asked.get("path"), str):
            raise InvalidRequest('the body is no weight update; send {"path": "a model folder", "version": 1}.')
        unknown = asked.keys() - {"path", "version", "in_flight"}
        if unknown:
            raise InvalidRequest(f"unknown: {', '.join(sorted(unknown))}; allowed: path, version, in_flight.")
        version = asked.get("version")
        if version is not None and type(version) is not int:
            raise InvalidRequest(f"version={version!r} is not allowed: it must be an integer.")
        in_flight = asked.get("in_flight", "wait")
        if in_flight not in get_args(InFlight):
            raise InvalidRequest(f"in_flight={in_flight!r} is not allowed; use {', '.join(get_args(InFlight))}.")
        return asked["path"], version, in_flight

    def _update(self, path: str, version: int | None, in_flight: InFlight) -> int:
        update = folder_update(path, version or 0, self._engine.config.trust_remote_code)
        with self._engine.updating():  # nobody else makes the next version meanwhile
            if version is None:
                version = self._engine.policy_version + 1
            self._engine.update_weights(replace(update, version=version), in_flight=in_flight)
        return version


class _Versioned:
    """Adds the policy version to each response."""

    def __init__(self, app: Any, version: Callable[[], int]) -> None:
        self._app = app
        self._version = version

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        used: list[int] = []
        versions_used.set(used)

        async def tell(message: Any) -> None:
            if message["type"] == "http.response.start":
                oldest = min(used, default=self._version())
                message = {**message, "headers": [*message["headers"], (HEADER, str(oldest).encode())]}
            await send(message)

        await self._app(scope, receive, tell)


def _no_beam_search(*_: Any, **__: Any) -> NoReturn:
    """vLLM asks the engine for each of its tokens by itself, between which new weights may come."""
    raise InvalidRequest(
        "beam search is not served; its response would be of several policies. Sample n responses instead."
    )


async def _no_chat(request: Request) -> JSONResponse:
    """vLLM asserts a tokenizer there, which would be a status of 500 without a sentence."""
    try:
        no_tokenizer("a chat")
    except InvalidRequest as error:
        return _refusal(error)


def _refusal(error: VerlAdaptorError) -> JSONResponse:
    """The sentence, as OpenAI's errors are: 400 for what is wrong with the request, 503 for the engine's state, else 500."""
    if error.__cause__ is None and isinstance(error, (InvalidRequest, WeightUpdateError, ModelError, ConfigError)):
        code = 400
    elif isinstance(error, (EnginePaused, EngineClosed)):
        code = 503
    else:
        code = 500
    return JSONResponse({"error": {"message": str(error), "type": type(error).__name__, "code": code}}, code)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
        except BaseException:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened at ({error}); choose another port, or 0 for a free one."
        ) from None
    return listening
