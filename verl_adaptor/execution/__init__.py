"""Where the ranks of a trainer or an engine run: in this process, in the world that torchrun made, or in Ray's workers.

``inline`` builds it here. ``ray`` builds it in a `WorkerGroup` of Ray actors and gives back a `RemoteTrainer` or a
`RemoteEngine`. A `WorkerPool` lets several share their ranks; a `TorchrunPool` drives the ranks that torchrun started.
"""

from __future__ import annotations

from verl_adaptor.execution.group import WorkerGroup
from verl_adaptor.execution.hosted_engine import HostedEngine
from verl_adaptor.execution.hosted_trainer import HostedTrainer
from verl_adaptor.execution.pool import RanksConfig, WorkerPool, choose_executor, ranks_running
from verl_adaptor.execution.remote_trainer import Recipe, RemoteTrainer

__all__ = [
    "HostedEngine",
    "HostedTrainer",
    "RanksConfig",
    "Recipe",
    "RemoteTrainer",
    "WorkerGroup",
    "WorkerPool",
    "choose_executor",
    "ranks_running",
]
