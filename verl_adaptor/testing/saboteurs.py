"""Trainers that go wrong only on several ranks, or in one framework, as real ones have: the laws must catch each.

They stand in the package and not among the tests because ranks in other processes import them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict

from verl_adaptor.backends.fsdp.trainer import FSDPTrainer
from verl_adaptor.backends.hf.trainer import HFTrainer
from verl_adaptor.backends.megatron import weights as packing
from verl_adaptor.backends.megatron.trainer import MegatronTrainer
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.batch import deal, denominators
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.protocols.trainer import Denominators, Loss
from verl_adaptor.registry import get_spec


class PerRankMean(HFTrainer):
    """Each rank divides by its own tokens, and the ranks' gradients are averaged: the classic bug of DDP loops (C06)."""

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        own = denominators(batch[deal(len(batch), self.world.data.size)[self.world.data.rank]])
        return super()._forward_backward(
            batch, loss, dataclasses.replace(over, tokens=own.tokens * self.world.data.size)
        )


class ForgottenRank(HFTrainer):
    """The last rank's gradients are not summed in."""

    def _optimizer_step(self) -> dict[str, float]:
        if self.world.data.rank == self.world.data.size - 1:
            self._optimizer.zero_grad()
        return super()._optimizer_step()


class LostEmbeddingGradient(HFTrainer):
    """Under activation checkpointing the embedding gets no gradient, as with a missing input-gradient hook (C30)."""

    def _optimizer_step(self) -> dict[str, float]:
        if self.config.activation_checkpointing:
            self.head.model.get_input_embeddings().weight.grad = None
        return super()._optimizer_step()


class NormOfOwnShards(FSDPTrainer):
    """Clips by the norm of this rank's shards alone."""

    def _make_optimizer(self) -> Optimizer:
        made = super()._make_optimizer()
        made._norm = lambda gradients: torch.nn.utils.get_total_norm([_local(gradient) for gradient in gradients])
        return made


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


class KeepsHalfAStep(FSDPTrainer):
    """After a failure in the middle of a mini-batch nothing is dropped."""

    def _abandon(self) -> None:
        pass


class UnmarkedNorms(MegatronTrainer):
    """Norms under sequence parallelism without the mark that has their gradients summed."""

    def _build(self) -> None:
        super()._build()
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                if parameter.ndim == 1:
                    vars(parameter).pop("sequence_parallel", None)


class PlainlyConcatenated(MegatronTrainer):
    """q, k and v end to end, where Megatron wants them group by group."""

    def _build(self) -> None:
        with _packing(end_to_end):
            super()._build()


def end_to_end(parts: Any, *_: Any) -> torch.Tensor:
    """The wrong packing: right for everything but q, k and v of several groups."""
    return torch.cat(tuple(parts))


@contextmanager
def _packing(pack: Any) -> Iterator[None]:
    module: Any = packing
    honest = module.pack
    module.pack = pack
    try:
        yield
    finally:
        module.pack = honest


def saboteur(base: str, trainer: type[Any]) -> BackendSpec:
    """A spec under which the factory builds `trainer` with everything else as `base` declares it."""
    return dataclasses.replace(
        get_spec(base),
        name=trainer.__name__.lower(),
        aliases=(),
        engine=None,
        trainer=f"{trainer.__module__}:{trainer.__name__}",
    )
