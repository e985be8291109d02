"""Keeping the policy near the reference: estimators of KL(policy || reference), its coefficient, and the reward penalty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.config import KLConfig, KLEstimator
from verl_adaptor.errors import CheckpointError
from verl_adaptor.ppo.masked import masked_mean, take, zero_outside


def estimate_kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) of each token, estimated from the token sampled (http://joschu.net/blog/kl-approx.html).

    With ``x = log_probs - ref_log_probs``: k1 = x; abs = |x|; k2 = x² / 2; k3 = exp(-x) - 1 + x. k3 takes x within ±20 and
    its own value within ±10, against overflow; where it is clamped it has no gradient.

    As a loss on the policy's own samples the gradient is, on average: of k1 zero, so that it only adds noise; of k2 that
    of KL(policy || reference); of k3 that of KL(reference || policy), which also pulls towards the reference.

    Args:
        log_probs: the policy's, any shape, nats. The gradient goes this way.
        ref_log_probs: the reference policy's, same shape.
        estimator: ``k1``, ``abs``, ``k2`` or ``k3``.
    """
    log_ratio = log_probs - ref_log_probs
    match estimator:
        case "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            log_ratio = log_ratio.clamp(-20.0, 20.0)
            return (torch.exp(-log_ratio) - 1 + log_ratio).clamp(-10.0, 10.0)


@dataclass
class FixedKLController:
    """A coefficient that stays as it is configured; nothing of it needs saving."""

    value: float
    """Weight of the KL term."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        """Empty: on resume the config's coefficient holds."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Raises `CheckpointError` for the state of an adaptive controller."""
        if state:
            raise CheckpointError(
                f"the checkpoint holds an adaptive KL controller ({dict(state)}), the config a fixed one; resume with "
                "kl.controller='adaptive', or start a new run."
            )


@dataclass
class AdaptiveKLController:
    """A coefficient that grows while the KL is above its target and shrinks below (arXiv 1909.08593)."""

    value: float
    """Weight of the KL term now."""
    target: float
    """KL a token, in nats, to aim at."""
    horizon: int
    """Samples over which a relative error of 1 would double the coefficient, if the error were not clipped at 0.2."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Correct after a batch of `n_steps` samples whose mean KL a token was `current_kl`."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient; target and horizon are the config's."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Raises `CheckpointError` for the state of a fixed controller."""
        if set(state) != {"value"}:
            raise CheckpointError(
                f"the checkpoint holds no adaptive KL controller (its state is {dict(state)}); resume with "
                "kl.controller='fixed', or start a new run."
            )
        self.value = float(state["value"])


KLController = FixedKLController | AdaptiveKLController


def kl_controller(config: KLConfig) -> KLController:
    """The controller that the config asks for, at its starting coefficient."""
    if config.controller == "adaptive":
        return AdaptiveKLController(config.coef, config.target, config.horizon)
    return FixedKLController(config.coef)


@torch.no_grad()
def apply_kl_penalty(batch: TensorDict, controller: KLController, config: KLConfig) -> dict[str, float]:
    """Set ``token_level_rewards`` [B, R]: the token_level_scores, less the KL penalty with ``where="reward"``.

    The controller is updated after its coefficient was used, as verl does, with the mean over the responses of each one's
    mean KL a token. Rows without sampled tokens count neither there nor as samples.

    Args:
        batch: needs token_level_scores, response_mask [B, R]; with a penalty also old_log_probs and ref_log_prob [B, R].
        controller: has the coefficient.
        config: whether there is a penalty, and by which estimator.

    Returns:
        ``actor/reward_kl`` in nats a token and ``actor/reward_kl_coef``; nothing without a penalty.

    Raises:
        BatchError: one of these is missing or misshapen.
    """
    mask = take(batch, "response_mask")
    batch["token_level_rewards"] = zero_outside(mask, take(batch, "token_level_scores", mask.shape))
    if config.where != "reward":
        return {}
    log_probs, reference = take(batch, "old_log_probs", mask.shape), take(batch, "ref_log_prob", mask.shape)
    kl = zero_outside(mask, estimate_kl(log_probs, reference, config.chosen_estimator))
    coef = controller.value
    batch["token_level_rewards"] = batch["token_level_rewards"] - coef * kl
    sampled = (mask > 0).any(-1)
    current = masked_mean(masked_mean(kl, mask, dim=-1), sampled).item()
    controller.update(current, n_steps=int(sampled.sum()))
    return {"actor/reward_kl": current, "actor/reward_kl_coef": coef}
