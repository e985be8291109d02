"""vLLM's engine core, in this process or beside it, behind the calls that an engine needs."""

from __future__ import annotations

import abc
import asyncio
import gc
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar, cast

import torch.distributed as dist
from typing_extensions import override
from vllm import AsyncEngineArgs, EngineArgs
from vllm import SamplingParams as VLLMParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.transformers.base import Base as TransformersModel
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from verl_adaptor.backends.vllm.adapters import POLICY
from verl_adaptor.backends.vllm.sampler import SEED, TEMPERATURE
from verl_adaptor.errors import EngineError
from verl_adaptor.protocols import SampleRequest

T = TypeVar("T")

EXTENSION = "verl_adaptor.backends.vllm.worker.WorkerExtension"
START_S = 600.0
"""Longest that a process of its own may take to start."""
CALL_S = 600.0
"""Longest that it may take to answer a call, such as to load a bucket."""
STEP_S = 600.0
"""Longest that it may take for a token of any running request."""
SHUTDOWN_S = 10.0
"""Longest that it may take to end."""


class Core(abc.ABC):
    """Requests in, outputs out, and calls to the workers."""

    workers_are_here: bool
    """Whether the workers are in this process, and what `call` hands them needs no shared memory."""

    @abc.abstractmethod
    def add(self, name: str, token_ids: Sequence[int], params: VLLMParams) -> None:
        """Take a request in."""

    @abc.abstractmethod
    def step(self) -> list[RequestOutput]:
        """What has come since the last call; waits for something."""

    @abc.abstractmethod
    def abort(self, names: list[str]) -> None:
        """Forget these requests; unknown ones are ignored."""

    @abc.abstractmethod
    def call(self, method: str, *arguments: Any) -> list[Any]:
        """A method of `WorkerExtension` on all workers."""

    @abc.abstractmethod
    def call_soon(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """The same, without waiting; calls run in order. What it returns waits for the answers."""

    @abc.abstractmethod
    def halt(self) -> list[RequestOutput]:
        """Stop between two tokens; what has come and was not handed out yet."""

    @abc.abstractmethod
    def go_on(self) -> None:
        """Undo `halt`. Running requests are read anew: no key-value from before is used again."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Weights to the host, the key-value cache away."""

    @abc.abstractmethod
    def wake_up(self, tags: list[str]) -> None:
        """Take this memory again: ``weights``, ``kv_cache``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the model and its cache, and end the processes."""

    def break_off(self) -> None:  # noqa: B027
        """End the processes, and with an error whatever waits for them in another thread."""


class CoreHere(Core):
    """In this process, and only advancing in `step`; with several workers, those are processes of their own.

    Args:
        arguments: of vLLM's `EngineArgs`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.workers_are_here = arguments["distributed_executor_backend"] == "uni"
        self._adapters = policy_adapters(arguments)
        _make_expert_group()
        with _transformers_untouched():
            self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments, worker_extension_cls=EXTENSION))
        gc.unfreeze()  # vLLM froze all that this process had, for good
        client: Any = self._llm.engine_core
        client._finalizer.detach()  # it would end torch.distributed under a trainer
        self._core = client.engine_core

    @override
    def add(self, name: str, token_ids: Sequence[int], params: VLLMParams) -> None:
        self._llm.add_request(name, prompt(token_ids), params, lora_request=self._adapters)

    @override
    def step(self) -> list[RequestOutput]:
        return self._llm.step()

    @override
    def abort(self, names: list[str]) -> None:
        self._llm.abort_request(names)

    @override
    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.call_soon(method, *arguments)()

    @override
    def call_soon(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        answers = self._core.model_executor.collective_rpc(method, CALL_S, args=arguments, non_block=True)

        def wait() -> list[Any]:
            try:
                found: list[Any] = answers.result()
            except TimeoutError:
                raise EngineError(
                    f"vLLM's workers did not answer {method} within {CALL_S:.0f} s; close this engine."
                ) from None
            return found

        return wait

    @override
    def halt(self) -> list[RequestOutput]:
        return []

    @override
    def go_on(self) -> None:
        self._llm.reset_prefix_cache(reset_running_requests=True)

    @override
    def sleep(self) -> None:
        self._llm.sleep(1)

    @override
    def wake_up(self, tags: list[str]) -> None:
        self._llm.wake_up(tags)

    @override
    def close(self) -> None:
        self._core.structured_output_manager.clear_backend()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()


class CoreBeside(Core):
    """In a process of its own, advancing by itself; its outputs are collected by a thread here.

    Args:
        arguments: of vLLM's `EngineArgs`.
        arrived: where they are put, for whoever takes those of several; None: a queue of its own.
    """

    workers_are_here = False

    def __init__(
        self, arguments: Mapping[str, Any], arrived: queue.SimpleQueue[RequestOutput | Exception] | None = None
    ) -> None:
        self._arrived = queue.SimpleQueue() if arrived is None else arrived
        self.adapters = policy_adapters(arguments)
        self._following: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-outputs", daemon=True)
        self._thread.start()
        try:
            self.llm: AsyncLLM = self._wait(self._start(arguments), START_S)
        except BaseException:
            _end_loop(self._loop, self._thread)
            raise
        # a script that ends without close() ends it too, before vLLM's own finalizer ends its process under our tasks
        self._end = weakref.finalize(self, _end, self.llm, self._following, self._loop, self._thread)

    async def _start(self, arguments: Mapping[str, Any]) -> AsyncLLM:
        # its processes inherit that: a terminal's Ctrl-C reaches them too, and it is for this process to end them
        resource_tracker.ensure_running()  # which would unblock it again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, worker_extension_cls=EXTENSION))

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        return self._soon(coroutine, timeout_s)()

    def _soon(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> Callable[[], T]:
        if self._loop.is_closed():
            coroutine.close()
            raise EngineError("vLLM's engine process was ended.")
        return partial(self._result, asyncio.run_coroutine_threadsafe(coroutine, self._loop), timeout_s)

    def _result(self, future: Future[T], timeout_s: float) -> T:
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise EngineError(
                f"vLLM's engine process did not answer within {timeout_s:.0f} s; close this engine."
            ) from None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where `llm` lives."""
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_S) -> T:
        """A coroutine in that loop, from another thread."""
        return self._wait(coroutine, timeout_s)

    @override
    def add(self, name: str, token_ids: Sequence[int], params: VLLMParams) -> None:
        self._loop.call_soon_threadsafe(self._follow_soon, name, prompt(token_ids), params)

    def _follow_soon(self, name: str, prompt: Any, params: VLLMParams) -> None:
        self._following[name] = self._loop.create_task(self._follow(name, prompt, params))

    async def _follow(self, name: str, prompt: Any, params: VLLMParams) -> None:
        try:
            async for output in self.llm.generate(prompt, params, name, lora_request=self.adapters):
                self._arrived.put(output)
        except Exception as error:
            self._arrived.put(error)
        finally:
            self._following.pop(name, None)

    @override
    def step(self) -> list[RequestOutput]:
        try:
            arrived = [self._arrived.get(timeout=STEP_S)]
        except queue.Empty:
            raise EngineError(f"vLLM's engine process gave no token for {STEP_S:.0f} s; close this engine.") from None
        return self.checked(arrived + self._rest())

    def _rest(self) -> list[RequestOutput | Exception]:
        return [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]

    @staticmethod
    def checked(arrived: list[RequestOutput | Exception]) -> list[RequestOutput]:
        """Outputs only; raises the first error among them."""
        for found in arrived:
            if isinstance(found, Exception):
                raise found
        return cast(list[RequestOutput], arrived)

    @override
    def abort(self, names: list[str]) -> None:
        self._wait(self.llm.abort(names))

    @override
    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.call_soon(method, *arguments)()

    @override
    def call_soon(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        return self._soon(self.llm.collective_rpc(method, args=arguments))

    @override
    def halt(self) -> list[RequestOutput]:
        self.stop()
        return self.checked(self._rest())

    def stop(self) -> None:
        """Stop between two tokens; all that has come is among what has arrived."""
        self._wait(self._halt())

    async def _halt(self) -> None:
        """vLLM answers after all outputs from before; then they still go through tasks of this loop."""
        await self.llm.engine_core.pause_scheduler_async(
            mode="keep", clear_cache=True
        )  # pause_generation also sleeps 20 ms
        while not self.llm.engine_core.outputs_queue.empty() or any(
            state.external_req_id in self._following and state.queue is not None and state.queue.output is not None
            for state in self.llm.output_processor.request_states.values()  # of a HTTP client's we need none
        ):
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    @override
    def go_on(self) -> None:
        self._wait(self.llm.resume_generation())

    @override
    def sleep(self) -> None:
        self._wait(self.llm.sleep(1))

    @override
    def wake_up(self, tags: list[str]) -> None:
        self._wait(self.llm.wake_up(tags))

    @override
    def close(self) -> None:
        self._end()

    @override
    def break_off(self) -> None:
        self._loop.call_soon_threadsafe(_cancel_all, self._loop)
        self._end()
        self._arrived.put(EngineError("vLLM's engine process was ended."))


@contextmanager
def _transformers_untouched() -> Iterator[None]:
    """For models that vLLM takes from transformers it changes the class itself, so that it compiles: a trainer in this process
    could load none any more, and its hooks would not run. Here they are not compiled instead."""
    decorate = TransformersModel._decorate_cls_for_torch_compile
    TransformersModel._decorate_cls_for_torch_compile = _undecorated
    try:
        yield
    finally:
        TransformersModel._decorate_cls_for_torch_compile = decorate


def _undecorated(self: Any, **options: Any) -> None:
    """In `support_torch_compile`'s place."""


def _make_expert_group() -> None:
    """vLLM makes its groups once in a process, that of experts for a mixture only: after a dense model none would start."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        world = parallel_state.get_world_group()
        backend = dist.get_backend(world.device_group)
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [world.ranks], world.local_rank, backend, group_name="ep"
        )


def _end(
    llm: AsyncLLM, following: dict[str, asyncio.Task[None]], loop: asyncio.AbstractEventLoop, thread: threading.Thread
) -> None:
    """The engine's process, and the thread that listens to it."""

    async def stop() -> None:
        """First whoever waits for the process: its end would be an error to them, and a log entry."""
        for task in (*following.values(), llm.output_handler):
            if task is not None:
                task.cancel()
        await asyncio.sleep(0)
        llm.shutdown(SHUTDOWN_S)

    asyncio.run_coroutine_threadsafe(stop(), loop).result(SHUTDOWN_S + 5)
    _end_loop(loop, thread)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    if not thread.is_alive():
        loop.close()


def prompt(token_ids: Sequence[int]) -> Any:
    """Token ids as vLLM takes them without looking at a tokenizer."""
    return {"type": "token", "prompt_token_ids": list(token_ids)}


def policy_adapters(arguments: Mapping[str, Any]) -> LoRARequest | None:
    """The adapter that each request runs with, if the engine takes any."""
    return POLICY if arguments.get("enable_lora") else None


def sampling(sample: SampleRequest) -> VLLMParams:
    """vLLM's params for one sample: its tokens one by one, each with its log-prob."""
    params = sample.params
    return VLLMParams(
        temperature=1.0 if params.temperature else 0.0,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,
        stop_token_ids=sorted(sample.stop_token_ids),
        ignore_eos=True,  # EOS is among stop_token_ids, where it is to end the response
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={SEED: sample.seed, TEMPERATURE: params.temperature},
    )


def scoring() -> VLLMParams:
    """vLLM's params for the log-probs of a prompt; the one token that it must generate is thrown away."""
    return VLLMParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
