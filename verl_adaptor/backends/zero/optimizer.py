"""AdamW inside a DeepSpeed engine, with the schedule and the guard against non-finite gradients of every trainer."""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_adaptor.backends.optimizer import Optimizer, schedule_factor
from verl_adaptor.backends.zero.engine import in_engine
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import NonFiniteGradient


def adamw(parameters: Any, config: TrainerConfig) -> torch.optim.AdamW:
    """What DeepSpeed shards. Fused also on the CPU, where offloaded state is stepped."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class EngineOptimizer(Optimizer):
    """Steps a `DeepSpeedEngine`. Clipping, norm and state are DeepSpeed's, the schedule is ours."""

    def __init__(self, engine: Any, config: TrainerConfig, device: torch.device) -> None:
        self.config = config
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.steps = 0
        self._engine = engine
        self._device = device

    def step(self) -> dict[str, float]:
        """As `Optimizer.step`, on all ranks together: where a gradient is not finite on one, all skip."""
        learning_rate = self.config.learning_rate * schedule_factor(self.steps, self.config)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        with in_engine(self._device):
            norm = self._step_sharded() if self._engine.zero_optimization() else self._step_whole()
        finite = math.isfinite(norm)
        self.steps += finite
        if not finite and self.config.non_finite == "raise":
            raise NonFiniteGradient(
                f"gradient norm {norm}; the weights were not touched. Lower the learning rate or look for an infinite reward "
                "or log-prob; non_finite='skip' drops such steps and counts them."
            )
        return {"grad_norm": norm, "learning_rate": learning_rate, "skipped": float(not finite)}

    def _step_sharded(self) -> float:
        """Stages 1 to 3: DeepSpeed itself drops gradients whose norm is not finite."""
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def _step_whole(self) -> float:
        """Stage 0, where DeepSpeed neither looks at the norm nor reports it: sum, look, clip, step."""
        self._engine.buffered_allreduce_fallback()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if bool(torch.isfinite(norm)):
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.max_grad_norm, norm)
            self._engine.optimizer.step()
        self.zero_grad()
        return float(norm)

    def zero_grad(self) -> None:
        """Drop what was accumulated, also where a backward pass broke off half-way."""
        self._engine.zero_grad()
        if self._engine.zero_optimization():
            _drop_accumulated(self._engine.optimizer)

    def resume(self, steps: int) -> None:
        """Go on after `steps` steps, with the averages that DeepSpeed has loaded and the config's own hyperparameters."""
        self.steps = steps
        own = {"betas": self.config.betas, "eps": self.config.eps, "weight_decay": self.config.weight_decay}
        for group in self._engine.optimizer.param_groups:
            group.update(own)


def _drop_accumulated(sharded: Any) -> None:
    """Put a ZeRO optimizer where it stands after a step: DeepSpeed does so on an overflow, and has no call for it."""
    sharded.zero_grad()
    sharded._backward_hook_state.reset_for_new_step()
    sharded._backward_active_depth = 0
    for bucket in sharded.ipg_buckets.values():
        bucket.params.clear()
        bucket.elements = 0
    already = sharded.params_already_reduced  # a list in stages 1 and 2, a dictionary in stage 3
    for key in range(len(already)) if isinstance(already, list) else already:
        already[key] = False
    if hasattr(sharded, "all_grad_tensors"):  # stages 1 and 2
        sharded.micro_step_id = -1
        for key in {*sharded.averaged_gradients, *sharded.all_grad_tensors}:
            sharded.averaged_gradients[key] = sharded.all_grad_tensors[key] = None
        sharded._release_ipg_buffers()
        sharded._offload_accumulated_param_ids = set()
    else:
        sharded.averaged_gradients = {}
        sharded._offload_boundary_param_ids = set()
    sharded.reset_cpu_buffers()
