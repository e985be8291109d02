"""`InferenceEngine`: what every engine does, and the checks around it."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import itertools
import logging
import operator
import os
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, Self

from verl_adaptor.capabilities import BackendSpec, Capability, Support
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import (
    EngineClosed,
    EngineError,
    EnginePaused,
    InvalidRequest,
    UnsupportedCapability,
    WeightUpdateError,
)
from verl_adaptor.protocols.dispatch import Dispatcher
from verl_adaptor.protocols.requests import EngineModel, PromptLike, SampleRequest, as_list, mix_seed
from verl_adaptor.samples import Completion, Delta, Prompt, SamplingParams, WeightUpdate
from verl_adaptor.weights import digests

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

InFlight = Literal["wait", "abort", "keep"]

CLOSE_WAIT_S = 30.0
"""Longest that `close` waits for a step or an update of another thread before it breaks that off."""
_CLOSED_MEANWHILE = "the engine was closed while this request was running."


class Served(Protocol):
    """An engine's HTTP server while it runs."""

    url: str
    """``http://host:port``."""

    def check(self) -> None:
        """Raise `EngineError` if it serves no more."""
        ...


class InferenceEngine(abc.ABC):
    """Generates from one model and scores with it.

    A backend sets `model` (and `tokenizer`, where there is one) in its constructor and writes `_admit`, `_step`, `_drop`,
    `_score`, `_load_bucket` and `_release`.
    """

    model: EngineModel
    tokenizer: PreTrainedTokenizerBase | None = None

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        self.path = path
        self.config = config
        self.options = options
        self.spec = spec
        self._dispatch = Dispatcher(self, spec.name)
        self._lock = self._dispatch.lock
        self._ids = itertools.count()
        self._version = 0
        self._asleep = False
        self._closed = False
        self._broken: BaseException | None = None

    # -- generate: sync, async, stream ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_exceptions: bool = False,
    ) -> list[Completion]:
        """All responses, n consecutive ones a prompt, in input order.

        Args:
            prompts: texts, token ids or `Prompt`s; a single one is a list of one.
            params: one for all, or one a prompt.
            return_exceptions: put the `InvalidRequest` of a bad prompt in its place and serve the others (law I8);
                otherwise it is raised before any work starts.
        """
        many = as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(each)} sampling params for {len(many)} prompts; give one, or one a prompt.")
        self._check_serving()
        groups: list[list[SampleRequest] | InvalidRequest] = []
        for position, (prompt, its) in enumerate(zip(many, each, strict=True)):
            try:
                groups.append(self._expand(prompt, its))
            except InvalidRequest as error:
                if not return_exceptions:
                    raise InvalidRequest(f"prompt {position}: {error}") from None
                groups.append(error)
        if self._dispatch.held:
            raise EnginePaused("the engine is paused; call resume() before a sync generate, which would wait for ever.")
        samples = [s for group in groups if isinstance(group, list) for s in group]
        self._enter(samples)
        try:
            self._dispatch.run(samples)
        finally:
            self._dispatch.leave(samples)
        results: list[Completion] = []
        for group in groups:  # the exceptions are there only when asked for
            results += [s.completion() for s in group] if isinstance(group, list) else [group]  # type: ignore[list-item]
        return results

    async def agenerate(self, prompt: PromptLike, params: SamplingParams | None = None) -> list[Completion]:
        """The n responses to one prompt. Concurrent calls share batches; cancelling one aborts it."""
        async with contextlib.aclosing(self._follow(prompt, params, streams=False)) as finished:
            samples = [sample async for sample, _ in finished]
        return [s.completion() for s in sorted(samples, key=lambda s: s.index)]

    async def stream(self, prompt: PromptLike, params: SamplingParams | None = None) -> AsyncGenerator[Delta]:
        """Deltas as they are sampled, those of the n samples interleaved; leaving the loop early aborts the request."""
        async with contextlib.aclosing(self._follow(prompt, params, streams=True)) as deltas:
            async for _, delta in deltas:
                yield delta

    async def _follow(
        self, prompt: PromptLike, params: SamplingParams | None, *, streams: bool
    ) -> AsyncGenerator[tuple[SampleRequest, Delta]]:
        """The deltas of one request (only the last of each sample unless `streams`)."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[SampleRequest, Delta]] = asyncio.Queue()

        def sink(sample: SampleRequest, delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, (sample, delta))

        self._check_serving()
        samples = self._expand(prompt, params or SamplingParams())
        for sample in samples:
            sample.sink, sample.streams, sample.wants_text = sink, streams, streams or sample.wants_text
        self._dispatch.submit(samples, loop)
        try:
            running = len(samples)
            while running:
                sample, delta = await arrived.get()
                if sample.error is not None:
                    raise sample.error
                running -= delta.finish_reason is not None
                yield sample, delta
        finally:
            self._dispatch.depart(samples)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests with finish_reason ``abort``; what they have so far is returned, their places are free."""
        self._check_open()
        self._dispatch.abort(set(request_ids))

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests that are not finished, oldest first."""
        with self._lock:
            self._dispatch.let_go()
            return self._dispatch.request_ids

    def chat_token_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation under the tokenizer's chat template, the assistant's turn opened."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InvalidRequest(f"{self.path} has no chat template; give token ids or plain text.")
        ids = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=True, return_dict=False
        )
        return tuple(ids)

    # -- score ---------------------------------------------------------------------------------------------------

    def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """log p(token | before) of each token but the first, for each sequence: one value fewer than tokens, in nats."""
        for row in token_ids:
            self._check_ids(row, "sequence")
            if not 2 <= len(row) <= self.model.max_model_len:
                raise InvalidRequest(
                    f"a sequence of {len(row)} tokens cannot be scored; allowed: 2 to max_model_len={self.model.max_model_len}."
                )
        if not temperature > 0:
            raise InvalidRequest(f"temperature={temperature!r} is not allowed: it must be above 0.")
        with self._lock:
            self._check_serving()
            with self._dispatch.awake():
                self._check_lent()
                return self._score(token_ids, temperature)

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights served now; 0 is the model as loaded."""
        return self._version

    def update_weights(self, update: WeightUpdate, *, in_flight: InFlight = "wait") -> None:
        """Serve new weights. Checked before the first write; on any error the old policy, or none, is served (law I6).

        Args:
            update: from `TrainerBackend.export_weights`.
            in_flight: running requests are finished first (``wait``), aborted (``abort``), or go on with the new policy
                and no cache of the old one (``keep``); then their version_runs tell the tokens apart.

        Raises:
            WeightUpdateError: tensors are missing, unknown or misshapen, or the version is older than the one served.
        """
        with self._lock:
            self._check_serving()
            self._check_update(update)
            self._settle(in_flight)
            try:
                self._dispatch.book(self._halt())
                self._load(update)
            except BaseException as error:
                self._broken = error  # some tensors may be new and others old: never serve that
                self._dispatch.fail_all(error)
                raise
            self._version = update.version
            self._go_on()
            self._dispatch.flush()

    def updating(self) -> AbstractContextManager[None]:
        """Within this block no other thread changes the engine: read the version, and make the next."""
        return self._lock

    # -- serving over HTTP ---------------------------------------------------------------------------------------

    def serving(self, host: str = "127.0.0.1", port: int = 0) -> AbstractContextManager[Served]:
        """Within this context the engine is served by an OpenAI-compatible HTTP server too; port 0 takes a free one."""
        raise self._unsupported(Capability.SERVE)

    # -- pause, sleep, close -------------------------------------------------------------------------------------

    def pause(self, in_flight: InFlight = "keep") -> None:
        """Stop stepping: running requests are kept as they are, finished first or aborted; async callers wait."""
        with self._lock:
            self._check_serving()
            if in_flight != "keep":
                self._settle(in_flight)
            self._dispatch.held = True

    def resume(self) -> None:
        """Undo `pause`."""
        self._check_open()
        self._dispatch.held = False

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Give memory back until `wake_up` (law I7). Running requests are finished first."""
        raise self._unsupported(Capability.SLEEP)

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory again."""
        raise self._unsupported(Capability.SLEEP)

    def close(self) -> None:
        """End running requests with `EngineClosed` and free everything; a second call does nothing (law I9)."""
        if self._closed:
            return
        if not self._lock.acquire(CLOSE_WAIT_S):
            self._break_off()
            if not self._lock.acquire(CLOSE_WAIT_S):
                self._closed = True
                logger.warning(
                    "a step of the engine of %s does not return; what it holds is freed once it does", self.path
                )
                self._dispatch.abandon(EngineClosed(_CLOSED_MEANWHILE))
                threading.Thread(target=self._close_late, name="engine-close", daemon=True).start()
                return
        try:
            if self._closed:
                return
            self._closed = True
            self._free()
        finally:
            self._lock.release()
        self._dispatch.shutdown()

    def _close_late(self) -> None:
        """Once the step has returned after all."""
        with self._lock:
            self._free()
        self._dispatch.shutdown()

    def _free(self) -> None:
        """Under the lock: no step begins between the two."""
        try:
            self._dispatch.fail_all(EngineClosed(_CLOSED_MEANWHILE))
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capabilities(self) -> Mapping[Capability, Support]:
        """What this backend declares."""
        return self.spec.capabilities

    @property
    def place(self) -> tuple[int, bool]:
        """On a rank of a worker group: which replica's it is, and whether it reports for it. Here every rank is a whole one."""
        return int(os.environ.get("RANK", "0")), True

    scores_together = False
    """Whether `score` needs all ranks of a worker group at once, all with all rows."""

    # -- what a backend writes, always called under the engine's lock --------------------------------------------

    @abc.abstractmethod
    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        """Take requests in; they may wait for a place."""

    @abc.abstractmethod
    def _step(self) -> list[Delta]:
        """Advance whatever can be: usually one token for each running sample. Deltas carry no text."""

    @abc.abstractmethod
    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        """Forget these samples and free their places; unknown keys are ignored."""

    def _check_lent(self) -> None:  # noqa: B027
        """Before `_score`: raise `EngineError` where the weights are another's, which has changed them."""

    @abc.abstractmethod
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]: ...

    def _halt(self) -> list[Delta]:
        """Stop between two tokens, for new weights; what was sampled and not handed out yet.

        For an engine that advances by itself; one that only advances in `_step` has nothing to do.
        """
        return []

    def _go_on(self) -> None:  # noqa: B027
        """Undo `_halt`; nothing cached of the weights before is used again."""

    def _load(self, update: WeightUpdate) -> None:
        """Write checked weights, and drop every cache of the old ones (C04, C22); running samples are recomputed."""
        self._begin_load()
        for bucket in self._arriving(update):
            self._load_bucket(bucket)
        self._finish_load()

    def _begin_load(self) -> None:  # noqa: B027
        """New weights come: no cache of the old ones is used from now on."""

    @abc.abstractmethod
    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        """Write some of them; tensors are valid during the call only, fused groups come whole."""

    def _finish_load(self) -> None:  # noqa: B027
        """All have come."""

    def _wake(self) -> None:  # noqa: B027
        """Before the first request, or `score`, after nothing ran: take what only a busy engine needs."""

    def _rest(self) -> None:  # noqa: B027
        """Nothing runs any more: give that back."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Free memory, processes, ports and files."""

    def _break_off(self) -> None:  # noqa: B027
        """Make a step end that another thread has waited for since long; called without the lock. `_release` follows."""

    # -- requests ------------------------------------------------------------------------------------------------

    def _expand(self, prompt: PromptLike, params: SamplingParams) -> list[SampleRequest]:
        """Check one request and make its n samples."""
        prompt = self.as_prompt(prompt)
        self._check_request(prompt, params)
        number = next(self._ids)
        request_id = f"request-{number}"
        base = params.seed if params.seed is not None else mix_seed(self.config.seed, number)
        eos = () if params.ignore_eos else self.model.eos_token_ids
        return [
            SampleRequest(
                request_id=request_id,
                index=index,
                group_id=prompt.group_id or request_id,
                prompt_token_ids=prompt.token_ids,
                params=params,
                seed=mix_seed(base, index),
                stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
                wants_text=bool(params.stop),
            )
            for index in range(params.n)
        ]

    def _enter(self, samples: Sequence[SampleRequest]) -> None:
        with self._lock:
            self._check_serving()
            self._dispatch.enter(samples)

    def as_prompt(self, prompt: PromptLike) -> Prompt:
        """A text or token ids as a prompt. Raises `InvalidRequest` where it is neither."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(f"{self.path} has no tokenizer; give token ids instead of text.")
            return Prompt(token_ids=tuple(self.tokenizer(prompt)["input_ids"]))
        whole = prompt if isinstance(prompt, Prompt) else Prompt(token_ids=prompt)  # type: ignore[arg-type]
        try:
            return dataclasses.replace(whole, token_ids=tuple(operator.index(i) for i in whole.token_ids))
        except TypeError:
            raise InvalidRequest(
                f"{whole.token_ids!r:.80} is no prompt; give a text, a sequence of integer token ids, or a Prompt."
            ) from None

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_request(self, prompt: Prompt, params: SamplingParams) -> None:
        self._check_ids(prompt.token_ids, "prompt")
        longest = len(prompt.token_ids) + params.max_tokens
        if longest > self.model.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(prompt.token_ids)} tokens) + max_tokens ({params.max_tokens}) = {longest} is over "
                f"max_model_len={self.model.max_model_len}; shorten one of them."
            )
        self._check_ids((*params.stop_token_ids, *params.logit_bias) or (0,), "stop_token_ids or logit_bias")
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop strings need a tokenizer and {self.path} has none; use stop_token_ids.")
        if params.changes_distribution and not self.spec.support(Capability.PENALTIES):
            raise self._unsupported(Capability.PENALTIES)

    def _check_ids(self, ids: Sequence[int], what: str) -> None:
        if not len(ids):
            raise InvalidRequest(f"the {what} is empty; give at least one token.")
        bad = [i for i in ids if not 0 <= i < self.model.vocab_size]
        if bad:
            raise InvalidRequest(f"the {what} holds token id {bad[0]}; allowed: 0 to {self.model.vocab_size - 1}.")

    def _settle(self, in_flight: InFlight) -> None:
        """What happens to running requests before the engine changes."""
        if in_flight not in ("wait", "abort", "keep"):
            raise EngineError(f"in_flight={in_flight!r} is not allowed; use 'wait', 'abort' or 'keep'.")
        self._dispatch.let_go()
        if in_flight == "abort":
            self._dispatch.abort(set(self.running))
        elif in_flight == "keep":
            if self._dispatch.samples and not self.spec.support(Capability.IN_FLIGHT_KEEP):
                raise self._unsupported(Capability.IN_FLIGHT_KEEP)
        elif self._dispatch.held and self._dispatch.samples:
            raise EnginePaused("requests are held by pause(); resume() first, or use in_flight='abort' or 'keep'.")
        else:
            self._dispatch.drain()

    def _check_update(self, update: WeightUpdate) -> None:
        """Names and shapes against the model, the version against the one served. Nothing is written."""
        aliases = self.model.tied.keys() & update.tied.keys()
        brought = {meta.name: tuple(meta.shape) for meta in update.tensors if meta.name not in aliases}
        wanted = {name: tuple(shape) for name, shape in self.model.tensors.items()}
        shared = sorted(brought.keys() & wanted.keys())
        found = {
            "missing": sorted(wanted.keys() - brought.keys()),
            "tied in the engine, not in the trainer": sorted(brought.keys() & self.model.tied.keys()),
            "unknown": sorted(brought.keys() - wanted.keys() - self.model.tied.keys()),
            "misshapen": [f"{n} {brought[n]} instead of {wanted[n]}" for n in shared if brought[n] != wanted[n]],
        }
        problems = [f"{kind}: {', '.join(names[:5])} ({len(names)} in all)" for kind, names in found.items() if names]
        if problems:
            raise WeightUpdateError(
                f"the update does not fit the engine's model ({self.path}): {'; '.join(problems)}. Nothing was written. "
                "Load engine and trainer from the same model."
            )
        if update.version < self._version:
            raise WeightUpdateError(
                f"the update is version {update.version}, older than version {self._version}, which is served; nothing was "
                "written. Export again."
            )

    def _arriving(self, update: WeightUpdate, *, verify: bool = True) -> Iterator[dict[str, Tensor]]:
        """The buckets of an update, without tied aliases, each checked against what was announced.

        Args:
            update: as `_load` is handed it.
            verify: compare digests, where the update has any; False leaves that to where the tensors go on to.

        Raises:
            WeightUpdateError: a tensor is not as announced, or was changed on its way, or has not come at the end.
        """
        missing = set(self.model.tensors)
        for bucket in update.buckets():
            new = {name: tensor for name, tensor in bucket.items() if name not in self.model.tied}
            for name, tensor in new.items():
                if self.model.tensors.get(name) != tuple(tensor.shape):
                    raise WeightUpdateError(
                        f"{name} {tuple(tensor.shape)} arrived, which was not announced; export the weights again."
                    )
            if verify and update.digests:
                self._compare(update, digests(new))
            yield new
            missing -= new.keys()
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} announced tensors never arrived: {', '.join(sorted(missing)[:5])}; export the weights again."
            )

    def _compare(self, update: WeightUpdate, arrived: Mapping[str, int]) -> None:
        """Raise `WeightUpdateError` where a digest of what arrived differs from the update's."""
        changed = [name for name, digest in arrived.items() if update.digests.get(name) != digest]
        if changed:
            raise WeightUpdateError(
                f"{len(changed)} tensors arrived with other bytes than were sent: {', '.join(changed[:5])}; make a new engine."
            )

    def _check_serving(self) -> None:
        self._check_open()
        if self._broken is not None:
            raise EngineError(
                "a weight update failed half-way; close this engine and create a new one."
            ) from self._broken
        if self._asleep:
            raise EnginePaused("the engine is asleep; call wake_up() first.")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("this engine was closed; create a new one.")

    def _unsupported(self, capability: Capability) -> UnsupportedCapability:
        return UnsupportedCapability(f"{self.spec.name}: {capability} is {self.spec.support(capability)}.")
