"""Tiered offload: a trainer's tensors give their memory back for a while, and return bit for bit (law T6).

What moves is the storage beneath the tensors, each once: its bytes are copied away and it is resized to nothing. No
tensor object changes, so that views, ties, optimizer state and the shards of any framework stay what they are to
everyone who holds them. Until they are back, reading such a tensor reads memory that is gone: `TrainerBackend` refuses
every call meanwhile.

A storage whose memory is not torch's own (mapped from a file, as weights that were just loaded; once shown to NumPy)
cannot be resized: all tensors of the process that lie in it are moved over to one that can.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor

from verl_adaptor.errors import TrainerError

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX, _MAPPINGS = -4, 65536
"""How many allocations may be mappings of their own, and glibc's own number."""
_FREED = 96 << 10
"""Bytes: enough that glibc looks at the heap's end when they are freed, and few enough that they are on the heap."""
_GROWN = {_M_TRIM_THRESHOLD: 64 << 20, -3: 32 << 20}
"""Where glibc's own adjustment of M_TRIM_THRESHOLD and of M_MMAP_THRESHOLD ends."""
_CHUNK = 64 << 20
"""Bytes of a device's memory that pass through the host at a time."""
Place = tuple[torch.device, int]
"""Where a storage begins."""


class Offloaded:
    """The storages of some tensors, moved to ``host`` or ``disk``.

    ``host`` is this machine's memory: a storage that lies there already stays where it is. ``disk`` is one unnamed file
    in the folder for temporary files, which the system deletes with the last handle to it, even after a crash.

    Raises:
        TrainerError: the disk is full; nothing was moved.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor], tier: str) -> None:
        on_disk = tier == "disk"
        sources = [s for s in _storages(tensors) if on_disk or s.device.type != "cpu"]
        self._sizes = [storage.nbytes() for storage in sources]
        _synchronize(sources)
        self._file = _written(sources) if on_disk else None
        self._copies = [] if on_disk else [_bytes(storage).cpu() for storage in sources]
        self._storages = _resizable(sources)
        del sources
        for storage in self._storages:  # only now: until here a failure has cost nothing
            storage.resize_(0)
        trim()

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


def trim() -> None:
    """Hand freed memory on to other processes: neither torch's CUDA allocator nor glibc's does so by itself."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
        _trim_top(libc)


def _trim_top(libc: Any) -> None:
    """The free end of this thread's heap too, which `malloc_trim` leaves alone in every thread but the first.

    glibc cuts it when something is freed while it is longer than a threshold, which has grown to twice the largest tensor.
    """
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallopt(_M_TRIM_THRESHOLD, 0)
    libc.free(libc.malloc(_FREED))
    for parameter, grown in _GROWN.items():  # having been told one of them, glibc adjusts neither any more
        libc.mallopt(parameter, grown)


@contextmanager
def reusing() -> Iterator[None]:
    """What is freed meanwhile is kept, for the allocations that follow.

    glibc gives each large allocation fresh pages and its pages back when it is freed; fetching and zeroing them takes longer
    than packing a matrix does.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_MAX, _MAPPINGS)
        for parameter, grown in _GROWN.items():
            libc.mallopt(parameter, grown)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The distinct storages that hold anything."""
    found: dict[Place, UntypedStorage] = {}
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            found.setdefault(_place(storage), storage)
    return list(found.values())


def _place(storage: UntypedStorage) -> Place:
    return storage.device, storage.data_ptr()


def _resizable(storages: list[UntypedStorage]) -> list[UntypedStorage]:
    """The same; or, where torch does not own the memory, a new one beneath the same tensors, not filled yet."""
    fixed = {_place(s): UntypedStorage(s.nbytes(), device=s.device) for s in storages if not s.resizable()}
    for tensor in _living_tensors() if fixed else ():
        own = fixed.get(_place(tensor.untyped_storage()))
        if own is not None:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(own, *place)
    return [fixed.get(_place(storage), storage) for storage in storages]


def _living_tensors() -> Iterator[Tensor]:
    """All tensors that Python knows of; a DTensor's part is one of its own."""
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter, nn.Buffer) and found.layout == torch.strided:
            yield found


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
