"""What vLLM's HTTP server takes for its engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from vllm import SamplingParams as VLLMParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError

from verl_adaptor.backends.vllm.core import CoreBeside
from verl_adaptor.errors import EngineError, EnginePaused, InvalidRequest
from verl_adaptor.protocols import InferenceEngine, InFlight

SETTLE_S = 600.0
"""Longest that new weights wait for running HTTP requests."""
GATE_S = 600.0
"""Longest that a HTTP request waits for new weights, or for a paused engine."""
POLL_S = 0.002

versions_used: ContextVar[list[int] | None] = ContextVar("versions_used", default=None)
"""Where a HTTP request notes the policy version that it was admitted under."""


def no_tokenizer(what: str = "text") -> NoReturn:
    """Refuse a request that needs one."""
    raise InvalidRequest(
        f"this model has no tokenizer, which {what} would need; POST /v1/completions with token ids as the prompt and "
        "return_token_ids=true."
    )


class Client:
    """The engine's `AsyncLLM`, behind a gate that is shut while the engine changes.

    All else that the server asks of it is vLLM's own. Everything runs in the loop of the first core's outputs.

    Args:
        cores: what the engine runs on; a request goes to the one that runs the fewest from here.
        engine: whose version, EOS tokens and state count.
        held: whether the engine is paused.
        check: raises what keeps the engine from serving.
    """

    def __init__(
        self,
        cores: Sequence[CoreBeside],
        engine: InferenceEngine,
        held: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        self._cores = cores
        self._llm = llm = cores[0].llm
        self._engine = engine
        self._held = held
        self.check = check
        self._shut = False
        self._failed = False
        self._running: dict[int, tuple[int, str]] = {}
        """Core and name of each request. Names are the clients' choice, and two may choose the same."""
        self._numbers = itertools.count()
        if engine.tokenizer is None:
            llm.renderer.get_tokenizer = no_tokenizer  # vLLM's sentence names a setting that is not the client's
        self.model_config = copy.copy(llm.model_config)
        self.model_config.max_model_len = engine.model.max_model_len  # without the one token more that `score` needs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Any, sampling_params: VLLMParams, request_id: str, **more: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's, once the gate is open; `EngineError` where a weight update fails meanwhile."""
        params = self._params(sampling_params)
        await self._enter()
        loads = [core for core, _ in self._running.values()]
        chosen, number = min(range(len(self._cores)), key=loads.count), next(self._numbers)
        self._running[number] = chosen, request_id
        used = versions_used.get()
        if used is not None:
            used.append(self._engine.policy_version)
        core = self._cores[chosen]
        outputs = _outputs(
            core, prompt, params, request_id, partial(self._ended, number), **{**more, "lora_request": core.adapters}
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if self._failed:
                    raise EngineError("a weight update failed half-way; close this engine and create a new one.")
                yield output

    def _ended(self, number: int) -> None:
        self._running.pop(number, None)

    def _params(self, params: VLLMParams) -> VLLMParams:
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "log-probs of a prompt (prompt_logprobs, or echo with logprobs) are not served over HTTP, where their "
                "temperature cannot be told; call engine.score(token_ids, temperature) where the engine was made."
            )
        if params.logprob_token_ids is not None:
            raise InvalidRequest(
                "logprob_token_ids is not served here; ask for logprobs, which are of the likeliest tokens."
            )
        if self._engine.tokenizer is None and (params.stop or params.bad_words):
            no_tokenizer("stop strings and bad words")
        params = params.clone()
        params.update_from_generation_config({"eos_token_id": list(self._engine.model.eos_token_ids)})
        return params

    async def _enter(self) -> None:
        try:
            async with asyncio.timeout(GATE_S):
                while True:
                    self.check()
                    if not (self._shut or self._held()):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EnginePaused(f"the engine was not ready for a request within {GATE_S:.0f} s; try again.") from None

    async def check_health(self) -> None:
        """As vLLM's; a failed weight update is no health either."""
        try:
            self.check()
        except EngineError as error:
            raise EngineDeadError(str(error)) from error
        for core in self._cores:
            await core.llm.check_health()

    @property
    def errored(self) -> bool:
        """Whether a process of the engine has died."""
        return any(core.llm.errored for core in self._cores)

    # -- what the engine does before it changes ------------------------------------------------------------------

    async def settle(self, in_flight: InFlight) -> None:
        """Shut the gate; running requests are finished, aborted, or kept as they are."""
        self._shut = True
        if in_flight == "keep":
            return
        if in_flight == "abort":
            await self._abort()
        try:
            async with asyncio.timeout(SETTLE_S):
                while self._running:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(
                f"{len(self._running)} HTTP requests did not finish within {SETTLE_S:.0f} s and nothing was changed; use "
                "in_flight='keep' or 'abort', or ask for fewer max_tokens."
            ) from None

    async def fail(self) -> None:
        """End all running requests with an error: new weights have failed half-way."""
        self._failed = True
        await self._abort()

    async def _abort(self) -> None:
        for number, core in enumerate(self._cores):
            names = [name for its, name in self._running.values() if its == number]
            if names:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(core.llm.abort(names), core.loop))

    def open(self) -> None:
        """Let requests in again."""
        self._shut = False


async def _outputs(
    core: CoreBeside,
    prompt: Any,
    params: VLLMParams,
    request_id: str,
    ended: Callable[[], None],
    **more: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """vLLM's outputs of a request, as fast as they come, however slowly they are taken from here.

    A client that reads slowly, or not at all, must not hold up new weights: `ended` is called in this loop once vLLM has
    no more to say. What waits is at most one whole response.
    """
    here = asyncio.get_running_loop()
    arrived: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()

    async def follow() -> None:
        end = None
        try:
            async with contextlib.aclosing(core.llm.generate(prompt, params, request_id, **more)) as outputs:
                async for output in outputs:
                    here.call_soon_threadsafe(arrived.put_nowait, output)
        except Exception as error:
            end = error
        finally:
            here.call_soon_threadsafe(ended)
        here.call_soon_threadsafe(arrived.put_nowait, end)

    following = asyncio.run_coroutine_threadsafe(follow(), core.loop)
    try:
        while (found := await arrived.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        following.cancel()
