"""This process among its ranks: which share of the batch, the matrices and the sequence is its own.

Ranks are laid out with the tensor-parallel axis innermost and data parallel outermost, the order that keeps the
chattiest ranks nearest to each other::

    data_parallel_size=2, tensor_parallel_size=2      rank 0 1 2 3
                                                      dp   0 0 1 1
                                                      tp   0 1 0 1
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_adaptor import errors
from verl_adaptor.backends.causal_lm import resolve_device
from verl_adaptor.config import ParallelConfig
from verl_adaptor.errors import ConfigError, TrainerError, VerlAdaptorError, kind_of
from verl_adaptor.memory import Offloaded

T = TypeVar("T")

AXES = ("dp", "cp", "tp")
"""Names of the mesh's dimensions, outermost first."""


@dataclass(frozen=True)
class Axis:
    """One parallel strategy's ranks."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None: all processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` becomes its sum over the axis, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Each rank's value, pickled, in order of ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_first(self, failure: Exception | None) -> None:
        """Where ranks bring failures, all raise the first rank's, so that all raise one kind. Returns where none does.

        Raises:
            VerlAdaptorError: another rank's error, naming it; `TrainerError` for an error that is not one of ours.
        """
        mine = None if failure is None else (kind_of(failure), f"{type(failure).__name__}: {failure}", str(failure))
        for rank, found in enumerate(self.gather(mine)):
            if found is None:
                continue
            if failure is not None and rank == self.rank:
                raise failure
            kind, foreign, sentence = found
            retold: type[VerlAdaptorError] = getattr(errors, kind or "TrainerError")
            raise retold(f"rank {rank}: {sentence if kind else foreign}") from failure


@dataclass(frozen=True)
class World:
    """All axes of one trainer."""

    rank: int = 0
    size: int = 1
    data: Axis = Axis()
    context: Axis = Axis()
    tensor: Axis = Axis()
    mesh: DeviceMesh | None = None
    """Dimensions named as in `AXES`; None in a world of one process."""

    @property
    def everyone(self) -> Axis:
        """All ranks, whatever they share."""
        return Axis(self.rank, self.size)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what only one may write."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def broadcast(self, value: T) -> T:
        """The first rank's value, on all."""
        if self.size > 1:
            values = [value]
            dist.broadcast_object_list(values, src=0)
            value = values[0]
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave this block the same way: where one raises, all do (`Axis.raise_first`), so that none waits for it."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.everyone.raise_first(failure)


def offload(world: World, tensors: Iterable[Tensor], tier: str) -> Offloaded:
    """`tensors` to `tier` on all ranks, or, where one of them has no room, on none. Raises `TrainerError`."""
    moved: list[Offloaded] = []
    try:
        with world.together():
            moved.append(Offloaded(tensors, tier))
    except Exception:
        for away in moved:
            away.restore()
        raise
    return moved[0]


def join(parallel: ParallelConfig, device: torch.device, timeout_s: float) -> World:
    """Take this process's place in the world that `parallel` asks for.

    Raises:
        ConfigError: the processes that torchrun or the executor started are not as many.
    """
    check_world_size(parallel.world_size)
    if parallel.world_size == 1:
        return World()
    ensure_process_group(device, timeout_s)
    sizes = (parallel.data_parallel_size, parallel.context_parallel_size, parallel.tensor_parallel_size)
    mesh = _mesh(device.type, sizes)
    data, context, tensor = (_axis(mesh, name) for name in AXES)
    return World(dist.get_rank(), dist.get_world_size(), data, context, tensor, mesh)


def rank_device(name: str, ranks: int) -> torch.device:
    """The device of this rank; on CUDA, of several GPUs the one with the number of the rank on its machine.

    Args:
        name: as `resolve_device` takes it.
        ranks: of the trainer.

    Raises:
        ConfigError: there is no such device, or all ranks would take the same.
    """
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    if device.index is not None and ranks > 1:
        raise ConfigError(
            f"device={name!r} would put all {ranks} ranks on one GPU; use 'cuda': each rank takes its own."
        )
    if device.index is None:
        alone = torch.cuda.device_count() == 1  # the launcher shows each rank its own
        index = 0 if alone else int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        device = resolve_device(f"cuda:{index}")
    torch.cuda.set_device(device)  # collectives take the current one
    return device


def check_world_size(wanted: int) -> None:
    """Raise `ConfigError` unless this process is one of `wanted` ranks."""
    found = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if found != wanted and not (wanted == 1 and "WORLD_SIZE" not in os.environ):
        raise ConfigError(
            f"the parallel sizes multiply to {wanted} ranks, and {found} are running; start them with "
            f"torchrun --nproc-per-node={wanted}, or leave executor='auto' and start one process."
        )


def ensure_process_group(device: torch.device, timeout_s: float) -> None:
    """Initialise torch.distributed once a process: from torchrun's environment, or for this process alone.

    It lives until the process ends, because under torchrun it cannot be made twice.
    """
    if dist.is_initialized():
        if device.type == "cuda" and "nccl" not in str(dist.get_backend_config()):
            raise ConfigError(
                "this process began torch.distributed on the CPU, and it cannot begin twice; make the trainers on CUDA first, "
                "or in another process."
            )
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "WORLD_SIZE" in os.environ:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise TrainerError(f"WORLD_SIZE is set, but not {', '.join(missing)}; start with torchrun, or unset it.")
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@functools.cache
def _mesh(device_type: str, sizes: Sequence[int]) -> DeviceMesh:
    """Cached: process groups cost sockets, and trainers of one layout can share them."""
    return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=AXES)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    size = mesh[name].size()
    return Axis(mesh.get_local_rank(name), size, mesh.get_group(name) if size > 1 else None)
