"""Tiered offload: a trainer's tensors give their memory back for a while, and return bit for bit (law T6).

What moves is the storage beneath the tensors, each once: its bytes are copied away and it is resized to nothing. No
tensor object changes, so that views, ties, optimizer state and the shards of any framework stay what they are to
everyone who holds them. Until they are back, reading such a tensor reads memory that is gone: `TrainerBackend` refuses
every call meanwhile.

A storage whose memory is not torch's own (mapped from a file, as weights that were just loaded; shown to NumPy) cannot
be resized: there the tensors given, and no other view of theirs, are moved over to one that can.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterable
from typing import IO, Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from verl_adaptor.errors import TrainerError

_CHUNK = 64 << 20
"""Bytes of a device's memory that pass through the host at a time."""


class Offloaded:
    """The storages of some tensors, moved to ``host`` or ``disk``.

    ``host`` is this machine's memory: a storage that lies there already stays where it is. ``disk`` is one unnamed file
    in the folder for temporary files, which the system deletes with the last handle to it, even after a crash.

    Raises:
        TrainerError: the disk is full; nothing was moved.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], tier: str) -> None:
        found = _by_storage(tensors)
        on_disk = tier == "disk"
        moving = [group for group in found if on_disk or group[0].device.type != "cpu"]
        sources = [_local(group[0]).untyped_storage() for group in moving]
        self._sizes = [storage.nbytes() for storage in sources]
        _synchronize(sources)
        self._file = _written(sources) if on_disk else None
        self._copies = [] if on_disk else [_bytes(storage).cpu() for storage in sources]
        self._storages = [_resizable(s, group) for s, group in zip(sources, moving, strict=True)]
        del sources
        for storage in self._storages:  # only now: until here a failure has cost nothing
            storage.resize_(0)
        _trim(self._storages)

    @property
    def nbytes(self) -> int:
        """Bytes given back."""
        return sum(self._sizes)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back. To be called once.

        Raises:
            TrainerError: the file can no longer be read; the tensors are lost.
        """
        for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._file is None:
                _bytes(storage).copy_(self._copies[number])
            else:
                _read(self._file, _bytes(storage))
        self.close()

    def close(self) -> None:
        """Drop the copies; what they are copies of is lost unless it was restored."""
        self._copies = []
        if self._file is not None:
            self._file.close()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors that hold anything, those over one storage together."""
    groups: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            groups.setdefault((storage.device, storage.data_ptr()), []).append(tensor)
    return list(groups.values())


def _resizable(storage: UntypedStorage, tensors: list[Tensor]) -> UntypedStorage:
    """`storage`; or, where torch does not own its memory, a new one beneath `tensors`, not filled yet."""
    if storage.resizable():
        return storage
    own = UntypedStorage(storage.nbytes(), device=storage.device)
    for tensor in map(_local, tensors):
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(own, *place)
    return own


def _bytes(storage: UntypedStorage) -> Tensor:
    """[nbytes] uint8 view of a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _buffer(tensor: Tensor) -> memoryview:
    """The memory of a uint8 tensor on the CPU. Not by way of NumPy, after which torch would refuse to resize it."""
    return memoryview((ctypes.c_ubyte * len(tensor)).from_address(tensor.data_ptr())).cast("B")


def _written(storages: list[UntypedStorage]) -> IO[bytes]:
    """All storages, one after the other, in an unnamed file that stands at its start."""
    file = tempfile.TemporaryFile(prefix="verl-adaptor-offload-")  # noqa: SIM115 - it outlives this function
    try:
        for storage in storages:
            for piece in _bytes(storage).split(_CHUNK):
                file.write(_buffer(piece.cpu()))
        file.seek(0)
    except OSError as error:
        file.close()
        raise TrainerError(
            f"{sum(storage.nbytes() for storage in storages)} bytes could not be written to {tempfile.gettempdir()} "
            f"({error}); nothing was offloaded. Make room there, or set TMPDIR to a folder that has it."
        ) from error
    return file


def _read(file: Any, into: Tensor) -> None:
    for piece in into.split(_CHUNK):
        host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
        count = file.readinto(_buffer(host))
        if count != len(host):
            raise TrainerError(
                f"the offload file ended after {count} of {len(host)} bytes: the trainer's state is lost; make a new trainer "
                "and load its last checkpoint."
            )
        if host is not piece:
            piece.copy_(host)


def _synchronize(storages: list[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _trim(storages: list[UntypedStorage]) -> None:
    """Hand freed memory on to other processes: neither torch's CUDA allocator nor glibc's does so by itself."""
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
