"""What a model allows an engine, from its configs: how long a sequence may be, what ends it, what may be sampled."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from verl_adaptor.errors import ConfigError


def max_model_len(config: PreTrainedConfig, asked: int | None, path: str) -> int:
    """The longest prompt + response: what is asked for, else the model's own limit.

    Raises:
        ConfigError: more is asked for than the model was made for, or neither says anything.
    """
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [int(limit) for limit in (asked, own) if limit is not None]
    if not limits:
        raise ConfigError(f"{path}: its config names no max_position_embeddings; set max_model_len.")
    if asked is not None and asked > min(limits):
        raise ConfigError(
            f"max_model_len={asked} is over the model's max_position_embeddings={own} ({path}); set at most {own}."
        )
    return min(limits)


def eos_token_ids(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[int, ...]:
    """From the generation config, else the model's config, else the tokenizer; several are possible."""
    for holder in (generation, config.get_text_config(), tokenizer):
        eos: int | list[int] | None = getattr(holder, "eos_token_id", None)
        if isinstance(eos, int):
            return (eos,)
        if eos is not None:
            return tuple(eos)
    return ()


def sampled_ids(vocab_size: int, eos: tuple[int, ...], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Ids below this may be sampled: those the tokenizer knows (C18), and EOS."""
    if tokenizer is None:
        return vocab_size
    return min(vocab_size, max(*tokenizer.get_vocab().values(), *eos, 0) + 1)
