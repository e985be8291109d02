"""vLLM's sampler with this project's meaning of a log-prob and of a seed.

vLLM reports log-probs either without the temperature (`raw_logprobs`) or renormalised over what top-p and top-k have left
(`processed_logprobs`), and draws a request's tokens from a generator that a half-read prompt sets back. A trainer needs
the policy's own tempered log-probs (law I2; C02, C03), and a seed repeats its sample (law I4); so both are made here, in one
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from verl_adaptor.backends.sampling import cut, inverse_cdf, uniform
from verl_adaptor.protocols.requests import mix_seed

SEED, TEMPERATURE = "verl_adaptor_seed", "verl_adaptor_temperature"
"""Where a request's `extra_args` hold these. vLLM's own `seed` would give it a generator, which is not used here, and its
own `temperature` must not exceed 2."""


@dataclass(frozen=True)
class _Wish:
    """What a request asks of the sampler."""

    seed: int
    temperature: float
    """Divides the logits: 1 where greedy."""
    edits: bool
    """Its logits are changed: penalties, bias, allowed or bad words, min_tokens, min_p."""


class PolicySampler(Sampler):
    """Reports the tempered policy's log-probs, and draws with `uniform`.

    Args:
        runner: vLLM's model runner, which knows the request of each row.
        vocabulary: ids from here on are padding of the embedding and never sampled (C18).
        seed: for requests that bring none.
    """

    def __init__(self, runner: Any, vocabulary: int, seed: int) -> None:
        super().__init__("raw_logprobs")
        self.score_temperature = 1.0
        """What log-probs of prompts are taken at."""
        self._runner = runner
        self._vocabulary = vocabulary
        self._seed = seed
        self._wishes: dict[str, _Wish] = {}

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """[B, V] logits -> [B, 1] tokens, and the log-probs that are asked for; `logits` may be overwritten."""
        asked = sampling_metadata
        wishes, numbers = self._rows()
        scale = None
        if any(wish.temperature != 1 for wish in wishes):
            scale = torch.tensor([wish.temperature for wish in wishes]).to(logits.device)[:, None]
        logits = logits.float()
        log_probs = (logits if scale is None else logits / scale).log_softmax(-1)
        choice = log_probs
        if any(wish.edits for wish in wishes):
            edited = self.apply_logits_processors(logits, asked, predict_bonus_token)
            choice = edited if scale is None else edited / scale
            for processor in asked.logitsprocs.argmax_invariant:
                choice = processor.apply(choice)
        normalised = choice is log_probs
        tokens = self._draw(choice[:, : self._vocabulary], numbers, asked, normalised)
        gathered = None
        if asked.max_num_logprobs is not None:
            gathered = self.gather_logprobs(log_probs, asked.max_num_logprobs, tokens)
        return SamplerOutput(sampled_token_ids=tokens.int()[:, None], logprobs_tensors=gathered)

    def _rows(self) -> tuple[list[_Wish], list[float]]:
        """What each row's request asks, and the number that its next token is drawn with."""
        requests, ids = self._runner.requests, self._runner.input_batch.req_ids
        if self._wishes.keys() - requests.keys():
            self._wishes = {request: wish for request, wish in self._wishes.items() if request in requests}
        for request in ids:
            if request not in self._wishes:
                self._wishes[request] = self._wish(request, requests[request].sampling_params)
        wishes = [self._wishes[request] for request in ids]
        places = [len(requests[request].output_token_ids) for request in ids]
        return wishes, [uniform(wish.seed, place) for wish, place in zip(wishes, places, strict=True)]

    def _wish(self, request: str, params: Any) -> _Wish:
        extra = params.extra_args or {}
        seed = extra.get(SEED)
        if seed is None and params.seed is not None:  # a HTTP request: as an engine seeds its first sample
            seed = mix_seed(params.seed, 0)
        if seed is None:
            seed = mix_seed(self._seed, int.from_bytes(blake2b(request.encode(), digest_size=8).digest()))
        edits = (
            params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.min_p
            or params.min_tokens
            or params.logit_bias
            or params.allowed_token_ids
            or params.bad_words
        )
        return _Wish(seed, extra.get(TEMPERATURE, params.temperature) or 1.0, bool(edits))

    def _draw(self, choice: Tensor, numbers: list[float], asked: SamplingMetadata, normalised: bool) -> Tensor:
        if asked.all_greedy:
            return choice.argmax(-1)
        probs = choice.exp() if normalised else choice.softmax(-1)
        if asked.top_k is not None or asked.top_p is not None:
            probs = self._cut(probs, asked)
        tokens = inverse_cdf(probs, torch.tensor(numbers, dtype=torch.float64).to(probs.device))
        if asked.all_random or asked.temperature is None:
            return tokens
        return torch.where(asked.temperature < 1e-5, choice.argmax(-1), tokens)

    def _cut(self, probs: Tensor, asked: SamplingMetadata) -> Tensor:
        rows, size = probs.shape
        top_k = torch.full((rows,), size, device=probs.device) if asked.top_k is None else asked.top_k.long()
        top_p = torch.ones(rows, device=probs.device) if asked.top_p is None else asked.top_p
        return cut(probs, top_k.clamp(max=size)[:, None], top_p.double()[:, None])

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """[N, V] of a prompt's logits, at the temperature that `score` has asked for."""
        return (logits.float() / self.score_temperature).log_softmax(-1)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """As vLLM's where alternatives are asked for; else the tokens' own alone, without their ranks in the vocabulary."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        ids = token_ids[:, None]
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), torch.zeros_like(token_ids))
