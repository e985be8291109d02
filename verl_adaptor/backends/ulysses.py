"""Context parallelism after DeepSpeed-Ulysses (arXiv 2309.14509): each rank holds a slice of every sequence.

Embeddings, norms, MLPs, the vocabulary matrix and log-probs work token by token, so they run on the slice. Attention
does not: around it the ranks exchange slices of the sequence for slices of the heads, and back::

    [b, s / ranks, heads, d]  -- all-to-all -->  [b, s, heads / ranks, d]  -- attention, all-to-all -->  [b, s / ranks, ..]

Everything is exact. The model sees the attention mask of the whole sequences and positions of its own slice; what it
returns for its own tokens is put together into [b, R] on every rank, so a loss sees whole rows and knows nothing of
this. Then each rank's backward pass gives its tokens' part of the gradients: their SUM over the ranks is the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from verl_adaptor.backends.sequences import Sequences
from verl_adaptor.backends.world import Axis
from verl_adaptor.errors import ConfigError, UnsupportedCapability

Attention = Callable[..., tuple[Tensor, Tensor | None]]
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers that look at other tokens through a mask and nothing else, as configs call them."""

# -- sequences ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlicedSequences(Sequences):
    """One rank's slice: `input_ids` and `position_ids` [rows, length / ranks], and the predictors that lie in it, with their
    targets and temperatures. `attention_mask`, `is_real` and `places` are those of the whole sequences."""

    columns: Tensor
    """[m] which of the M predictors are this rank's. Where there are none, one is asked all the same, and not heard."""
    axis: Axis
    """The ranks that share the sequences."""

    def restore(self, values: Tensor) -> Tensor:
        """[rows, m, at least 1] of this rank -> [b, R] of all ranks, on each of them; a collective.

        The gradient is exact where all ranks compute the same loss from the result.
        """
        whole = values.new_zeros(self.is_real.shape).index_copy(1, self.columns, values[:, : len(self.columns)])
        return super().restore(_Sum.apply(whole, self.axis))


def sliced(sequences: Sequences, axis: Axis) -> Sequences:
    """This rank's slice of `sequences`, which are the same on all ranks of `axis`, and as long as their number divides."""
    if axis.size == 1:
        return sequences
    width = sequences.input_ids.shape[1] // axis.size
    here = slice(axis.rank * width, (axis.rank + 1) * width)
    place = sequences.predictors - here.start
    columns = ((place >= 0) & (place < width)).nonzero()[:, 0]
    asked = columns if len(columns) else torch.arange(len(place), device=place.device)[:1]  # DTensors may not be empty
    return SlicedSequences(
        input_ids=sequences.input_ids[:, here],
        position_ids=sequences.position_ids[:, here],
        attention_mask=sequences.attention_mask,
        predictors=place[asked].clamp(0, width - 1),
        targets=sequences.targets[:, asked],
        temperature=sequences.temperature[:, asked],
        is_real=sequences.is_real,
        places=sequences.places,
        columns=columns,
        axis=axis,
    )


class _Sum(torch.autograd.Function):
    """The sum over an axis. All ranks go on with the same sum, so each one's gradient is already the whole one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return axis.sum(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# -- attention ---------------------------------------------------------------------------------------------------


def use_ulysses(model: PreTrainedModel, axis: Axis) -> None:
    """Make `model` attend across the slices of the sequence that the ranks of `axis` hold.

    From then on it takes its slice's `input_ids` and `position_ids`, and the whole `attention_mask` (`sliced` gives them);
    every forward pass is a collective.

    Raises:
        ConfigError: the ranks do not divide its heads (C29).
        UnsupportedCapability: its attention is not reached through transformers' attention interface, it has layers that
            carry state from token to token, or its rotary frequencies depend on the length of the sequence.
    """
    _check(model, axis)
    kind = model.config._attn_implementation
    attend: Attention = sdpa_attention_forward if kind == "sdpa" else _own_eager_attention
    name = f"{kind}_ulysses_{axis.group.group_name}"  # type: ignore[union-attr]
    AttentionInterface.register(name, partial(ulysses_attention, attend=attend, axis=axis))
    AttentionMaskInterface.register(name, partial(_whole_mask, make=sdpa_mask if kind == "sdpa" else eager_mask))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _unsupported(model, "it does not use transformers' attention interface")


def ulysses_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attention,
    axis: Axis,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `attend` computes on one rank, for this rank's tokens; the gradients likewise.

    Key-value heads that the ranks do not divide, as where there are fewer of them, are repeated until they do.

    Args:
        module: the attention layer.
        query: [b, heads, s / ranks, d], after the rotary embedding.
        key: [b, kv_heads, s / ranks, d].
        value: [b, kv_heads, s / ranks, d_v].
        attention_mask: [b or 1, 1, s, s], of the whole sequences; None: causal.
        attend: an attention function of transformers.
        axis: the ranks that share the sequences.
        kwargs: for `attend`.

    Returns:
        [b, s / ranks, heads, d_v], None.
    """
    if kwargs.get("position_bias") is not None or (attention_mask is not None and attention_mask.shape[1] != 1):
        raise _unsupported(module, "its attention has a bias for each head")
    repeats = axis.size // gcd(key.shape[1], axis.size)
    key, value = (tensor.repeat_interleave(repeats, dim=1) if repeats > 1 else tensor for tensor in (key, value))
    query, key, value = _heads_for_tokens((query, key, value), axis)
    if repeats > 1:
        module = _Regrouped(module, query.shape[1] // key.shape[1])  # type: ignore[assignment]
    output, _ = attend(module, query, key, value, attention_mask, **kwargs)
    return _tokens_for_heads(output, axis), None


def _heads_for_tokens(tensors: tuple[Tensor, ...], axis: Axis) -> list[Tensor]:
    """Each [b, heads, s / ranks, d] -> [b, heads / ranks, s, d], all in one exchange."""
    rows, _, width, _ = tensors[0].shape
    shares = [t.unflatten(1, (axis.size, -1)).permute(1, 0, 3, 2, 4) for t in tensors]
    # [ranks, b, s / ranks, heads / ranks * d of all tensors]
    parcels = torch.cat([share.flatten(3) for share in shares], dim=-1)
    whole = exchange(parcels, axis).transpose(0, 1).reshape(rows, axis.size * width, -1)
    parts = whole.split([share.shape[3] * share.shape[4] for share in shares], dim=-1)
    return [
        part.unflatten(-1, share.shape[3:]).transpose(1, 2).to(share.dtype)
        for part, share in zip(parts, shares, strict=True)
    ]


def _tokens_for_heads(output: Tensor, axis: Axis) -> Tensor:
    """[b, s, heads / ranks, d] -> [b, s / ranks, heads, d]."""
    parcels = output.unflatten(1, (axis.size, -1)).transpose(0, 1)
    return exchange(parcels, axis).permute(1, 2, 0, 3, 4).flatten(2, 3)


def exchange(parcels: Tensor, axis: Axis) -> Tensor:
    """All-to-all: [ranks, ...], the i-th for rank i -> [ranks, ...], the i-th from rank i. Differentiable."""
    received: Tensor = _Exchange.apply(parcels, axis)
    return received


class _Exchange(torch.autograd.Function):
    """All-to-all is its own transpose: the gradient of what rank i sent to rank j comes back from j to i."""

    @staticmethod
    def forward(ctx: Any, parcels: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(parcels, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.axis), None


def _all_to_all(parcels: Tensor, axis: Axis) -> Tensor:
    parcels = parcels.contiguous()
    received = torch.empty_like(parcels)
    dist.all_to_all_single(received, parcels, group=axis.group)
    return received


class _Regrouped:
    """An attention layer whose key-value heads serve another number of query heads each."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _own_eager_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The plain attention that stands beside the layer's class; it knows the model's soft cap."""
    layer = getattr(module, "_module", module)
    attend = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)
    if attend is None:
        raise _unsupported(layer, "it does not use transformers' attention interface")
    result: tuple[Tensor, Tensor | None] = attend(module, *args, **kwargs)
    return result


def _whole_mask(*, q_length: int, kv_length: int, make: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    """The mask of the whole sequences, as long as the 2-D mask says; transformers counts the queries of the slice."""
    return make(q_length=kv_length, kv_length=kv_length, **kwargs)


# -- what cannot be sliced ---------------------------------------------------------------------------------------


def _check(model: PreTrainedModel, axis: Axis) -> None:
    config = model.config.get_text_config()
    if config.num_attention_heads % axis.size:
        raise ConfigError(
            f"context_parallel_size={axis.size} does not divide num_attention_heads={config.num_attention_heads} of the "
            "model, and each rank attends with its share of them; use a size that does."
        )
    kind = model.config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise _unsupported(model, f"its attention is {kind!r}, and only 'sdpa' and 'eager' can be shared")
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or not kinds <= _ATTENTION_LAYERS:
        raise _unsupported(model, "some of its layers carry state from token to token")
    lengthy = [name for name in _rope_types(config) if name == "longrope" or "dynamic" in name]
    if lengthy:
        raise _unsupported(model, f"its rotary frequencies ({lengthy[0]}) depend on the length of the whole sequence")


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The kinds of rotary embedding in a config: one, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    settings = [found, *found.values()]
    return [str(part["rope_type"]) for part in settings if isinstance(part, dict) and part.get("rope_type")]


def _unsupported(module: nn.Module, why: str) -> UnsupportedCapability:
    return UnsupportedCapability(
        f"context_parallel_size: {type(module).__name__} cannot share its sequences among ranks: {why}; set it to 1."
    )
