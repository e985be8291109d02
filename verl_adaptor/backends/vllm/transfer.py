"""The way of a bucket to vLLM's workers: handed over in this process, through shared memory, as files, or vLLM's own."""

from __future__ import annotations

import abc
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from verl_adaptor.backends.export import bucketed
from verl_adaptor.errors import WeightUpdateError
from verl_adaptor.weights import SharedBucket, packed_size

logger = logging.getLogger(__name__)

Compare = Callable[[Mapping[str, int]], None]
"""Is told the digests of what a worker has read."""
Wish = Literal["auto", "shared_memory", "disk", "nccl", "ipc"]

_SMALLEST = 2 << 20
"""Bytes of room below which halves would only cost more calls."""


class Transport(abc.ABC):
    """One way, whole buckets at a time.

    Args:
        core: vLLM, whose `call` and `call_soon` run methods of `WorkerExtension` on all workers.
    """

    name: str
    why: str
    tells_digests = False
    """Whether the workers say what has arrived; else digests are compared before it is sent."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def prepare(self, room: int) -> None:  # noqa: B027
        """Be ready for buckets of this many bytes. Raises `WeightUpdateError` where that is impossible."""

    def begin(self) -> None:
        """New weights come."""
        self._core.call("adaptor_begin")

    @abc.abstractmethod
    def load(self, bucket: Mapping[str, Tensor], compare: Compare | None) -> None:
        """Have the workers load a bucket, whose tensors are no longer needed afterwards; `finish` waits for them.

        Args:
            bucket: whole tensors by name.
            compare: is told the digests of what each worker has read; None: they are not taken.
        """

    def finish(self) -> None:  # noqa: B027
        """Wait until all is loaded."""

    def complete(self) -> None:
        """All have come, and `finish` has waited for them."""
        self._core.call("adaptor_finish")

    def end(self) -> None:  # noqa: B027
        """Let everything go, whatever state the workers are in."""


class HandOver(Transport):
    """The tensors themselves."""

    name, why = "handed over as they are", "its worker is in this process"

    def load(self, bucket: Mapping[str, Tensor], compare: Compare | None) -> None:
        """Load them now."""
        self._core.call("adaptor_load", bucket)


class InPieces(Transport):
    """Buckets in pieces of at most half the room, fused groups whole: one is written while the workers load another.

    A fused group over half the room has all of it. So what travels never takes more than one bucket (C08).
    """

    tells_digests = True

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self._room = 0
        self._start = 0
        self._loading: deque[tuple[int, int, Callable[[], None]]] = deque()
        """First and last byte of the room, and what waits until the workers have loaded it; oldest first."""

    def prepare(self, room: int) -> None:
        """Make the room larger where need be."""
        room = max(room, _SMALLEST)
        if self._room < room:
            self.finish()
            self._room = 0
            self._make(room)
            self._room = room

    @abc.abstractmethod
    def _make(self, room: int) -> None: ...

    def load(self, bucket: Mapping[str, Tensor], compare: Compare | None) -> None:
        """Write its pieces, each as soon as its place is free."""
        sizes = {name: packed_size([tensor.nbytes]) for name, tensor in bucket.items()}
        half = self._room // 2 // 64 * 64
        for names in bucketed(sizes, half):
            size = sum(sizes[name] for name in names)
            self.prepare(size)
            start = half if size <= half and not self._start else 0
            while any(first < start + size and start < end for first, end, _ in self._loading):
                self._wait()
            call = self._write(start, {name: bucket[name] for name in names})
            answers = self._core.call_soon(*call, compare is not None)
            self._loading.append((start, start + size, partial(_told, answers, compare)))
            self._start = start

    @abc.abstractmethod
    def _write(self, start: int, piece: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Put a piece at a place of the room; the method of the workers that loads it, and its arguments."""

    def _wait(self) -> None:
        self._loading.popleft()[2]()

    def finish(self) -> None:
        """Wait for the pieces that the workers still load."""
        while self._loading:
            self._wait()

    def end(self) -> None:
        """Forget the room."""
        self._loading.clear()
        self._room = 0


class SharedMemory(InPieces):
    """Memory that the workers have open too. It is kept: fetching its pages takes longer than filling them."""

    name, why = "through shared memory", "its workers are other processes of this machine"

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self._shared: SharedBucket | None = None

    def _make(self, room: int) -> None:
        self._shared = None
        shared = SharedBucket(room)
        try:
            if not all(self._core.call("adaptor_sees", str(shared.path))):
                raise WeightUpdateError(
                    f"vLLM's workers do not see this machine's {shared.path.parent}; leave weight_transport at 'auto', or set "
                    "it to 'disk' with a weight_folder that they see."
                )
            self._core.call("adaptor_attach", str(shared.path), shared.size)
        finally:
            shared.unlink()
        self._shared = shared

    def _write(self, start: int, piece: Mapping[str, Tensor]) -> tuple[Any, ...]:
        assert self._shared is not None  # made by `prepare`
        return "adaptor_load_shared", self._shared.write(piece, start)

    def end(self) -> None:
        """The workers let go when they attach to another, or end."""
        super().end()
        self._shared = None


class Disk(InPieces):
    """Safetensors files, two at a time, in a folder that the workers see too."""

    name, why = "as safetensors files", "that was asked for"

    def __init__(self, core: Any, folder: str | None) -> None:
        super().__init__(core)
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _make(self, room: int) -> None:
        self.end()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="verl-adaptor-weights-", dir=self._parent)
        except OSError as error:
            raise WeightUpdateError(
                f"weight_folder={self._parent!r} cannot be written ({error.strerror}); name a folder that can."
            ) from error
        folder = Path(self._folder.name)
        free = shutil.disk_usage(folder).free
        if free < room:
            raise WeightUpdateError(
                f"{folder.parent} has room for {free / 2**20:.0f} MiB and a bucket takes {room / 2**20:.0f}; set weight_folder "
                "to a folder with more."
            )
        if not all(self._core.call("adaptor_sees", self._folder.name)):
            raise WeightUpdateError(
                f"vLLM's workers do not see {folder.parent}; set weight_folder to one on a file system that all machines share."
            )
        self._core.call("adaptor_clears", self._folder.name)

    def _write(self, start: int, piece: Mapping[str, Tensor]) -> tuple[Any, ...]:
        assert self._folder is not None  # made by `prepare`
        path = f"{self._folder.name}/{start}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in piece.items()}, path)
        return "adaptor_load_file", path

    def finish(self) -> None:
        """And remove the files."""
        super().finish()
        if self._folder is not None:
            for file in Path(self._folder.name).iterdir():
                file.unlink()

    def end(self) -> None:
        """Remove the folder."""
        super().end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Route:
    """The best transport that works, chosen anew for each update and told in the log when it changes.

    Args:
        core: vLLM.
        wish: the only one to use, or ``auto``.
        folder: for files; None: the one for temporary files.
        own: vLLM's own, where that is the wish.
    """

    def __init__(self, core: Any, wish: Wish, folder: str | None, own: Transport | None = None) -> None:
        self._ways: list[Transport]
        if own is not None:
            self._ways = [own]
        elif core.workers_are_here:
            self._ways = [HandOver(core)]
        else:
            ways: dict[str, Transport] = {"shared_memory": SharedMemory(core), "disk": Disk(core, folder)}
            self._ways = list(ways.values()) if wish == "auto" else [ways[wish]]
        self._chosen: Transport | None = None

    @property
    def transport(self) -> Transport:
        """The one that `prepare` has chosen."""
        assert self._chosen is not None
        return self._chosen

    def prepare(self, room: int) -> None:
        """Choose, before anything is written. Raises `WeightUpdateError` where none works."""
        why = ""
        for way in self._ways:
            try:
                way.prepare(room)
            except WeightUpdateError as error:
                way.end()
                if way is self._ways[-1]:
                    raise
                why = str(error)
                continue
            if way is not self._chosen:
                logger.info("weights reach vLLM %s: %s", way.name, why or way.why)
            self._chosen = way
            return

    def end(self) -> None:
        """Let everything go."""
        for way in self._ways:
            way.end()


def _told(answers: Callable[[], list[Mapping[str, int]]], compare: Compare | None) -> None:
    for found in answers():
        if compare is not None:
            compare(found)
