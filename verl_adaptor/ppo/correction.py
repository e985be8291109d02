"""Importance weights for samples of another policy than the one that is trained.

The engine samples from its own rounding of the weights, or from weights of some updates ago. The weight
p_trainer / p_engine of what was sampled makes up for it; its tail is cut, or left out, because a few huge ones would
carry the whole update. Conventions and numbers are verl's rollout correction.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.config import RolloutCorrectionConfig
from verl_adaptor.ppo.masked import masked_mean, masked_sum, zero_outside

WEIGHTS = "rollout_is_weights"
"""[B, R] in the batch; a policy loss multiplies its objective by it."""
_BOUND = 20.0
"""Log-ratios beyond this count as this: exp must not overflow."""


def importance_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Weights and raw ratios, both [B, R] and 0 outside the mask, without gradient.

    Args:
        trainer: [B, R] log-probs of the policy before this step's updates.
        engine: [B, R] log-probs of the policy that sampled.
        mask: [B, R] 1 for sampled tokens.
        config: token or sequence, truncated (TIS, https://fengyao.notion.site/off-policy-rl) or masked (IcePop,
            https://ringtech.notion.site/icepop).
    """
    log_ratio = zero_outside(mask, trainer - engine)
    if config.level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1)[:, None].expand_as(mask)
    raw = log_ratio.clamp(-_BOUND, _BOUND).exp() * mask
    if config.lower is None:
        weights = raw.clamp(max=config.upper)
    else:
        weights = torch.where((raw >= config.lower) & (raw <= config.upper), raw, 0.0)
    if config.normalize:
        mean = _mean(weights, mask, config)
        weights = weights / mean if mean > 1e-8 else weights
    return weights, raw


def correct_rollout(batch: TensorDict, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Put the weights into the batch, where they are asked for; the metrics.

    ``mismatch/is_mean`` of the weights as applied, ``is_max`` of the raw ratios, ``is_outside``: the fraction of tokens
    whose ratio was cut or left out, ``is_ess``: effective sample size of the weights, as a fraction.
    """
    if config.level in (None, "none"):
        return {}
    mask = batch["response_mask"]
    weights, raw = importance_weights(batch["old_log_probs"], batch["rollout_log_probs"], mask, config)
    batch[WEIGHTS] = weights
    outside = raw > config.upper if config.lower is None else (raw > config.upper) | (raw < config.lower)
    mean, square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    return {
        "mismatch/is_mean": mean.item(),
        "mismatch/is_max": raw.max().item(),
        "mismatch/is_outside": masked_mean(outside.float(), mask).item(),
        "mismatch/is_ess": (mean.square() / square.clamp(min=1e-8)).item(),
    }


def _mean(weights: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """Over tokens, or over sequences, which count alike whatever their length."""
    if config.level == "token":
        return masked_mean(weights, mask)
    has_tokens = mask.sum(-1) > 0
    return masked_mean(weights, mask, dim=-1)[has_tokens].mean()
