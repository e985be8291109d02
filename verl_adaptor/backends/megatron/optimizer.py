"""Megatron's optimizers, plain and distributed, with this package's clip, schedule and non-finite rule (law T7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from verl_adaptor.backends.megatron import layout
from verl_adaptor.backends.optimizer import schedule_factor
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import NonFiniteGradient


class MegatronOptimizer:
    """AdamW with decay on all parameters, over gradients that are summed, not averaged, over data-parallel ranks.

    Gradients gather on each rank until `step` reduces them, once, however many calls of ``forward_backward`` there were.
    With ``zero_stage=1`` each data-parallel rank keeps and updates its part of the optimizer state (arXiv 1910.02054).
    """

    def __init__(self, chunks: Sequence[nn.Module], settings: TransformerConfig, config: TrainerConfig) -> None:
        self.config = config
        self.steps = 0
        """Steps taken: the position in the schedule. A skipped step does not count."""
        self.sharded = config.parallel.zero_stage == 1
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=self.sharded)
        self.chunks = [DistributedDataParallel(settings, reduction, chunk) for chunk in chunks]
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                bf16=settings.bf16,
                params_dtype=settings.params_dtype,
                use_distributed_optimizer=self.sharded,
            ),
            self.chunks,
            config_overrides={},  # by default Megatron spares norms and biases the decay
        )
        self.place_at(0)
        self.zero_grad()

    def step(self, names: Callable[[], Mapping[str, nn.Parameter]]) -> dict[str, float]:
        """Reduce, clip, step, clear the gradients. A non-finite norm changes nothing at all.

        Args:
            names: this rank's parameters by name, for the message about a non-finite gradient.

        Returns:
            ``grad_norm`` before clipping, ``learning_rate`` of this step, ``skipped``; the same on all ranks.
        """
        learning_rate = self.config.learning_rate * schedule_factor(self.steps, self.config)
        finalize_model_grads(self.chunks)
        self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())  # over all ranks, so that all decide alike
        finite = math.isfinite(norm)
        if finite:
            if self.config.max_grad_norm is not None:
                for part in self.inner.chained_optimizers:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), self.config.max_grad_norm, norm)
            for group in self.inner.param_groups:
                group["lr"] = learning_rate
            self.inner.step_with_ready_grads()
            self.steps += 1
        culprits = [] if finite else _non_finite(names())
        self.zero_grad()
        if culprits and self.config.non_finite == "raise":
            raise NonFiniteGradient(
                f"gradient norm {norm} ({', '.join(culprits)}); the weights were not touched. Lower the learning rate or "
                "look for an infinite reward or log-prob; non_finite='skip' drops such steps and counts them."
            )
        return {"grad_norm": norm, "learning_rate": learning_rate, "skipped": float(not finite)}

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    # -- state -------------------------------------------------------------------------------------------------

    def place_at(self, steps: int) -> None:
        """Take up the schedule, and AdamW's bias correction, after so many steps; averages that are missing are 0."""
        self.steps = steps
        for part in self.inner.chained_optimizers:
            if part.optimizer is None:  # all parameters of this rank are another part's
                continue
            part.init_state_fn(part.optimizer, part.config)
            if isinstance(part.optimizer, torch.optim.AdamW):
                for state in part.optimizer.state.values():
                    state["step"] = torch.tensor(float(steps))
            else:  # Transformer Engine's and apex's
                for group in part.optimizer.param_groups:
                    group["step"] = steps

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The float32 value of one of this rank's parameters; see `whole`."""
        return parameter.detach() if parameter.dtype == torch.float32 else self.whole(parameter, "param")

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """What the optimizer knows of a parameter, float32, of its shape. With ``zero_stage=1`` a collective.

        Args:
            parameter: one of this rank's.
            kind: ``param`` (the master weight), ``exp_avg`` or ``exp_avg_sq``.
        """
        held, part = self._held(parameter)
        if not self.sharded:
            return held[kind].detach()
        whole = torch.zeros(parameter.shape, device=parameter.device)
        if held:
            whole.view(-1)[part] = held[kind]
        of_expert = not getattr(parameter, "allreduce", True)
        return (layout.expert_data_axis() if of_expert else layout.data_axis()).sum(whole)

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        """Undo `whole`; a master weight is written through to the weight that computes."""
        if kind == "param":
            parameter.copy_(value)
        held, part = self._held(parameter)
        if held:
            held[kind].view(-1).copy_(value.reshape(-1)[part])

    def _held(self, parameter: nn.Parameter) -> tuple[dict[str, Tensor], slice]:
        """This rank's part of a parameter's state, and where it lies in the flat parameter; empty if it has none."""
        for part in self.inner.chained_optimizers:
            master, where = getattr(parameter, "main_param", parameter), slice(None)
            if isinstance(part, DistributedOptimizer):
                if parameter not in part.model_param_gbuf_map:
                    continue
                span = part._get_model_param_range_map(parameter)["param"]
                master, where = _shards(part)[parameter], slice(span.start, span.end)
            if part.optimizer is not None and master in part.optimizer.state:
                return {"param": master, **part.optimizer.state[master]}, where
        return {}, slice(0)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds on this rank between two calls: gradients, masters, averages."""
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data
        for part in self.inner.chained_optimizers:
            for master, state in part.optimizer.state.items() if part.optimizer is not None else ():
                yield from (master, *(value for value in state.values() if value.ndim))


def _shards(part: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """Parameter -> this rank's flat float32 shard of it. (Megatron's own look-up errs where types are mixed.)"""
    pairs = (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    )
    return {
        parameter: shard
        for whole, cut in pairs
        for parameters, shards in zip(whole, cut, strict=True)
        for parameter, shard in zip(parameters, shards, strict=True)
    }


def _non_finite(own: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of the first parameters, over all ranks, whose gradient is not finite."""
    bad = [name for name, p in own.items() if not bool(getattr(p, "main_grad").isfinite().all())]  # noqa: B009 - Megatron's
    everywhere: list[list[str]] = [bad]
    if dist.get_world_size() > 1:
        everywhere = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, bad)
    return sorted({name for some in everywhere for name in some})[:3] or ["each gradient is finite, their norm is not"]
