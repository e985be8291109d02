"""DeepSpeed's engine as this package needs it: made from our settings, quiet, and without traces in the environment."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from verl_adaptor.backends.zero.options import ZeroOptions, zero_stage
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import ConfigError


def make_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: TrainerConfig,
    options: ZeroOptions,
    device: torch.device,
) -> Any:
    """A `DeepSpeedEngine` around `module`, sharded in place; torch.distributed must be initialised.

    Without an optimizer only stage 3 makes sense: weights are sharded and gathered layer by layer.
    """
    with in_engine(device), _environment(DS_ACCELERATOR=device.type):
        import deepspeed

        _check_accelerator(deepspeed.accelerator.get_accelerator().device_name(), device)
        _join(deepspeed)
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, dist_init_required=False, config=settings(config, options, device)
        )
    return engine


def destroy(engine: Any) -> None:
    """Take DeepSpeed's hooks off, and its engine out of what it keeps for the whole process: a list, and a method's cache."""
    engine.destroy()
    stack = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    gone = set(engine.module.modules())
    stack[:] = [module for module in stack if module not in gone]
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(coordinator.PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():  # the cached function lies beneath a decorator
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def _join(deepspeed: Any) -> None:
    """Let DeepSpeed use the process group there is, once a process.

    Told that it is initialised, because else DeepSpeed looks for MPI wherever torchrun's variables are missing. Without its
    shared-memory all-reduce for CPUs: training does not use it, and it would be compiled here, at the first start.
    """
    if deepspeed.comm.is_initialized():
        return
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    compile_op, backend.build_shm_op = backend.build_shm_op, lambda: None
    try:
        deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
    finally:
        backend.build_shm_op = compile_op
    _log_as_others_do(deepspeed.utils.logger)


def _log_as_others_do(logger: logging.Logger) -> None:
    """Through the root logger: DeepSpeed writes to standard output, which is the program's own."""
    for handler in [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]:
        logger.removeHandler(handler)
    logger.propagate = True


def settings(config: TrainerConfig, options: ZeroOptions, device: torch.device) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Gradients are accumulated until `step` is called (``managed_gradient_accumulation`` off), because the number of
    micro-batches is not known before. Clipping at stage 0 is ours: DeepSpeed reports no norm there.
    """
    stage = zero_stage(config)
    clip = config.max_grad_norm if stage and config.max_grad_norm is not None else 0.0
    return {
        "train_micro_batch_size_per_gpu": 1,  # of no effect: nothing is scaled by it
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,  # fused AdamW is AdamW
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_settings(stage, options, device),
    }


def _zero_settings(stage: int, options: ZeroOptions, device: torch.device) -> dict[str, Any]:
    pinned = device.type == "cuda"
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": options.reduce_bucket_size,
        "allgather_bucket_size": options.gather_bucket_size,
        "stage3_prefetch_bucket_size": options.prefetch_bucket_size,
        "stage3_param_persistence_threshold": options.persistence_threshold,
    }
    if options.offload_optimizer == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if options.offload_parameters == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return zero


@contextmanager
def in_engine(device: torch.device) -> Iterator[None]:
    """Around everything that DeepSpeed does.

    It reads LOCAL_RANK at many places, to find the model's CUDA device. Set for that long only, because other libraries
    take the variable for a sign that torchrun started the process. And it calls collectives by names that newer PyTorch
    warns of at every call.
    """
    index = 0
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
    with _environment(LOCAL_RANK=str(index)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`?torch.distributed", category=FutureWarning)
        yield


def _check_accelerator(found: str, device: torch.device) -> None:
    if found != device.type:
        raise ConfigError(
            f"device={device.type!r}, but DeepSpeed was imported earlier in this process and chose {found!r}; start Python "
            f"with DS_ACCELERATOR={device.type} in the environment, or use another process."
        )


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for as long as the block runs (law I10)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
