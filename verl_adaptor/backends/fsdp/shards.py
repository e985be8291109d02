"""Tensors of which this rank holds a shard: their local part, their norm over all ranks, and the whole of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from verl_adaptor.backends.world import World


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a tensor that is not sharded is its own."""
    part: Tensor = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def copies(tensor: Tensor, world: World) -> int:
    """How many ranks hold the same part."""
    if not isinstance(tensor, DTensor):
        return world.size
    shards = 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            shards *= tensor.device_mesh.size(dimension)
    return world.size // shards


def global_norm(parts: list[Tensor], counts: list[int], device: torch.device, world: World) -> Tensor:
    """The 2-norm over all ranks, a float32 scalar, the same on each of them: one NaN anywhere is a NaN everywhere.

    Args:
        parts: this rank's parts of the gradients.
        counts: of each, how many ranks hold the same part.
        device: where collectives run.
        world: all ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(parts)])
        total += (norms.square() / torch.tensor(counts, device=norms.device)).sum().to(device)
    if world.size > 1:
        dist.all_reduce(total)
    return total.sqrt().float().to(parts[0].device if parts else device)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole of each tensor, contiguous; a collective on all ranks."""
    return {name: _whole(tensor.detach()).contiguous() for name, tensor in tensors.items()}


def _whole(tensor: Tensor) -> Tensor:
    """Over the ranks that share a copy first, then over those that share a matrix: the order in which it was cut, undone."""
    if not isinstance(tensor, DTensor):
        return tensor
    *outer, inner = tensor.placements
    if len(outer) > 0 and not inner.is_replicate():
        tensor = tensor.redistribute(placements=(*(Replicate() for _ in outer), inner))
    return tensor.full_tensor()


def drop_unreduced(modules: Iterable[FSDPModule]) -> None:
    """Forget gradients that wait, whole, for the last micro-batch, which will not come.

    FSDP keeps them where no public method reaches.
    """
    for module in modules:
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
