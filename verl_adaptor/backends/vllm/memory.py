"""How much memory the key-value cache gets."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedConfig

from verl_adaptor.backends.causal_lm import resolve_dtype
from verl_adaptor.backends.vllm.options import VLLMOptions
from verl_adaptor.config import EngineConfig

_BLOCK = 128
"""Tokens of a cache block on a CPU."""
_SHARE = 16
"""Without a wish, at most this part of the machine's memory."""


def kv_cache_bytes(
    options: VLLMOptions, config: EngineConfig, model: PreTrainedConfig, longest: int, device: torch.device
) -> int | None:
    """Bytes for the cache; None leaves it to vLLM, which on a GPU takes what gpu_memory_utilization allows."""
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * 2**30)
    if device.type != "cpu":
        return None
    text = model.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * resolve_dtype(config.dtype).itemsize
    sequence = -(-longest // _BLOCK) * _BLOCK * token
    return max(2 * sequence, min(config.max_batch_size * sequence, _machine() // _SHARE))


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
