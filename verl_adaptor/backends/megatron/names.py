"""Hugging Face tensors <-> Megatron parameters, both ways, for one layer stack that several families share.

A Megatron parameter is one or more Hugging Face tensors, cut for tensor parallelism and packed. For two query groups
with two query heads each and two tensor-parallel ranks::

    Hugging Face   q_proj: q0 q1 q2 q3      k_proj: k0 k1      v_proj: v0 v1
    linear_qkv     rank 0: q0 q1 k0 v0      rank 1: q2 q3 k1 v1

so that laying q, k and v end to end would be wrong as soon as there are two groups on a rank. gate and up are cut first
and laid end to end then. Parameters are named as in Megatron's local spec, with the numbers of the whole model:
``decoder.layers.5.mlp.linear_fc2.weight`` is one parameter, whichever pipeline stage holds it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Packing = Literal["plain", "end to end", "qkv"]


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter and the Hugging Face tensors in it."""

    names: tuple[str, ...]
    """Hugging Face names, in the order in which they are packed."""
    axis: Literal[0, 1] | None = None
    """The dimension that tensor parallelism cuts; None: every rank has all of it."""
    packing: Packing = "plain"
    expert: int | None = None
    """Which expert of its layer it belongs to."""
    tied: bool = False
    """It is another parameter's copy on the last pipeline stage: loaded, never exported."""


@dataclass(frozen=True)
class Family:
    """What one architecture has beyond the common layers."""

    bias: bool = False
    """q, k and v have biases."""
    qk_norm: bool = False
    """q and k are normalised, head by head."""
    router: str = ""
    """Name of the router within a layer; empty: no mixture of experts."""
    expert: str = ""
    """Name of one expert within a layer, with ``{}`` for its number."""
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(bias=True),
    "qwen3": Family(qk_norm=True),
    "mixtral": Family(
        router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}", gate_up_down=("w1", "w3", "w2")
    ),
    "qwen3_moe": Family(qk_norm=True, router="mlp.gate", expert="mlp.experts.{}"),
}
"""transformers' model_type -> its tensors."""


def parameters(
    family: Family, *, layers: int, experts: int, head: Literal["policy", "value"], tied: bool
) -> dict[str, Parameter]:
    """Every parameter of the whole model, by its Megatron name.

    Args:
        family: the architecture.
        layers, experts: how many the model has.
        head: what stands on the last layer. A backbone under a value head has names without ``model.``.
        tied: the output matrix is the embedding.
    """
    model = "model." if head == "policy" else ""
    embedding = f"{model}embed_tokens.weight"
    found = {"embedding.word_embeddings.weight": Parameter((embedding,), axis=0)}
    for layer in range(layers):
        found |= _layer(family, experts, f"decoder.layers.{layer}.", f"{model}layers.{layer}.")
    found["decoder.final_layernorm.weight"] = Parameter((f"{model}norm.weight",))
    if head == "value":
        return found | {f"value_head.{name}": Parameter((f"value_head.{name}",)) for name in ("weight", "bias")}
    return found | {"output_layer.weight": Parameter((embedding if tied else "lm_head.weight",), axis=0, tied=tied)}


def _layer(family: Family, experts: int, ours: str, theirs: str) -> dict[str, Parameter]:
    attention = f"{ours}self_attention."
    found = {
        f"{ours}input_layernorm.weight": Parameter((f"{theirs}input_layernorm.weight",)),
        f"{attention}linear_proj.weight": Parameter((f"{theirs}self_attn.o_proj.weight",), axis=1),
        f"{ours}pre_mlp_layernorm.weight": Parameter((f"{theirs}post_attention_layernorm.weight",)),
    }
    for kind in ("weight", "bias") if family.bias else ("weight",):
        names = tuple(f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv")
        found[f"{attention}linear_qkv.{kind}"] = Parameter(names, axis=0, packing="qkv")
    if family.qk_norm:
        for x in "qk":
            found[f"{attention}{x}_layernorm.weight"] = Parameter((f"{theirs}self_attn.{x}_norm.weight",))
    if not family.router:
        return found | _mlp(family, f"{ours}mlp.", f"{theirs}mlp.", None)
    found[f"{ours}mlp.router.weight"] = Parameter((f"{theirs}{family.router}.weight",))
    for number in range(experts):
        where = f"{ours}mlp.experts.local_experts.{number}."
        found |= _mlp(family, where, f"{theirs}{family.expert.format(number)}.", number)
    return found


def _mlp(family: Family, ours: str, theirs: str, expert: int | None) -> dict[str, Parameter]:
    gate, up, down = (f"{theirs}{name}.weight" for name in family.gate_up_down)
    return {
        f"{ours}linear_fc1.weight": Parameter((gate, up), axis=0, packing="end to end", expert=expert),
        f"{ours}linear_fc2.weight": Parameter((down,), axis=1, expert=expert),
    }


_TRANSFORMER_ENGINE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Its layers hold the norm that comes before them."""


def whole_model_name(name: str, layer_numbers: Sequence[int], first_expert: int) -> str:
    """The name in `parameters` of a parameter that a pipeline stage calls `name`.

    Args:
        name: as in the ``named_parameters()`` of one stage, of the local or the Transformer Engine spec.
        layer_numbers: of each of its layers in the whole model, from 0.
        first_expert: number of the first expert on this rank.

    >>> whole_model_name("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", [2, 3], 0)
    'decoder.layers.3.pre_mlp_layernorm.weight'
    """
    for theirs, ours in _TRANSFORMER_ENGINE.items():
        name = name.replace(theirs, ours)
    name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{layer_numbers[int(m[2])]}", name)
    return re.sub(r"(\.local_experts\.)(\d+)", lambda m: f"{m[1]}{first_expert + int(m[2])}", name)


# -- packing -----------------------------------------------------------------------------------------------------


def pack(parts: Sequence[Tensor], packing: Packing, head_dim: int) -> Tensor:
    """Hugging Face tensors, or one rank's cuts of them, -> the Megatron parameter. Biases have one dimension less."""
    if packing == "plain":
        return parts[0]
    if packing == "end to end":
        return torch.cat(tuple(parts))
    groups = len(parts[1]) // head_dim
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def unpack(packed: Tensor, packing: Packing, rows: Sequence[int], head_dim: int) -> list[Tensor]:
    """Undo `pack`; `rows` are those of each part."""
    if packing == "plain":
        return [packed]
    if packing == "end to end":
        return list(packed.split(list(rows)))
    groups = rows[1] // head_dim
    by_group = packed.reshape(groups, -1, *packed.shape[1:]).split([n // groups for n in rows], dim=1)
    return [part.flatten(0, 1) for part in by_group]
