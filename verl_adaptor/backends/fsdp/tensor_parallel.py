"""Tensor and sequence parallelism of transformers' Llama-like models, by torch's DTensor (arXiv 1909.08053, 2205.05198).

Each rank holds a slice of every matrix. With sequence parallelism the activations between the matrices are sliced too,
along the sequence, so norms and residuals cost 1 / ranks::

    embedding (vocabulary sliced) -> whole hidden states -> [slice of the sequence] -> layers -> [whole] -> output head
    a layer:  norm on the slice -> gather -> attention or MLP on a slice of heads or columns -> reduce-scatter

The slicing begins at the first layer and not at the embedding: so transformers derives masks and rotary positions from
the whole length, which it cannot do from a slice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from verl_adaptor.backends.fsdp.rules import tensor_parallel_problems
from verl_adaptor.backends.heads import Head, PolicyHead
from verl_adaptor.backends.vocab_parallel import embedded_without_padding_gradient, token_log_probs_and_entropy
from verl_adaptor.backends.world import Axis
from verl_adaptor.errors import ConfigError


def share_layers(head: Head, mesh: DeviceMesh, axis: Axis, *, sequence_parallel: bool) -> None:
    """Slice the layers of `head`, whole on every rank and everywhere the same, over the one-dimensional `mesh`.

    Afterwards parameters are DTensors where they are sliced; outputs are, on every rank, what they were.

    Args:
        axis: the same ranks as `mesh`.

    Raises:
        ConfigError: no plan for this architecture, or a dimension that the ranks do not divide.
    """
    problems = [f"{fact}; {cure}." for fact, cure in tensor_parallel_problems(head.model.config.to_dict(), axis.size)]
    if problems:
        raise ConfigError("\n".join(problems))
    backbone: Any = head.model.base_model
    trainable = {name: parameter.requires_grad for name, parameter in head.named_parameters()}
    between = Shard(1) if sequence_parallel else Replicate()
    for layer in backbone.layers:
        parallelize_module(layer, mesh, _layer_plan(layer, between, sequence_parallel))
        for name in _ROWS:
            matrix = layer.get_submodule(name)
            getattr(matrix, "base_layer", matrix).register_forward_hook(_wait)
    if sequence_parallel:
        head.multiple *= axis.size
        backbone.layers[0].register_forward_pre_hook(partial(_slice_sequence, mesh=mesh))
        parallelize_module(backbone.norm, mesh, SequenceParallel())
        backbone.norm.register_forward_hook(_whole_sequence)
    _share_vocabulary(head, mesh, axis)
    for name, parameter in head.named_parameters():  # SequenceParallel makes every norm trainable, frozen ones too
        parameter.requires_grad_(trainable[name])


_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""A decoder layer's matrices, by how they are sliced."""


def _layer_plan(layer: nn.Module, between: Replicate | Shard, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How the parts of one decoder layer are sliced. `between`: the layout of activations outside the matrices.

    Attention and MLP take a DTensor, so that the gradients of their two or three first matrices are added up before they
    are reduced, in one collective.
    """
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between},
            desired_input_kwarg_layouts={"hidden_states": whole},
            use_local_output=False,
        ),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(whole,), use_local_output=False),
    }
    for name in _ROWS:
        plan |= _by_rows(name, layer.get_submodule(name), between)
    for name in _COLUMNS:
        plan |= _by_columns(name, layer.get_submodule(name))
    for name in ("q_norm", "k_norm"):
        if hasattr(layer.self_attn, name):  # these see [b, s, heads of this rank, d]
            plan[f"self_attn.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if sequence_parallel:
        plan |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel(use_local_output=True))
    return plan


def _by_columns(name: str, matrix: nn.Module) -> dict[str, ParallelStyle]:
    """Outputs are sliced; of an adapter, B's are, and A is whole."""
    if isinstance(matrix, nn.Linear):
        return {name: ColwiseParallel()}
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.*": Whole(use_local_output=False),
        f"{name}.lora_B.*": ColwiseParallel(),
    }


def _by_rows(name: str, matrix: nn.Module, between: Replicate | Shard) -> dict[str, ParallelStyle]:
    """Inputs are sliced; of an adapter, A's are, and B is whole."""
    if isinstance(matrix, nn.Linear):
        return {name: RowwiseParallel(output_layouts=between)}
    return {
        f"{name}.base_layer": RowwiseParallel(output_layouts=between),
        f"{name}.lora_A.*": RowwiseParallel(output_layouts=between, use_local_output=False),
        f"{name}.lora_B.*": Whole(use_local_output=True),
    }


def _wait(matrix: nn.Module, args: Any, output: Tensor) -> None:
    """Wait for the sum over ranks, though nobody may read it: recomputation under activation checkpointing stops where the
    last activation is back, and a collective that is never waited for is never freed."""
    if isinstance(output, AsyncCollectiveTensor):
        output.trigger_wait()


class Whole(ParallelStyle):
    """A linear layer that every rank has whole, on the slice of the sequence, or on all of it, that it is handed."""

    def __init__(self, *, use_local_output: bool) -> None:
        super().__init__()
        self._local = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        local = _local_output if self._local else None
        return distribute_module(module, device_mesh, output_fn=local)


def _local_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
    return output.to_local()


# -- sequence ----------------------------------------------------------------------------------------------------


def _slice_sequence(layer: nn.Module, args: tuple[Any, ...], *, mesh: DeviceMesh) -> tuple[Any, ...]:
    """[b, s, h], the same on all ranks -> [b, s / ranks, h]."""
    hidden, *rest = args
    whole = DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)
    return (whole.redistribute(placements=(Shard(1),)).to_local(), *rest)


def _whole_sequence(norm: nn.Module, args: Any, hidden: DTensor) -> Tensor:
    """Undo `_slice_sequence`; the ranks go on with the same tensor, so each one's gradient is the whole one."""
    return hidden.redistribute(placements=(Replicate(),)).to_local()


# -- vocabulary --------------------------------------------------------------------------------------------------


def _share_vocabulary(head: Head, mesh: DeviceMesh, axis: Axis) -> None:
    """Slice embedding and output head; log-probs are read off the slices of the logits, which are never gathered."""
    model: Any = head.model
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings() if isinstance(head, PolicyHead) else None
    if output is not None and not isinstance(output, nn.Linear):
        raise ConfigError(
            "lora_target_modules names the output head, whose vocabulary tensor parallelism slices; leave it out."
        )
    tied = output is not None and output.weight is embedding.weight
    padding, embedding.padding_idx = embedding.padding_idx, None  # in a slice it would be another token's row
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    if padding is not None:
        embedding.register_forward_hook(partial(_pad_row_is_constant, padding=padding))
    if isinstance(head, PolicyHead) and output is not None:
        parallelize_module(output, mesh, ColwiseParallel())
        if tied:
            output.weight = embedding.weight
        head.read_logits = partial(token_log_probs_and_entropy, axis=axis, vocab_size=model.config.vocab_size)


def _pad_row_is_constant(embedding: nn.Module, args: tuple[DTensor], hidden: Tensor, *, padding: int) -> Tensor:
    return embedded_without_padding_gradient(hidden, args[0].to_local(), padding)
