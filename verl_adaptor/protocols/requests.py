"""What an engine is asked for, one record a sample, and what its model allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from verl_adaptor.samples import Completion, Delta, FinishReason, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptLike = str | Sequence[int] | Prompt


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What the engine's model allows."""

    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    max_model_len: int
    """Longest prompt + response."""
    eos_token_ids: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]
    """Name -> shape of every tensor that a weight update must bring; tied aliases left out."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias -> the name in `tensors` that it shares memory with."""


@dataclass(eq=False)
class SampleRequest:
    """One sample of one request: what a backend admits, and what has come back so far."""

    request_id: str
    index: int
    group_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Seeds this sample's own generator (law I4)."""
    stop_token_ids: frozenset[int]
    """EOS (unless ignored) and the request's own: sampling one ends the response."""
    sink: Callable[[SampleRequest, Delta], None] | None = None
    """Told of the last delta, or of each if `streams`, under the engine's lock."""
    streams: bool = False
    wants_text: bool = False
    """Decode after every delta and not only at the end: for streams and stop strings."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_runs: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    text: str = ""
    decoded: tuple[int, int] = (0, 0)
    """How many tokens the text before its newest piece stands for, and how many all of it does."""

    @property
    def key(self) -> tuple[str, int]:
        """What names it in the backend."""
        return self.request_id, self.index

    @property
    def done(self) -> bool:
        """No more deltas will come."""
        return self.finish_reason is not None or self.error is not None

    def take(self, delta: Delta, version: int) -> None:
        """Add a delta's tokens, sampled by this policy version."""
        self.token_ids.extend(delta.token_ids)
        self.log_probs.extend(delta.log_probs)
        self.finish_reason = delta.finish_reason
        count = len(delta.token_ids)
        if count and self.version_runs and self.version_runs[-1][0] == version:
            self.version_runs[-1] = (version, self.version_runs[-1][1] + count)
        elif count:
            self.version_runs.append((version, count))

    def new_text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """What the tokens so far add to the text; an incomplete character is held back until it is whole.

        Only the newest tokens are decoded, with the piece before them, on which their spaces may depend; all of them
        at the end.
        """
        if self.done:
            whole = decode_text(tokenizer, self.token_ids)
            added = whole[len(self.text) :] if whole.startswith(self.text) else self._tail(tokenizer)[0]
        else:
            added, complete = self._tail(tokenizer)
            if not complete:
                return ""
            self.decoded = self.decoded[1], len(self.token_ids)
        self.text += added
        return added

    def _tail(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
        """The text of the tokens not decoded yet, and whether it ends with a whole character."""
        start, stop = self.decoded
        before = decode_text(tokenizer, self.token_ids[start:stop])
        both = decode_text(tokenizer, self.token_ids[start:])
        return both[len(before) :], not both.endswith("\N{REPLACEMENT CHARACTER}")

    def completion(self) -> Completion:
        """The finished response; raises what ended it otherwise."""
        if self.error is not None:
            raise self.error
        return Completion(
            request_id=self.request_id,
            group_id=self.group_id,
            index=self.index,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason or "abort",
            version_runs=tuple(self.version_runs),
            text=self.text,
        )


def decode_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of a response: without special tokens, otherwise exactly what the tokens say."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A single prompt is a list of one; a flat list of ints is one prompt."""
    if isinstance(prompts, str | Prompt):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(item, Integral) for item in many):
        return [tuple(many)]  # type: ignore[arg-type]
    return many  # type: ignore[return-value]


def mix_seed(seed: int, number: int) -> int:
    """A 63-bit seed from two numbers (splitmix64's finaliser), so that neighbouring seeds share nothing."""
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1
