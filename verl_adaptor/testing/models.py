"""Tiny random models that are like real ones where it matters: what tests, examples and benchmarks train and serve.

Two layers, grouped-query attention, norms and biases that are neither one nor zero, a vocabulary padded beyond the
tokenizer: a wrong mapping of any tensor shows in the logits.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from verl_adaptor.errors import ConfigError, nearest

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Ids 0, 1 and 2: pad and EOS differ, as they should."""
PAD = SPECIAL_TOKENS.index("<pad>")
VOCAB_SIZE = 264
"""256 bytes, three special tokens, and five ids that no tokenizer entry has (C18)."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # family: (transformers' model_type, settings beyond the common ones)
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 8}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWED}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True, "head_dim": 8, "query_pre_attn_scalar": 8, **_WINDOWED}),
    "phi": ("phi", {}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "head_dim": 16, "moe_intermediate_size": 24, **_EXPERTS}),
}
FAMILIES = tuple(_FAMILIES)
"""What `make_tiny_model` can make."""


def make_tiny_model(
    family: str, folder: Path | str, *, seed: int = 0, vocab_size: int = VOCAB_SIZE, **overrides: Any
) -> Path:
    """A tiny model with a tokenizer, as a Hugging Face folder; returns the folder.

    Args:
        family: one of `FAMILIES`.
        folder: made if missing.
        seed: of the weights; the process's generator is not touched.
        vocab_size: rows of the embedding; below 259 the tokenizer knows only the first characters of ASCII.
        overrides: config keys of the family, e.g. ``num_hidden_layers=4``.
    """
    if family not in _FAMILIES:
        raise ConfigError(f"family={family!r} is unknown; {nearest(family, _FAMILIES)}.")
    model_type, settings = _FAMILIES[family]
    ids = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
    known = AutoConfig.for_model(model_type)  # GPT-2 groups no queries: a stray key would tell readers otherwise
    size = {key: value for key, value in _SIZE.items() if hasattr(known, key)}
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **{**size, **ids, **settings, **overrides})
    return save_random_model(config, Path(folder), seed=seed)


def save_random_model(
    config: PreTrainedConfig, folder: Path, *, seed: int, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """A causal LM of this config with random weights, norms and biases, and a tokenizer (`tiny_tokenizer` by default)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms stay near what makes them neutral
                    parameter += 0.1 * torch.randn_like(parameter)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer(config.vocab_size)).save_pretrained(folder)
    return folder


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """One token a byte, printable ASCII first, after the special tokens; what does not fit is left out."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    space, newline = "Ġ", "Ċ"  # how a byte-level vocabulary writes them
    printable = [*string.digits, space, newline, *string.ascii_letters, *string.punctuation]
    tokens = [*SPECIAL_TOKENS, *printable, *sorted(set(alphabet) - set(printable))][:vocab_size]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
