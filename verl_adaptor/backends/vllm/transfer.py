"""The way of a bucket to vLLM's workers in other processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from verl_adaptor.weights import SharedBucket, packed_size


def share(
    call: Callable[..., list[Any]],
    buckets: Iterable[Mapping[str, Tensor]],
    compare: Callable[[Mapping[str, int]], None] | None,
) -> None:
    """The workers read each bucket in shared memory, which grows with the largest one (C08).

    Args:
        call: a method of `WorkerExtension` by name, with its arguments, on all workers.
        buckets: whole tensors by name.
        compare: is told the digests of what each worker has read; None: they are not taken.
    """
    shared: SharedBucket | None = None
    for bucket in buckets:
        size = packed_size(tensor.nbytes for tensor in bucket.values())
        if shared is None or shared.size < size:
            shared = SharedBucket(size)
            try:
                call("adaptor_attach", str(shared.path), shared.size)
            finally:
                shared.unlink()
        for found in call("adaptor_load_shared", shared.write(bucket), compare is not None):
            if compare is not None:
                compare(found)
    call("adaptor_detach")
