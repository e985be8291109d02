"""What crosses the boundary of an engine: plain values, no tensors, no torch.

Token ids go in and token ids come out. Text is a convenience on top, and a response is never re-tokenised:
re-tokenising changes ids that were sampled, and with them every log-prob.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from verl_adaptor.errors import InvalidRequest, nearest

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
VersionRuns = tuple[tuple[int, int], ...]
"""Runs of (policy_version, token count), in order: ``((3, 10), (4, 2))`` is ten tokens of policy 3, then two of 4."""


_GONE = {
    "use_beam_search": "engines have dropped beam search; sample n responses and rank them with engine.score",
    "best_of": "engines have dropped it; sample n responses and keep the best by engine.score",
    "logits_processors": "engines run no code a request; use logit_bias, or write an engine of your own as a plug-in",
    "logits_processor": "engines run no code a request; use logit_bias, or write an engine of your own as a plug-in",
}
"""What users of older engines ask for -> what to do instead."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. Checked where it is made; a wrong value is `InvalidRequest` with the limit.

    >>> SamplingParams(max_tokens=16, temperature=0.7, n=4).changes_distribution
    False
    """

    max_tokens: int = 16
    """Most tokens in one response, EOS included."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy (log-probs are then those at temperature 1)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability mass, in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    n: int = 1
    """Independent samples of each prompt."""
    seed: int | None = None
    """Repeats this request's samples whatever else is in the batch (law I4); None draws from the engine's seed."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response besides the model's EOS; the token itself is kept."""
    stop: tuple[str, ...] = ()
    """Strings that end a response once its text holds one; the tokens stay as sampled. Needs a tokenizer."""
    ignore_eos: bool = False
    """Go on to max_tokens whatever is sampled."""
    min_tokens: int = 0
    """EOS cannot be sampled before this many tokens."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) the logits of tokens seen in prompt and response (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token already in the response."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is already in the response."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""

    def __new__(cls, **settings: Any) -> Self:
        """Refuses what is no sampling parameter of any engine here with what to do instead (C31)."""
        for name in settings.keys() - cls.__dataclass_fields__.keys():
            raise InvalidRequest(
                f"{name} is no sampling parameter: {_GONE.get(name) or nearest(name, cls.__dataclass_fields__)}."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name}={getattr(self, name)!r} is not allowed: it must be {allowed}.")

        require(self.max_tokens >= 1, "max_tokens", "at least 1")
        require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "finite and at least 0")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(self.top_k >= 0, "top_k", "at least 0 (0 keeps all tokens)")
        require(self.n >= 1, "n", "at least 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens={self.max_tokens}")
        require(self.repetition_penalty > 0, "repetition_penalty", "above 0 (1 switches it off)")
        require(not any(math.isnan(v) for v in self.logit_bias.values()), "logit_bias", "numbers, not NaN")
        require(math.isfinite(self.presence_penalty), "presence_penalty", "finite")
        require(math.isfinite(self.frequency_penalty), "frequency_penalty", "finite")

    @property
    def changes_distribution(self) -> bool:
        """True if the sampled distribution is not the policy's tempered one: penalties, logit bias, min_tokens.

        Such samples are fine for evaluation and refused for training rollouts: the trainer cannot reproduce their
        log-probs. (top-p and top-k only cut the support, and log-probs are not renormalised under them.)
        """
        return bool(
            self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: token ids, and what the reward function needs to know about it."""

    token_ids: tuple[int, ...]
    group_id: str = ""
    """Shared by the n samples of one prompt; an engine fills it in where it is empty."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Ground truth and whatever else the reward function reads. Built-ins only, so that it can be saved."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to one request. Deltas of a stream join to the final completion (law I5)."""

    request_id: str
    index: int = 0
    """Which of the request's n samples."""
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    policy_version: int = 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished response."""

    request_id: str
    group_id: str
    index: int
    """Which of the request's n samples."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The tokens as sampled; the EOS token is the last one if and only if the response stopped on it (law I1)."""
    log_probs: tuple[float, ...]
    """log p(token | before) at the sampling temperature, not renormalised under top-p or top-k (law I2), in nats."""
    finish_reason: FinishReason
    version_runs: VersionRuns
    text: str = ""

    @property
    def policy_version(self) -> int:
        """The version of the oldest token: a completion is as stale as its oldest token."""
        return min((version for version, _ in self.version_runs), default=0)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One training sample: a prompt and a response in which some tokens may be observations.

    A two-turn trajectory with a tool's answer between the turns::

        response_ids   [ 7,  8,  9, 40, 41, 42, 11,  2]
        response_mask  [ 1,  1,  1,  0,  0,  0,  1,  1]     0 = observation: neither trained nor rewarded
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    """1 for tokens the policy sampled, 0 for observation tokens. Same length as response_ids."""
    rollout_log_probs: tuple[float, ...]
    """The engine's log-probs, 0.0 at observation tokens. Same length as response_ids."""
    finish_reason: FinishReason
    version_runs: VersionRuns = ()
    group_id: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """The response as text, for reward functions and reports."""
    temperature: float = 1.0

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.rollout_log_probs)}
        if len(lengths) != 1:
            raise InvalidRequest(
                f"a trajectory's response_ids ({len(self.response_ids)}), response_mask ({len(self.response_mask)}) and "
                f"rollout_log_probs ({len(self.rollout_log_probs)}) must have one length; give observation tokens mask 0 "
                "and log-prob 0.0."
            )

    @property
    def policy_version(self) -> int:
        """The version of the oldest token."""
        return min((version for version, _ in self.version_runs), default=0)

    @classmethod
    def from_completion(cls, completion: Completion, prompt: Prompt, *, temperature: float = 1.0) -> Trajectory:
        """A single-turn trajectory: every response token was sampled by the policy."""
        return cls(
            prompt_ids=completion.prompt_token_ids,
            response_ids=completion.token_ids,
            response_mask=(1,) * len(completion.token_ids),
            rollout_log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            version_runs=completion.version_runs,
            group_id=completion.group_id,
            info=prompt.info,
            text=completion.text,
            temperature=temperature,
        )


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """Name, shape and dtype of one exported tensor, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without the prefix: ``float32``, ``bfloat16``."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """New weights for an engine: metadata now, bytes when the engine pulls them.

    The engine compares `tensors` with its own model before the first byte moves. `buckets` then yields dictionaries of
    tensors, each bucket about `bucket_bytes` (a tensor larger than that is a bucket of its own, C08); a tensor is valid
    only until the next bucket is pulled. Tied weights appear once; a fused group travels in one bucket.
    """

    version: int
    tensors: tuple[TensorMeta, ...]
    buckets: Callable[[], Iterator[dict[str, torch.Tensor]]]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias name -> the exported name it shares memory with, e.g. ``lm_head.weight -> model.embed_tokens.weight``."""
    fused_groups: tuple[tuple[str, ...], ...] = ()
    """Names that some engines fuse (q, k, v; gate, up) and that therefore travel in one bucket."""
    digests: Mapping[str, int] = field(default_factory=dict)
    """`weights.digests` of the tensors, taken where they are trained; empty: they are not compared on arrival."""
    source: tuple[str, int] = ("", 0)
    """The trainer that exported it and its version there, for engines that run on one trainer's own weights."""
    largest_bucket: int = 0
    """Bytes that the largest bucket takes in shared memory; 0 where nobody has counted."""
    adapters: AdapterUpdate | None = None
    """The same policy as low-rank adapters over a base, where the trainer trains those: for engines that take them alone."""


@dataclass(frozen=True, kw_only=True)
class AdapterUpdate:
    """A policy as low-rank adapters (LoRA, arXiv 2106.09685) over a frozen base: W x + (alpha / rank) B (A x)."""

    rank: int
    alpha: float
    base: WeightUpdate
    """The weights beneath. Those of one `source` never change: an engine that has them needs them no more."""
    weights: WeightUpdate
    """``<layer>.lora_A.weight``, of shape (rank, in), and ``<layer>.lora_B.weight``, (out, rank)."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have adapters, as the model names them."""
        return tuple(t.name.removesuffix(".lora_A.weight") for t in self.weights.tensors if ".lora_A." in t.name)


UpdatePart = Literal["merged", "base", "adapters"]
"""Whose buckets: those of a `WeightUpdate`, or of its `AdapterUpdate`'s base or weights."""
