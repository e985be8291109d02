"""Where the ranks of a trainer run: in this process, in the world that torchrun made, or in Ray's workers.

``inline`` builds the trainer here. ``ray`` builds it in a `WorkerGroup` of Ray actors and gives back a `RemoteTrainer`.
A `WorkerPool` lets several trainers share their ranks; a `TorchrunPool` drives the ranks that torchrun started.
"""

from __future__ import annotations

from verl_adaptor.execution.group import WorkerGroup
from verl_adaptor.execution.hosted import HostedTrainer
from verl_adaptor.execution.pool import WorkerPool, choose_executor
from verl_adaptor.execution.remote_trainer import Recipe, RemoteTrainer

__all__ = ["HostedTrainer", "Recipe", "RemoteTrainer", "WorkerGroup", "WorkerPool", "choose_executor"]
