"""Log-probs and entropy where each rank holds a slice of the vocabulary: the logits are never gathered.

Two small collectives carry one and three numbers a token (after Megatron-LM, arXiv 1909.08053), whatever the
vocabulary's size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_adaptor.backends import causal_lm
from verl_adaptor.backends.causal_lm import logit_gradient, pieces
from verl_adaptor.backends.world import Axis


def token_log_probs_and_entropy(
    logits: Tensor,
    ids: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    axis: Axis,
    vocab_size: int,
    first_id: int | None = None,
) -> tuple[Tensor, Tensor]:
    """What `causal_lm.token_log_probs_and_entropy` returns for the whole logits; the same on all ranks of `axis`.

    The gradient with respect to `logits` is exact if every rank of the axis passes the same gradients back, as it does
    where all compute one and the same loss. The logits are left as they are.

    Args:
        logits: [..., V of this rank] of any float type: contiguous slices of the vocabulary, in the order of ranks.
        ids: [...] int64, of the whole vocabulary, the same on all ranks.
        temperature: a number, or a tensor that broadcasts to [...].
        axis: the ranks that share the vocabulary.
        vocab_size: ids that are real; logits of ids from there on are padding, and have no probability.
        first_id: the id of this rank's first column; None: all slices are equally wide.
    """
    if axis.size == 1:
        return causal_lm.token_log_probs_and_entropy(logits[..., :vocab_size], ids, temperature)
    first = axis.rank * logits.shape[-1] if first_id is None else first_id
    width = min(max(vocab_size - first, 0), logits.shape[-1])
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(ids.shape)
    flat = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1) - first, scale.reshape(-1)
    log_probs, entropy = _SlicedTokenLogProbs.apply(*flat, width, axis)
    return log_probs.view(ids.shape), entropy.view(ids.shape)


def embedded_without_padding_gradient(embedded: Tensor, ids: Tensor, padding: int) -> Tensor:
    """[..., hidden] embeddings of `ids` [...]; what ``padding_idx`` means on a whole table: that row gets no gradient.

    It matters where a policy samples the padding token: its row is 0 in many models, where RMSNorm is at its steepest.
    """
    return torch.where((ids == padding)[..., None], embedded.detach(), embedded)


class _SlicedTokenLogProbs(torch.autograd.Function):
    """[N, W] logits -> [N] log-probs and entropies; the backward pass recomputes the softmax piece by piece.

    With z = logits / T, d = z - max z and S = sum exp d over all ranks: log p(i) = d(i) - log S and the entropy is
    log S - sum(exp(d) d) / S. Gradients as in `causal_lm._TokenLogProbs`; each rank needs its own columns only.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local_ids: Tensor, temperature: Tensor, width: int, axis: Axis
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.width = width
        peak = _peak(logits, temperature, width, axis)
        sums = torch.zeros(3, len(logits), device=logits.device)  # exp(d), exp(d) * d, and the token's own z
        for rows in pieces(logits) if width else ():
            z = logits[rows, :width].float() / temperature[rows, None]
            here, place = _here(local_ids[rows], width)
            sums[2, rows] = torch.where(here, z.gather(-1, place[:, None])[:, 0], 0.0)
            d = z.sub_(peak[rows, None])
            e = d.exp()
            sums[0, rows], sums[1, rows] = e.sum(-1), e.mul_(d.clamp_(min=-1e30)).sum(-1)  # 0 * -inf is NaN
        axis.sum(sums)
        log_sum = sums[0].log()
        normaliser, entropy = peak + log_sum, log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, local_ids, temperature, normaliser, entropy)
        return sums[2] - normaliser, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_log_probs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, local_ids, temperature, normaliser, entropy = ctx.saved_tensors
        width = ctx.width
        incoming = [None if g is None else g / temperature for g in (to_log_probs, to_entropy)]
        gradient = torch.zeros_like(logits) if width < logits.shape[-1] else torch.empty_like(logits)
        for rows in pieces(logits) if width else ():
            log_p = (logits[rows, :width].float() / temperature[rows, None]).sub_(normaliser[rows, None])
            d_z, at_id = logit_gradient(log_p, entropy[rows], *(None if g is None else g[rows] for g in incoming))
            here, place = _here(local_ids[rows], width)
            d_z.scatter_add_(-1, place[:, None], torch.where(here, at_id, 0.0)[:, None])
            gradient[rows, :width] = d_z
        return gradient, None, None, None, None


def _peak(logits: Tensor, temperature: Tensor, width: int, axis: Axis) -> Tensor:
    """[N] the largest z of each token over all ranks."""
    peak = torch.full((len(logits),), -torch.inf, device=logits.device)
    for rows in pieces(logits) if width else ():
        peak[rows] = logits[rows, :width].amax(-1).float() / temperature[rows]
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=axis.group)
    return peak


def _here(local_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Whether each id is one of this rank's `width` columns, and a column that exists in any case."""
    return (local_ids >= 0) & (local_ids < width), local_ids.clamp(0, width - 1)
