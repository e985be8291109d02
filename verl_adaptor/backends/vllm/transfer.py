"""The way of a bucket to vLLM's workers in other processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl_adaptor.weights import SharedBucket, packed_size


class Sharing:
    """The workers read each bucket in shared memory, which grows with the largest one (C08).

    Args:
        call: a method of `WorkerExtension` by name, with its arguments, on all workers.
    """

    def __init__(self, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self._shared: SharedBucket | None = None

    def load(self, bucket: Mapping[str, Tensor], compare: Callable[[Mapping[str, int]], None] | None) -> None:
        """Have the workers load a bucket.

        Args:
            bucket: whole tensors by name.
            compare: is told the digests of what each worker has read; None: they are not taken.
        """
        size = packed_size(tensor.nbytes for tensor in bucket.values())
        if self._shared is None or self._shared.size < size:
            self._shared = SharedBucket(size)
            try:
                self._call("adaptor_attach", str(self._shared.path), self._shared.size)
            finally:
                self._shared.unlink()
        for found in self._call("adaptor_load_shared", self._shared.write(bucket), compare is not None):
            if compare is not None:
                compare(found)

    def end(self) -> None:
        """Let the memory go, on both sides."""
        if self._shared is not None:
            self._call("adaptor_detach")
            self._shared = None
