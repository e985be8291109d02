"""Losses of actor and critic: pure and picklable, one number a token; the trainer aggregates (see `protocols.trainer.Loss`).

Formulas, clamps and metrics are verl's. Padding and observation tokens may hold anything: they are set to 0 before the
first operation, so that neither a value nor a gradient comes from there. Metrics are (sum, weight) over tokens, detached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.config import KLEstimator, PPOConfig
from verl_adaptor.ppo.correction import WEIGHTS
from verl_adaptor.ppo.kl import estimate_kl
from verl_adaptor.ppo.masked import masked_mean, masked_sum, take, zero_outside
from verl_adaptor.protocols.trainer import LossOutput


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The actor's loss: a clipped objective, less an entropy bonus, plus a KL term where one is asked for.

    Reads ``log_probs`` and ``entropy`` [b, R] of the model; old_log_probs, advantages, response_mask [b, R] of the batch,
    ref_log_prob with a KL term, and rollout_is_weights where there are any: the objective is multiplied by them. The
    gradient goes through ``log_probs`` and ``entropy`` only.

    Metrics (mean over tokens): ``pg_loss``; ``clip_fraction`` and its parts ``clip_fraction_high`` (ratio above its
    range) and ``clip_fraction_low``; ``clip_fraction_dual``; ``ppo_kl`` = old - new log-prob, in nats; ``entropy`` in
    nats; ``kl_loss`` with a KL term, before its coefficient.
    """

    objective: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """See `vanilla`, `gspo`, `cispo`."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: float | None = 3.0
    """Bound of vanilla's loss for negative advantages; None switches it off. The others have none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: what is subtracted from the loss a nat."""
    kl_coef: float | None = None
    """Weight of the KL to the reference; None has no KL term and needs no ref_log_prob."""
    kl_estimator: KLEstimator = "k3"
    """Differentiated as it stands; see `estimate_kl` for what that means."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> PolicyLoss:
        """The loss that the config describes. The KL is here only with ``kl.where="loss"``."""
        return cls(
            objective=config.policy_loss,
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            entropy_coef=config.entropy_coef,
            kl_coef=config.kl.coef if config.kl.where == "loss" else None,
            kl_estimator=config.kl.chosen_estimator,
        )

    @property
    def moves_every_row(self) -> bool:
        """Whether a row has a gradient even where all its advantages are 0: through an entropy or a KL term."""
        return bool(self.entropy_coef) or self.kl_coef is not None

    def __call__(self, outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
        """Loss of each response token [b, R], and the metrics. Raises `BatchError` if a column is missing or misshapen."""
        shape = outputs["log_probs"].shape
        mask = take(batch, "response_mask", shape)
        new, entropy = zero_outside(mask, outputs["log_probs"]), zero_outside(mask, outputs["entropy"])
        old = zero_outside(mask, take(batch, "old_log_probs", shape))
        surrogate = self._surrogate(new, old, zero_outside(mask, take(batch, "advantages", shape)), mask)
        if WEIGHTS in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
            surrogate = surrogate._replace(loss=surrogate.loss * zero_outside(mask, take(batch, WEIGHTS, shape)))
        per_token = surrogate.loss
        metrics = surrogate.metrics(new, old) | {"entropy": entropy}
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * entropy
        if self.kl_coef is not None:
            reference = zero_outside(mask, take(batch, "ref_log_prob", shape))
            kl = estimate_kl(new, reference, self.kl_estimator)
            per_token = per_token + self.kl_coef * kl
            metrics["kl_loss"] = kl
        return LossOutput(per_token, _sums(metrics, mask))

    def _surrogate(self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        match self.objective:
            case "vanilla":
                return vanilla(new, old, advantages, self.clip_low, self.clip_high, self.dual_clip)
            case "gspo":
                return gspo(new, old, advantages, mask, self.clip_low, self.clip_high)
            case "cispo":
                return cispo(new, old, advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """The critic's loss: half the larger of two squared errors, of the value and of the value clipped around the old one.

    Reads ``values`` [b, R] of the model; values (the old ones), returns, response_mask [b, R] of the batch
    (arXiv 1707.06347 as in OpenAI's baselines).

    Metrics (mean over tokens): ``value_loss``, ``value_clip_fraction``, ``value_mean``, ``return_mean``.
    """

    clip: float = 0.5
    """New values count as at most this far from the old ones."""

    @classmethod
    def from_config(cls, config: PPOConfig) -> ValueLoss:
        """The loss that the config describes."""
        return cls(clip=config.value_clip)

    def __call__(self, outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
        """Loss of each response token [b, R], and the metrics. Raises `BatchError` if a column is missing or misshapen."""
        shape = outputs["values"].shape
        mask = take(batch, "response_mask", shape)
        values, old = zero_outside(mask, outputs["values"]), zero_outside(mask, take(batch, "values", shape))
        returns = zero_outside(mask, take(batch, "returns", shape))
        clipped = torch.clamp(values, old - self.clip, old + self.clip)
        error, clipped_error = (values - returns).square(), (clipped - returns).square()
        per_token = 0.5 * torch.maximum(error, clipped_error)
        metrics = {
            "value_loss": per_token,
            "value_clip_fraction": clipped_error > error,
            "value_mean": values,
            "return_mean": returns,
        }
        return LossOutput(per_token, _sums(metrics, mask))


class Surrogate(NamedTuple):
    """What a clipped objective says of each token; all [b, R]."""

    loss: Tensor
    ratio: Tensor
    """new / old probability: of the token, or of the sequence."""
    clipped: Tensor
    """bool; the clip took effect."""
    dual_clipped: Tensor
    """bool; the dual clip took effect."""

    def metrics(self, new: Tensor, old: Tensor) -> dict[str, Tensor]:
        """The objective's metrics, a number a token."""
        return {
            "pg_loss": self.loss,
            "clip_fraction": self.clipped,
            "clip_fraction_high": self.clipped & (self.ratio > 1),
            "clip_fraction_low": self.clipped & (self.ratio < 1),
            "clip_fraction_dual": self.dual_clipped,
            "ppo_kl": (old - new).clamp(-20.0, 20.0),
        }


def vanilla(
    new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """PPO: ``max(-A ratio, -A clip(ratio, 1 - low, 1 + high))`` (arXiv 1707.06347), log-ratio within ±20.

    For A < 0 the loss is at most ``-A dual_clip`` (arXiv 1912.09729): beyond, the token has no gradient.

    Args:
        new: [b, R] log-probs under the policy; the gradient goes this way.
        old: [b, R] log-probs before the step's first update.
        advantages: [b, R].
        clip_low: clip the ratio at 1 - this.
        clip_high: clip the ratio at 1 + this.
        dual_clip: see above; None switches it off.
    """
    ratio = torch.exp((new - old).clamp(-20.0, 20.0))
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    if dual_clip is None:
        return Surrogate(loss, ratio, clipped, torch.zeros_like(clipped))
    bound = -advantages * dual_clip
    dual_clipped = (advantages < 0) & (loss > bound)
    return Surrogate(torch.where(advantages < 0, torch.minimum(loss, bound), loss), ratio, clipped, dual_clipped)


def gspo(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """PPO's clip on the sequence's ratio, the geometric mean of its tokens' (arXiv 2507.18071, the token-level form).

    The ratio's value is the sequence's, its gradient at each token that token's own; log-ratio at most 10. The paper's
    objective is had with ``loss_aggregation="seq-mean-token-mean"``; another setting is honoured, and is another objective.

    Arguments as `vanilla`, and mask [b, R]: a sequence is its sampled tokens.
    """
    of_sequence = masked_mean(new - old, mask, dim=-1)
    log_ratio = new - new.detach() + of_sequence.detach()[:, None]
    ratio = torch.exp(log_ratio.clamp(max=10.0))
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    return Surrogate(loss, ratio, clipped, torch.zeros_like(clipped))


def cispo(new: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """REINFORCE with a clipped importance weight, ``-sg(clip(ratio)) A log p`` (arXiv 2506.13585).

    The weight is a constant, so that clipped tokens keep a gradient. Arguments as `vanilla`.
    """
    ratio = torch.exp((new - old).clamp(-20.0, 20.0)).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = weight != ratio
    return Surrogate(-weight * advantages * new, ratio, clipped, torch.zeros_like(clipped))


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss [b, R], and where the clip took effect."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), bounded > free


def _sums(metrics: Mapping[str, Tensor], mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(sum over the mask, tokens) of each metric, without gradient."""
    weight = (mask > 0).sum().float()
    return {name: (masked_sum(value.detach().float(), mask), weight) for name, value in metrics.items()}
