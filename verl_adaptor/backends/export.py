"""From a model's tensors to a `WeightUpdate`: which travel together, and in which buckets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from verl_adaptor.samples import TensorMeta, WeightUpdate
from verl_adaptor.weights import packed_size

BUCKET_BYTES = 64 << 20
"""About what a bucket holds. A tensor or fused group larger than that is a bucket of its own (C08)."""

_FUSED = (
    # all experts of a layer; q, k, v; gate, up: what some engines keep in one matrix
    (re.compile(r"\.experts\.\d+\..*$"), ".experts"),
    (re.compile(r"\.[qkv]_proj\.(\w+)$"), r".qkv_proj.\1"),
    (re.compile(r"\.(?:gate|up)_proj\.(\w+)$"), r".gate_up_proj.\1"),
)


def fused_groups(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Names that some engines fuse, in groups of at least two.

    >>> fused_groups(["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight", "a.o_proj.weight"])
    (('a.q_proj.weight', 'a.k_proj.weight', 'a.v_proj.weight'),)
    """
    return tuple(tuple(unit) for unit in _units(names) if len(unit) > 1)


def bucketed(sizes: Mapping[str, int], bucket_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Names of each bucket, fused groups whole, in order.

    Args:
        sizes: name -> bytes.
        bucket_bytes: a bucket is closed before it would grow beyond this.
    """
    buckets: list[list[str]] = []
    filled = bucket_bytes
    for unit in _units(sizes):
        size = sum(sizes[name] for name in unit)
        if filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1] += unit
        filled += size
    return buckets


def weight_update(
    tensors: Mapping[str, Tensor],
    tied: Mapping[str, str],
    version: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    check: Callable[[], None] = lambda: None,
    gather: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
) -> WeightUpdate:
    """An update that hands out the model's own tensors, uncopied: each is valid until the next bucket is pulled.

    Args:
        tensors: Hugging Face name -> tensor, tied memory once; of a sharded model a shard, or a meta tensor, that tells the
            whole tensor's shape and type.
        tied: alias -> name.
        version: policy version.
        check: called before each bucket; raises if the tensors are no longer those of `version`.
        gather: makes the tensors of one bucket whole, by name; collective, so all ranks pull all buckets in step. What it
            returns lives until the next bucket: one bucket, or the largest fused group, is all that is ever whole.
    """
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    plan = bucketed(sizes, bucket_bytes)

    def buckets() -> Iterator[dict[str, Tensor]]:
        for names in plan:
            check()
            yield gather({name: tensors[name].detach() for name in names})

    return WeightUpdate(
        version=version,
        tensors=tuple(
            TensorMeta(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for name, t in tensors.items()
        ),
        buckets=buckets,
        tied=dict(tied),
        fused_groups=fused_groups(tensors),
        largest_bucket=max((packed_size(sizes[name] for name in names) for names in plan), default=0),
    )


def _units(names: Iterable[str]) -> list[list[str]]:
    """Fused groups and single names, in the order of their first member."""
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(_fused_name(name), []).append(name)
    return list(units.values())


def _fused_name(name: str) -> str:
    for pattern, fused in _FUSED:
        if pattern.search(name):
            return pattern.sub(fused, name)
    return name
