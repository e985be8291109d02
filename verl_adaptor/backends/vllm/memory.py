"""How much memory the key-value cache gets."""

from __future__ import annotations

import os
from typing import Any

from verl_adaptor.backends.vllm.options import VLLMOptions
from verl_adaptor.config import EngineConfig
from verl_adaptor.preflight.memory import FLOAT, HALF, ModelSize, dimensions

_BLOCK = 128
"""Tokens of a cache block on a CPU."""
_SHARE = 16
"""Without a wish, at most this part of the machine's memory."""


def kv_cache_bytes(
    options: VLLMOptions, config: EngineConfig, model: ModelSize, longest: int, device: str
) -> int | None:
    """Bytes for the cache; None leaves it to vLLM, which on a GPU takes what gpu_memory_utilization allows."""
    if options.kv_cache_gib is not None:
        return int(options.kv_cache_gib * 2**30)
    if device != "cpu":
        return None
    token = 2 * model.layers * model.key_value * (HALF if config.dtype == "bfloat16" else FLOAT)
    sequence = -(-longest // _BLOCK) * _BLOCK * token
    return max(2 * sequence, min(config.max_batch_size * sequence, _machine() // _SHARE))


def cache_bytes(facts: Any) -> int | None:
    """The same before anything loads. Each of the ranks that share a model takes as much."""
    options = facts.options if isinstance(facts.options, VLLMOptions) else VLLMOptions()
    model = facts.model or {}
    longest = facts.config.max_model_len or (model.get("text_config") or model).get("max_position_embeddings")
    if longest is None:
        return None
    device = "cpu" if facts.config.device in ("auto", "cpu") else facts.config.device
    return kv_cache_bytes(options, facts.config, dimensions(model), longest + 1, device)


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
