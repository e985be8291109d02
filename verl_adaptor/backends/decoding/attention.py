"""Attention of one new token a row under grouped-query attention, without copying the cache.

transformers repeats keys and values for every query head of a group (`repeat_kv`) whenever there is a padding mask: a
copy of the whole cache, several times its size, in every layer of every step. The query heads of one group are instead
taken as if they were query positions, which attend to the same keys under the same mask: the same sums, no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "sdpa_grouped_decode"


def use_grouped_decode(model: PreTrainedModel) -> None:
    """Switch a model that runs on PyTorch's scaled-dot-product attention to this variant; leave any other alone."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, grouped_decode_attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def grouped_decode_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As `sdpa_attention_forward`: query [B, H, T, D], keys and values [B, H / groups, columns, D] -> [B, T, H, D]."""
    rows, heads, length, _ = query.shape
    per_head_mask = attention_mask is not None and attention_mask.shape[1] != 1
    if length > 1 or heads == key.shape[1] or per_head_mask or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    folded = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return out.reshape(rows, 1, heads, value.shape[-1]), None
