"""Numbers over the tokens that count, and reading a batch's columns.

A position counts where ``mask > 0``. The others may hold anything, even NaN: they are replaced, never multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.errors import BatchError


def take(batch: TensorDict, key: str, shape: Sequence[int] | None = None) -> Tensor:
    """This column of the batch. `BatchError` if it is missing, or of another shape: it might broadcast unnoticed."""
    value = batch.get(key, None)
    if value is None:
        raise BatchError(f"the batch lacks {key}; it has {', '.join(sorted(map(str, batch.keys())))}.")
    if shape is not None and value.shape != torch.Size(shape):
        raise BatchError(f"{key} has shape {tuple(value.shape)}; expected {tuple(shape)}.")
    return value


def zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """The values [B, R] with 0 where they do not count: neither a value nor a gradient comes from there."""
    return torch.where(mask > 0, values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of what counts, over everything or along `dim`."""
    return zero_outside(mask, values).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of what counts, over everything or along `dim`; 0 where nothing does."""
    return masked_sum(values, mask, dim) / (mask > 0).sum(dim).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[B, R] with mean 0 and (unbiased) variance 1 over what counts, and 0 elsewhere (C35).

    With fewer than two tokens, or equal values everywhere, the result is 0: there is nothing to tell apart.
    """
    centred = zero_outside(mask, values - masked_mean(values, mask))
    variance = centred.square().sum() / ((mask > 0).sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
