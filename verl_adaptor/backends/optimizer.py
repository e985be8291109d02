"""AdamW with a schedule, global clipping, and a guard against non-finite gradients (law T7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import CheckpointError, NonFiniteGradient


def schedule_factor(step: int, config: TrainerConfig) -> float:
    """What the learning rate is multiplied by after `step` optimizer steps: warm-up from 0, then the schedule.

    >>> config = TrainerConfig(lr_schedule="linear", lr_warmup_steps=2, total_steps=6, min_lr_ratio=0.5)
    >>> [schedule_factor(step, config) for step in range(8)]
    [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """
    warmup, total = config.lr_warmup_steps, config.total_steps
    if step < warmup:
        return step / warmup
    if config.lr_schedule == "constant" or total is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - progress if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


class Optimizer:
    """AdamW (arXiv 1711.05101) over named parameters; decay on all of them, as verl does.

    `global_norm` is the norm over all ranks of a list of gradients; one process needs only its own.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        *,
        fused: bool = True,
        global_norm: Callable[[list[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
    ) -> None:
        self.config = config
        self.parameters = dict(parameters)
        self.steps = 0
        """Steps taken: the position in the schedule. A skipped step does not count."""
        self._norm = global_norm
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=fused,
        )

    def step(self) -> dict[str, float]:
        """Clip, step, clear the gradients. A non-finite norm changes nothing at all: weights, averages, schedule.

        Returns:
            ``grad_norm`` before clipping, ``learning_rate`` of this step, ``skipped``.
        """
        learning_rate = self.config.learning_rate * schedule_factor(self.steps, self.config)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = self._norm(gradients)
        finite = bool(torch.isfinite(norm))
        if finite:
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self.steps += 1
        culprits = [] if finite else self._non_finite()
        self.zero_grad()
        if culprits and self.config.non_finite == "raise":
            raise NonFiniteGradient(
                f"gradient norm {float(norm)} ({', '.join(culprits)}); the weights were not touched. Lower the learning "
                "rate or look for an infinite reward or log-prob; non_finite='skip' drops such steps and counts them."
            )
        return {"grad_norm": float(norm), "learning_rate": learning_rate, "skipped": float(not finite)}

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Averages by parameter name, and the position in the schedule: what an exact resume needs."""
        state = self._adamw.state
        return {"steps": self.steps, "state": {n: dict(state[p]) for n, p in self.parameters.items() if p in state}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Undo `state_dict`. Hyperparameters stay those of the config. Raises `CheckpointError` before any change."""
        state = saved["state"]
        wrong = [name for name in state if name not in self.parameters] or [
            f"{name}.{key}"
            for name, values in state.items()
            for key, value in values.items()
            if value.ndim and value.shape != self.parameters[name].shape
        ]
        if wrong:
            raise CheckpointError(f"the optimizer state does not fit this model ({wrong[0]}); load it into its own.")
        index = {name: number for number, name in enumerate(self.parameters)}
        self._adamw.load_state_dict(
            {
                "state": {index[name]: values for name, values in state.items()},
                "param_groups": self._adamw.state_dict()["param_groups"],
            }
        )
        self.steps = int(saved["steps"])

    def _non_finite(self) -> list[str]:
        """Names of the first parameters whose gradient is not finite."""
        bad = [n for n, p in self.parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
        return bad[:3] or ["each gradient is finite, their norm is not"]
