"""Which executor a trainer gets, and which ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Self

from verl_adaptor.config import EngineConfig, ExecutionConfig, TrainerConfig
from verl_adaptor.errors import BackendNotInstalled, ConfigError
from verl_adaptor.execution.environment import process_as_found
from verl_adaptor.execution.group import WorkerGroup

RanksConfig = TrainerConfig | EngineConfig
"""What says how many ranks, where, and on which device."""


def choose_executor(world_size: int, execution: ExecutionConfig) -> Literal["inline", "ray"]:
    """``inline`` where this process, or the world that it is one rank of, is enough; else ``ray``.

    Raises:
        ConfigError: settings that contradict each other, or Ray inside a world that torchrun made.
    """
    needs_ray = [name for name in ("ray_address", "python_executable") if getattr(execution, name) is not None]
    if execution.executor == "inline":
        if needs_ray:
            raise ConfigError(
                f"executor='inline' does not read {', '.join(needs_ray)}; leave it out, or use executor='ray'."
            )
        return "inline"
    ranks = ranks_running()
    if ranks > 1 and (needs_ray or execution.executor == "ray"):
        raise ConfigError(
            f"this process is one of {ranks} ranks, and each would start Ray workers of its own; start one process instead of "
            f"torchrun, or leave out {', '.join(needs_ray) or 'executor'}."
        )
    if needs_ray or execution.executor == "ray":
        return "ray"
    return "inline" if ranks > 1 or world_size == 1 else "ray"


def ranks_running() -> int:
    """Size of the world that this process is in: 1 outside of torchrun."""
    dist = sys.modules.get("torch.distributed")  # not imported: then not initialised either
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


class WorkerPool:
    """Worker groups that trainers share: with the same world size, device and execution settings they get the same ranks.

    So an actor, a critic and a reference of two ranks each need two processes, not six::

        with WorkerPool() as pool:
            actor = resolve_trainer(path, "fsdp", data_parallel_size=2).create(workers=pool)
            critic = resolve_trainer(path, "fsdp", data_parallel_size=2, head="value").create(workers=pool)

    Closing a trainer leaves its ranks running, closing the pool ends them. A broken group is started afresh for the next
    trainer.
    """

    def __init__(self) -> None:
        self._groups: dict[object, WorkerGroup] = {}

    def group(self, config: RanksConfig, label: str, copy: int = 0) -> WorkerGroup | None:
        """The ranks for a trainer or an engine of these settings; None if it belongs into this process.

        Args:
            config: its parallel sizes, device and execution settings matter.
            label: what the ranks are called in logs and errors, if they are started now.
            copy: ranks are shared by those of one number only.

        Raises:
            ConfigError: there are not enough CPUs or GPUs.
            BackendNotInstalled: Ray is missing.
            WorkerError: a rank does not come up.
        """
        if choose_executor(config.world_size, config.execution) == "inline":
            return None
        key = _key(config), copy
        if key in self._groups:
            self._groups[key].restart()
        else:
            self._groups[key] = start_ray(config, label)
        return self._groups[key]

    def check(self, configs: Iterable[RanksConfig], copies: Iterable[RanksConfig] = ()) -> None:
        """Raise `ConfigError` if trainers of these settings do not fit this machine together; nothing is started.

        What a cluster has is asked when it is joined.

        Args:
            configs: of those that share ranks where they can.
            copies: of those that do not.
        """
        shared = {_key(c): c for c in configs if choose_executor(c.world_size, c.execution) == "ray"}
        apart = [c for c in copies if choose_executor(c.world_size, c.execution) == "ray"]
        here = [c for c in (*shared.values(), *apart) if c.execution.ray_address is None]
        need = sum(c.world_size * c.execution.cpus_per_worker for c in here)
        have = os.cpu_count() or 1
        if need > have and "RAY_ADDRESS" not in os.environ and not _in_ray():
            raise ConfigError(
                f"the trainers' ranks need {need:g} CPUs, and this machine has {have}; use smaller sizes, let ranks share "
                f"(cpus_per_worker={int(100 * have / need) / 100:g}), or give all trainers one layout: then they share ranks."
            )

    def close(self) -> None:
        """End all ranks; a second call does nothing."""
        while self._groups:
            self._groups.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(config: RanksConfig) -> tuple[object, ...]:
    return config.world_size, config.device, config.execution


def _in_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def start_ray(config: RanksConfig, label: str) -> WorkerGroup:
    """A new group of Ray actors. Raises as `WorkerPool.group`."""
    if importlib.util.find_spec("ray") is None:
        raise BackendNotInstalled(
            f"{config.world_size} ranks need Ray, which is not installed; install it with: pip install 'ray>=2.50', "
            f"or start this script with: torchrun --nproc-per-node={config.world_size}"
        )
    with process_as_found():
        from verl_adaptor.execution.ray import RayWorkers

    execution = config.execution
    return WorkerGroup(
        RayWorkers(config.world_size, execution, config.device, label),
        start_timeout_s=execution.start_timeout_s,
        call_timeout_s=execution.call_timeout_s,
    )
