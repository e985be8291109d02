"""The engine as rollouts see it while its weights change beneath them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from verl_adaptor.protocols.engine import InferenceEngine
from verl_adaptor.protocols.requests import decode_text, mix_seed
from verl_adaptor.samples import Completion, Delta, Prompt, SamplingParams


class GatedEngine:
    """Hands requests to the engine of the moment; goes on with those that new weights have aborted.

    Whatever else is asked of it is the engine's own. It is for one event loop.

    Args:
        engine: the first one.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.running = 0
        """Requests within the engine."""
        self.prompts = 0
        """Whose rollouts run on it, between two turns too."""
        self._shut = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def agenerate(self, prompt: Any, params: SamplingParams | None = None) -> list[Completion]:
        """As the engine's, whole whatever became of its weights meanwhile: an aborted response goes on from its tokens.

        What comes after an abort is drawn with a seed of its own, and each token knows the version that sampled it.
        """
        wish = params or SamplingParams()
        found = await self._ask(prompt, wish)
        return [await self._whole(completion, wish) for completion in found]

    async def _whole(self, completion: Completion, params: SamplingParams) -> Completion:
        while completion.finish_reason == "abort":
            [more] = await self._ask(
                Prompt(token_ids=(*completion.prompt_token_ids, *completion.token_ids), group_id=completion.group_id),
                _rest(params, completion.index, len(completion.token_ids)),
            )
            completion = replace(
                completion,
                token_ids=(*completion.token_ids, *more.token_ids),
                log_probs=(*completion.log_probs, *more.log_probs),
                version_runs=(*completion.version_runs, *more.version_runs),
                finish_reason=more.finish_reason,
                text=self._text((*completion.token_ids, *more.token_ids), completion.text + more.text),
            )
        return completion

    async def stream(self, prompt: Any, params: SamplingParams | None = None) -> AsyncGenerator[Delta]:
        """As the engine's, whole likewise: an aborted sample's deltas go on under the name of the request that began it."""
        wish, begun = params or SamplingParams(), self.engine.as_prompt(prompt)
        tokens: dict[int, list[int]] = {}
        aborted: list[Delta] = []
        async for delta in self._deltas(begun, wish):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason == "abort":
                aborted.append(delta)
            else:
                yield delta
        for last in aborted:
            async for delta in self._rest_of(last, begun, wish, tokens[last.index]):
                yield delta

    async def _rest_of(
        self, aborted: Delta, begun: Prompt, params: SamplingParams, tokens: list[int]
    ) -> AsyncGenerator[Delta]:
        """From the delta that ended too early to the one that ends the sample."""
        last = aborted
        yield replace(last, finish_reason=None)
        while last.finish_reason == "abort":
            so_far = replace(begun, token_ids=(*begun.token_ids, *tokens))
            async for delta in self._deltas(so_far, _rest(params, aborted.index, len(tokens))):
                tokens.extend(delta.token_ids)
                last = replace(delta, request_id=aborted.request_id, index=aborted.index)
                yield replace(last, finish_reason=None) if last.finish_reason == "abort" else last

    async def _deltas(self, prompt: Any, params: SamplingParams) -> AsyncGenerator[Delta]:
        async with self._within(), aclosing(self.engine.stream(prompt, params)) as deltas:
            async for delta in deltas:
                yield delta

    async def _ask(self, prompt: Any, params: SamplingParams) -> list[Completion]:
        async with self._within():
            return await self.engine.agenerate(prompt, params)

    @asynccontextmanager
    async def _within(self) -> AsyncIterator[None]:
        """A request's time within the engine, which begins when the gate is open."""
        while not self._open.is_set():  # it may be shut again before this is woken
            await self._open.wait()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    def _text(self, token_ids: tuple[int, ...], otherwise: str) -> str:
        """Of all tokens together: where two parts meet, their texts need not add up."""
        tokenizer = self.engine.tokenizer
        return otherwise if tokenizer is None else decode_text(tokenizer, token_ids)

    @contextmanager
    def rolling(self) -> Iterator[None]:
        """Within this block a prompt's rollouts run on it."""
        self.prompts += 1
        try:
            yield
        finally:
            self.prompts -= 1

    @property
    def is_shut(self) -> bool:
        """Whether requests wait."""
        return self._shut > 0

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Within this block no request enters."""
        self._shut += 1
        self._open.clear()
        try:
            yield
        finally:
            self._shut -= 1
            if not self._shut:
                self._open.set()

    async def settled(self) -> None:
        """Until no request is within the engine; with the gate shut it stays so."""
        await self._idle.wait()


def _rest(params: SamplingParams, index: int, so_far: int) -> SamplingParams:
    """What is left to sample of one response; with a seed of its own, made of what it was."""
    seed = None if params.seed is None else mix_seed(params.seed + index, so_far)
    return params.replace(n=1, max_tokens=params.max_tokens - so_far, seed=seed)
