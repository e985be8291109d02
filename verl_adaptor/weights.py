"""How a bucket of weights gets from one process of this machine to others.

It is written into shared memory, its layout is told, and the others read it there: one copy, and nothing is pickled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.errors import WeightUpdateError

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN = 64
"""Bytes on whose multiples tensors begin."""
_FOLDER = Path("/dev/shm")

Layout = list[tuple[str, str, list[int], int]]
"""Name, dtype, shape, and offset in bytes of each tensor of a bucket. Built-ins only: it crosses environments."""


class SharedBucket:
    """Shared memory for one bucket at a time. The writer makes it; readers `attach` by its path.

    Its file is removed as soon as all readers have it open (`unlink`), so that nothing is left behind whatever way the
    processes end.
    """

    def __init__(self, size: int) -> None:
        """Room for `size` bytes. Raises `WeightUpdateError` where shared memory has none."""
        self.size = max(size, 1)
        handle, name = tempfile.mkstemp(prefix="verl-adaptor-", dir=_FOLDER if _FOLDER.is_dir() else None)
        self.path = Path(name)
        try:
            os.posix_fallocate(handle, 0, self.size)  # asked for now: a page that is not there later is SIGBUS (C24)
        except OSError as error:
            self.unlink()
            raise WeightUpdateError(
                f"no shared memory for a bucket of {self.size / 2**20:.0f} MiB in {self.path.parent} ({error.strerror}); make "
                "it larger (docker run --shm-size, or mount -o remount,size=... /dev/shm)."
            ) from error
        finally:
            os.close(handle)
        self.memory = attach(str(self.path), self.size)

    def write(self, bucket: Mapping[str, Tensor], first: int = 0) -> Layout:
        """Copy a bucket in, from byte `first` on, and say where its tensors are."""
        return write(self.memory, bucket, first)

    def unlink(self) -> None:
        """Remove the name; the memory lives until the last process that has it open lets go."""
        self.path.unlink(missing_ok=True)


def attach(path: str, size: int) -> Tensor:
    """The [size] bytes of another process's `SharedBucket`."""
    import torch

    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def write(memory: Tensor, bucket: Mapping[str, Tensor], first: int = 0) -> Layout:
    """Copy a bucket into [size] bytes of shared memory, from byte `first` on, and say where its tensors are."""
    layout: Layout = []
    for name, tensor, start in _places(bucket, first):
        view = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
    return layout


def read(memory: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a bucket, in place: valid until the next one is written."""
    import torch

    tensors = {}
    for name, dtype_name, shape, start in layout:
        dtype: Any = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        tensors[name] = memory[start : start + count * dtype.itemsize].view(dtype).view(shape)
    return tensors


def packed_size(sizes: Iterable[int]) -> int:
    """Bytes that tensors of these sizes take in shared memory."""
    return sum(-(-size // _ALIGN) * _ALIGN for size in sizes)


def _places(bucket: Mapping[str, Tensor], start: int) -> list[tuple[str, Tensor, int]]:
    places = []
    for name, tensor in bucket.items():
        places.append((name, tensor, start))
        start += packed_size([tensor.nbytes])
    return places


def digests(bucket: Mapping[str, Tensor]) -> dict[str, int]:
    """xxHash (XXH3, 64 bits) of each tensor's bytes: what was sent is what arrived."""
    import torch
    import xxhash

    return {
        name: xxhash.xxh3_64_intdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in bucket.items()
    }
