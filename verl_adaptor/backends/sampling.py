"""Drawing tokens: the same in every engine that samples with torch, so that a seed gives the same tokens in each.

A token is the inverse of the cumulative distribution at a number that depends on its request's seed and its place in the
response alone. So neither its neighbours in the batch nor a preemption matter (law I4), and there is no state to keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_adaptor.protocols.requests import mix_seed

_HEAD = 1024
"""Likeliest tokens looked at first by top-k and top-p: sorting a whole vocabulary costs more than the forward."""


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for the token at this place of a response, 53 bits of it."""
    return (mix_seed(seed, place) >> 10) * 2.0**-53


def inverse_cdf(probs: Tensor, numbers: Tensor) -> Tensor:
    """[B] the first token whose cumulated probability exceeds `numbers` [B] of the row's sum; never one of probability 0.

    `probs` [B, V] need not sum to 1. Sums are float64: in float32 a large vocabulary's tail would be lost.
    """
    cdf = probs.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    below = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, below[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def cut(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[b, V] probabilities with 0 outside the k likeliest and outside their nucleus (arXiv 1904.09751).

    Args:
        probs: [b, V].
        top_k: [b, 1]; V keeps all.
        top_p: [b, 1]; a fraction of the mass that top-k has left.
    """
    vocabulary = probs.shape[-1]
    for width in (min(_HEAD, vocabulary), vocabulary):
        ordered, order = probs.topk(width)
        ordered = ordered.masked_fill(torch.arange(width, device=probs.device) >= top_k, 0.0)
        mass = ordered.cumsum(-1, dtype=torch.float64)
        total = torch.where(top_k <= width, mass[:, -1:], probs.sum(-1, keepdim=True, dtype=torch.float64))
        enough = torch.where(top_p < 1, top_p * total, torch.inf)
        if width == vocabulary or bool(((top_k <= width) | (mass[:, -1:] >= enough)).all()):
            break
    kept = ordered.masked_fill(mass - ordered >= enough, 0.0)
    kept[:, 0] = ordered[:, 0]  # whatever the rounding, the likeliest stays
    return torch.zeros_like(probs).scatter(-1, order, kept)
