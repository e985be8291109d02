"""DeepSpeed's shards made whole, and whole tensors put back into them. Stages 0 to 2 keep weights whole: nothing moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from verl_adaptor.backends.export import bucketed


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, whole; a collective at stage 3. Their memory lives as long as they are held."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(tensors.values())):
        # on leaving, DeepSpeed points its parameters elsewhere; the memory stays with those who hold it
        return {name: tensor.data for name, tensor in tensors.items()}


def in_buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """All of them, whole, some at a time."""
    sizes = {name: meta.numel() * meta.element_size() for name, meta in shapes(tensors).items()}
    for names in bucketed(sizes):
        yield whole({name: tensors[name] for name in names})


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Meta tensors of what is whole or would be."""
    return {n: torch.empty(getattr(t, "ds_shape", t.shape), dtype=t.dtype, device="meta") for n, t in tensors.items()}


@torch.no_grad()
def overwrite(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Give tensors whole values, the same on all ranks; a collective at stage 3."""
    import deepspeed

    for name, tensor in tensors.items():
        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            tensor.copy_(values[name])
