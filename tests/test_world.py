"""Ranks fail together or not at all: real ranks of which one meets what the others do not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from verl_adaptor.backends import checkpoint
from verl_adaptor.backends import world as worlds
from verl_adaptor.backends.sums import Sums
from verl_adaptor.backends.world import World, offload
from verl_adaptor.config import ExecutionConfig, ParallelConfig, TrainerConfig
from verl_adaptor.errors import BatchError, CheckpointError, ConfigError, TrainerError, VerlAdaptorError
from verl_adaptor.memory import Offloaded
from verl_adaptor.testing.ranks import Ranks, own_axis


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    both = Ranks(tmp_path_factory.mktemp("ranks"))
    yield both
    both.close()


def own_world() -> World:
    return World(dist.get_rank(), dist.get_world_size(), data=own_axis())


def error_of(action: Any) -> str:
    try:
        action()
    except VerlAdaptorError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def raise_on_one(kind: type[Exception]) -> str:
    world = own_world()

    def action() -> None:
        with world.together():
            if world.rank == 1:
                raise kind("it is broken")

    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_an_error_of_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    own = "CheckpointError: it is broken"
    assert ranks(raise_on_one, CheckpointError) == ["CheckpointError: rank 1: it is broken", own]
    foreign = "TrainerError: rank 1: ZeroDivisionError: it is broken"
    assert ranks(raise_on_one, ZeroDivisionError) == [foreign, "ZeroDivisionError: it is broken"]


def save_on(folders: list[Path]) -> str:
    """What becomes of a folder that the ranks write together, each seeing another disk under its path."""
    world = own_world()

    def action() -> None:
        with checkpoint.new(folders[world.rank], {}, world) as partial:
            (partial / f"of-rank-{world.rank}").touch()

    return error_of(action)


def test_hosts_that_share_no_file_system_save_no_half_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    disks = [tmp_path / "here", tmp_path / "there"]
    for disk in disks:
        disk.mkdir()
    for error in ranks(save_on, [disk / "actor" for disk in disks]):
        assert "CheckpointError" in error and f"host {socket.gethostname()} does not see" in error
    assert [list(disk.iterdir()) for disk in disks] == [[], []], "something was left"
    assert ranks(save_on, [tmp_path / "shared"] * 2) == ["none", "none"]
    assert sorted(file.name for file in (tmp_path / "shared").iterdir()) == ["manifest.json", "of-rank-0", "of-rank-1"]


class NoRoom(Offloaded):
    """What a rank whose disk is full meets."""

    def __init__(self, *_: Any) -> None:
        raise TrainerError("the disk is full")


def offload_with_one_disk_full() -> tuple[str, bool]:
    world, tensor = own_world(), torch.arange(1000.0)
    honest, worlds.Offloaded = worlds.Offloaded, NoRoom if world.rank == 1 else worlds.Offloaded  # type: ignore[misc]
    try:
        error = error_of(lambda: offload(world, [tensor], "disk"))
    finally:
        worlds.Offloaded = honest  # type: ignore[misc]
    there = tensor.untyped_storage().nbytes() == 4000
    return error, there and torch.equal(tensor, torch.arange(1000.0))


def test_all_ranks_offload_or_none(ranks: Ranks) -> None:
    assert ranks(offload_with_one_disk_full) == [
        ("TrainerError: rank 1: the disk is full", True),
        ("TrainerError: the disk is full", True),
    ]


def sum_with_failures(failures: dict[int, VerlAdaptorError]) -> str:
    sums = Sums()
    sums.add(torch.tensor(1.0), {})
    if dist.get_rank() in failures:
        sums.failed(failures[dist.get_rank()])
    return error_of(lambda: sums.check(own_axis(), torch.device("cpu")))


def test_a_loss_that_fails_on_one_rank_fails_on_all(ranks: Ranks) -> None:
    told = "TrainerError: rank 1: no score"
    assert ranks(sum_with_failures, {1: TrainerError("no score")}) == [told, "TrainerError: no score"]
    both = ranks(sum_with_failures, {0: BatchError("no rows"), 1: TrainerError("no score")})
    assert both == ["BatchError: no rows", "BatchError: rank 0: no rows"], "ranks are in step if all raise one kind"
    assert ranks(sum_with_failures, {}) == ["none", "none"]


def test_ranks_do_not_share_a_gpu() -> None:
    half = ExecutionConfig(gpus_per_worker=0.5)
    with pytest.raises(ConfigError, match=r"gpus_per_worker=0\.5: NCCL refuses two of 2 ranks on one GPU"):
        TrainerConfig(parallel=ParallelConfig(data_parallel_size=2), execution=half)
    assert TrainerConfig(execution=half).execution.gpus_per_worker == 0.5
