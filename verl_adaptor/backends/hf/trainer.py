"""The reference trainer: transformers and AdamW, the whole model on every data-parallel rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from verl_adaptor.backends.export import bucketed
from verl_adaptor.backends.torch_trainer import TorchTrainer
from verl_adaptor.backends.world import Axis


class HFTrainer(TorchTrainer):
    """`TorchTrainer`, and two ways to sum gradients over the data-parallel ranks.

    ``gradient_sync="ddp"`` (the default) overlaps the sum with the backward pass; ``"manual"`` sums once before the step,
    which is the fewest bytes where gradients are accumulated over several calls.

    Raises:
        UnsupportedCapability: packing or activation checkpointing on a model without it.
        ConfigError: other than `data_parallel_size` processes are running.
        ModelError: the folder holds no model that can be trained.
        MissingGradient: activation checkpointing loses gradients of this model.
    """

    _ddp: DistributedDataParallel | None = None
    _meets_in_every_backward = False

    def _parallelize(self) -> None:
        manual = self.config.parallel.gradient_sync == "manual"
        if self.world.data.size > 1 and self.config.trainable and not manual:
            self._ddp = DistributedDataParallel(
                self.head,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                process_group=self.world.data.group,
                forward_sync_buffers=False,  # rotary frequencies: the same on all ranks from the start
            )

    def _run(self, micro: TensorDict) -> dict[str, Tensor]:
        wrapped = self._ddp if torch.is_grad_enabled() and self._ddp else self.head
        outputs: dict[str, Tensor] = wrapped(micro)
        return outputs

    def _micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()

    def _backward(self, share: Tensor) -> None:
        # DDP takes the mean over ranks; what an earlier call has summed is equal on all, so the mean leaves it as it is
        (share if self._ddp is None else share * self.world.data.size).backward()

    def _abandon(self) -> None:
        """DDP waits for the backward pass of its last forward pass: it would sum the next gradients a micro-batch too early."""
        if self._ddp is not None:
            self._ddp.reducer._reset_state()
        super()._abandon()

    def _optimizer_step(self) -> dict[str, float]:
        if self._ddp is None and self.world.data.size > 1:
            sum_gradients(self._optimizer.parameters, self.world.data)
        return super()._optimizer_step()

    def _offload(self, tier: str) -> None:
        self._ddp = None  # with its buckets, a gradient's worth of memory
        gc.collect()
        super()._offload(tier)

    def _onload(self) -> None:
        super()._onload()
        self._parallelize()

    def _release(self) -> None:
        self._ddp = None
        super()._release()


@torch.no_grad()
def sum_gradients(parameters: dict[str, nn.Parameter], ranks: Axis) -> None:
    """Replace each gradient by its sum over `ranks`, one collective a bucket.

    A parameter that got a gradient on some ranks only counts as 0 on the others; one without any keeps none.
    """
    some = next(iter(parameters.values()))
    has = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.float32, device=some.device)
    used = {name: p for (name, p), count in zip(parameters.items(), ranks.sum(has).tolist(), strict=True) if count}
    for parameter in used.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for gradients in _buckets(used):
        summed = ranks.sum(torch.cat([g.flatten() for g in gradients]))
        for gradient, piece in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))


def _buckets(parameters: dict[str, nn.Parameter]) -> Iterator[list[Tensor]]:
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    for names in bucketed(sizes):
        yield [grad for name in names if (grad := parameters[name].grad) is not None]
