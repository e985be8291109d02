"""The trainer: accelerate wraps the model, runs the backward passes and synchronises gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from verl_adaptor.backends.hf.trainer import HFTrainer
from verl_adaptor.errors import ConfigError

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""The kinds of run in which every rank holds the whole model."""


class AccelerateTrainer(HFTrainer):
    """The reference trainer with its data parallelism from accelerate.

    Mixed precision is the head's own, as on every trainer: so trainers of both precisions live in one process, although
    accelerate's state is one a process.

    Raises:
        ConfigError: the environment asks accelerate for FSDP, DeepSpeed or Megatron-LM; other than `data_parallel_size`
            processes are running.
        UnsupportedCapability: packing or activation checkpointing on a model without it.
        ModelError: the folder holds no model that can be trained.
        MissingGradient: activation checkpointing loses gradients of this model.
    """

    _accelerator: Accelerator

    def _parallelize(self) -> None:
        self._accelerator = accelerator(self.device)
        if not self.config.trainable:
            return
        wrapped = self._accelerator.prepare_model(self.head, device_placement=False)
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None

    def _micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self._ddp is None else self._accelerator.no_sync(self._ddp)

    def _backward(self, share: Tensor) -> None:
        # accelerate divides by its accumulation steps, which anybody in this process or the environment may have set, and
        # DDP by the ranks; the shares are of a sum
        ranks = 1 if self._ddp is None else self.world.data.size
        self._accelerator.backward(share * (ranks * self._accelerator.gradient_accumulation_steps))

    def _offload(self, tier: str) -> None:
        self._accelerator.free_memory()  # it keeps what it has prepared
        super()._offload(tier)

    def _release(self) -> None:
        self._accelerator.free_memory()
        super()._release()


def accelerator(device: torch.device) -> Accelerator:
    """For this process and its ranks, without a change of torch's threads.

    Raises:
        ConfigError: the environment asks for more than plain data parallelism.
    """
    threads = torch.get_num_threads()
    made = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",
        dynamo_backend="no",
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False)
        ],  # the same on all ranks from the start
    )
    torch.set_num_threads(threads)  # on a CPU it chooses them itself where OMP_NUM_THREADS is not set
    if made.distributed_type not in PLAIN:
        raise ConfigError(
            f"accelerate is set to {made.distributed_type.value} (accelerate launch, its config file or ACCELERATE_USE_* in the "
            "environment); this backend holds the model whole. Take backend='fsdp', 'zero' or 'megatron', or unset it."
        )
    return made
