"""Megatron's process groups: one layout at a time in a process, shared by all trainers that have it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.distributed import distributed_c10d

from verl_adaptor.backends.megatron.options import MegatronTrainerOptions
from verl_adaptor.backends.world import Axis
from verl_adaptor.config import ParallelConfig
from verl_adaptor.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How Megatron spreads a model over ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, options: MegatronTrainerOptions) -> Layout:
        """The layout that the settings ask for."""
        return cls(
            data=parallel.data_parallel_size,
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            virtual_pipeline=options.virtual_pipeline_parallel_size,
            expert=parallel.expert_parallel_size,
        )

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in asdict(self).items() if size > 1) or "one rank"


class _Shared:
    """What lives as long as any trainer does."""

    layout: Layout | None = None
    users: int = 0
    groups: frozenset[dist.ProcessGroup] = frozenset()


def acquire(layout: Layout, timeout_s: float) -> None:
    """Make Megatron's process groups, or share those that are there. Each call needs one `release`.

    Raises:
        ConfigError: trainers of another layout are open, or other code in this process has initialised Megatron.
    """
    if _Shared.users and _Shared.layout != layout:
        raise ConfigError(
            f"a megatron trainer of another layout is open in this process ({_Shared.layout}; asked for: {layout}), and "
            "Megatron knows one layout at a time; close it first, give both the same parallel sizes, or use executor='ray'."
        )
    if not _Shared.users:
        if parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "other code in this process has initialised Megatron's model parallelism; let it call "
                "megatron.core.parallel_state.destroy_model_parallel() first, or use executor='ray'."
            )
        _initialise(layout, timeout_s)
    _Shared.users += 1


def release() -> None:
    """Give the groups back; after the last user they are destroyed, so that another layout can follow."""
    _Shared.users -= 1
    if _Shared.users:
        return
    parallel_state.destroy_model_parallel()  # forgets most groups and closes few: gloo would keep their sockets
    for group in _Shared.groups & frozenset(distributed_c10d._world.pg_map):
        dist.destroy_process_group(group)
    _Shared.layout, _Shared.groups = None, frozenset()


def _initialise(layout: Layout, timeout_s: float) -> None:
    before = frozenset(distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert,
        # whole experts on a rank: cut ones gather unequal numbers of tokens, which gloo cannot
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=True,  # the distributed optimizer gathers its checkpoints over them
    )
    # a tracker that forks nothing: dropout is 0 everywhere
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _Shared.layout = layout
    _Shared.groups = frozenset(distributed_c10d._world.pg_map) - before


# -- this rank's place -------------------------------------------------------------------------------------------


def tensor_axis() -> Axis:
    """The ranks that share each matrix, and the vocabulary."""
    return _axis(parallel_state.get_tensor_model_parallel_group())


def pipeline_axis() -> Axis:
    """The ranks that share the stack of layers."""
    return _axis(parallel_state.get_pipeline_model_parallel_group())


def data_axis() -> Axis:
    """The ranks that share the batch."""
    return _axis(parallel_state.get_data_parallel_group())


def expert_data_axis() -> Axis:
    """The ranks that hold the same experts."""
    return _axis(parallel_state.get_expert_data_parallel_group())


def expert_axis() -> Axis:
    """The ranks that share the experts."""
    return _axis(parallel_state.get_expert_model_parallel_group())


def world_axis() -> Axis:
    """All ranks."""
    return Axis(dist.get_rank(), dist.get_world_size())


def speaks() -> bool:
    """Whether this rank reports what its pipeline has computed: the first tensor-parallel rank of the last stage."""
    pipeline = pipeline_axis()
    return pipeline.rank == pipeline.size - 1 and tensor_axis().rank == 0


def _axis(group: dist.ProcessGroup) -> Axis:
    size = group.size()
    return Axis(group.rank(), size, group if size > 1 else None)
