"""Micro-batches through Megatron's own schedules: one stage, 1F1B, interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedConfig

from verl_adaptor import batch as batches
from verl_adaptor.backends.megatron import layout
from verl_adaptor.backends.megatron.model import Chunk
from verl_adaptor.backends.megatron.optimizer import MegatronOptimizer
from verl_adaptor.backends.megatron.rows import Rows, lay_out
from verl_adaptor.backends.sums import Sums
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import VerlAdaptorError
from verl_adaptor.protocols.trainer import Denominators, Loss


@dataclass
class MicroBatch:
    """One micro-batch: which rows of the global batch, and how they go into the model."""

    index: Tensor
    """[b] rows of the global batch; none where it only keeps this rank in step with ranks that have more."""
    batch: TensorDict
    rows: Rows


class Schedule:
    """Runs a global batch on all ranks; each data-parallel rank takes its rows.

    Every rank of a pipeline must take part in as many micro-batches as the others, whether it has rows for them or not.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        optimizer: MegatronOptimizer | None,
        model: PreTrainedConfig,
        config: TrainerConfig,
        device: torch.device,
    ) -> None:
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.model = model
        self.config = config
        self.device = device

    # -- the two passes ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: TensorDict, names: Sequence[str]) -> dict[str, Tensor]:
        """[B, R] of each name, on the batch's device, rows in input order, the same on all ranks."""
        found = torch.zeros(len(names), *batch["responses"].shape, device=self.device)

        def collect(micro: MicroBatch, outputs: dict[str, Tensor]) -> None:
            if layout.speaks() and len(micro.index):
                for number, name in enumerate(names):
                    found[number, micro.index] = outputs[name]

        self._run(batch, lambda chunk, micro, states: collect(micro, chunk.outputs(states, micro.rows)), learning=False)
        if dist.get_world_size() > 1:
            dist.all_reduce(found)  # each row has one rank that speaks for it; the others add zeros
        return {name: values.to(batch["responses"].device) for name, values in zip(names, found, strict=True)}

    def forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        """Gather gradients of one mini-batch; loss and metrics of all of it, on all ranks."""
        sums = Sums()

        def share(chunk: Chunk, micro: MicroBatch, states: Tensor) -> Tensor:
            outputs = chunk.outputs(states, micro.rows)
            nothing = sum((value.sum() for value in outputs.values()), start=states.new_zeros(())) * 0.0
            if not len(micro.index) or sums.failure is not None:
                return nothing
            try:
                result = loss(outputs, micro.batch)
            except VerlAdaptorError as error:
                sums.failed(error)  # the other stages wait for this one's gradients: they hear of it afterwards
                return nothing
            scale = self.config.loss_scale_factor
            mask = micro.batch["response_mask"]
            value = batches.aggregate(result.per_token, mask, self.config.loss_aggregation, over, scale=scale)
            sums.add(value, result.metrics)
            return value

        try:
            for chunk in self.chunks:
                chunk.train()  # activation checkpointing works in this mode only; there is no dropout
            self._run(batch, share, learning=True)
            sums.check(layout.world_axis(), self.device)
            return sums.total(layout.world_axis(), counts=layout.speaks())
        except BaseException:
            if self.optimizer is not None:
                self.optimizer.zero_grad()  # half a mini-batch must not leak into the next step
            raise
        finally:
            for chunk in self.chunks:
                chunk.eval()

    def _run(
        self, batch: TensorDict, last: Callable[[Chunk, MicroBatch, Tensor], Tensor | None], *, learning: bool
    ) -> None:
        """All micro-batches through all chunks; `last` sees the hidden states of the last one."""
        micro_batches = self._micro_batches(batch)
        modules = self.chunks if self.optimizer is None else self.optimizer.chunks
        settings = self.chunks[0].config
        shapes = {micro.rows.input_ids.shape for micro in micro_batches}
        settings.variable_seq_lengths = len(shapes) > 1

        def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(data)
            chunk = module if isinstance(module, Chunk) else module.module

            def finish(states: Tensor, non_loss_data: bool = False) -> Any:
                result = last(chunk, micro, states)
                return None if non_loss_data else (result, torch.ones((), dtype=torch.int), None)

            return module(micro.rows), finish

        rows, length = next(iter(shapes))
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micro_batches) for _ in modules],
            model=list(modules),
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=not learning,
            collect_non_loss_data=not learning,
        )

    # -- who computes what ---------------------------------------------------------------------------------------

    def _micro_batches(self, batch: TensorDict) -> list[MicroBatch]:
        """This rank's micro-batches, as many as every other rank has; the same for log-probs and updates (C20)."""
        data, stages = layout.data_axis(), layout.pipeline_axis().size
        plan = batches.micro_batches(
            batch,
            rank=data.rank,
            ranks=data.size,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens_per_micro_batch,
        )
        interleaved = len(self.chunks) > 1
        if interleaved:  # this schedule wants a multiple of the stages
            plan += [torch.arange(0)] * (-len(plan) % stages)
        found = [self._micro_batch(batch, index) for index in plan]
        return self._alike(found) if interleaved else found

    def _micro_batch(self, batch: TensorDict, index: Tensor) -> MicroBatch:
        micro = (batch[index] if len(index) else batches.idle(batch)).to(self.device)
        shared = layout.tensor_axis().size if self.config.parallel.sequence_parallel else 1
        rows = lay_out(micro, self.model, packing=self.config.packing, multiple_of=shared)
        return MicroBatch(index, micro, rows)

    @staticmethod
    def _alike(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """One shape for all: the interleaved schedule receives before it could be told another."""
        shapes = [micro.rows.input_ids.shape for micro in micro_batches]
        rows, length = (max(shape[dim] for shape in shapes) for dim in (0, 1))
        for micro in micro_batches:
            micro.rows = micro.rows.widened(rows, length)
        return micro_batches
