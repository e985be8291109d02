"""What a step is judged by: numbers over its batch, and the alarm for an engine that serves another policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.config import TrackingConfig
from verl_adaptor.errors import EngineError
from verl_adaptor.samples import Trajectory

logger = logging.getLogger(__name__)


def batch_metrics(batch: TensorDict, trajectories: Sequence[Trajectory], entropy: Tensor) -> dict[str, float]:
    """Rewards (before any KL penalty), lengths, entropy and the trainer-engine mismatch of a step.

    The mismatch compares the trainer's log-probs with the engine's on the sampled tokens: ``mismatch/log_prob`` is the
    mean absolute difference, ``mismatch/kl`` the k3 estimate of KL(engine || trainer), both in nats a token.
    """
    mask = batch["response_mask"]
    scores = batch["token_level_scores"].sum(-1)
    gap = (batch["old_log_probs"] - batch["rollout_log_probs"])[mask > 0]
    metrics = {
        "reward/mean": scores.mean().item(),
        "reward/std": scores.std(correction=0).item(),
        "reward/min": scores.min().item(),
        "reward/max": scores.max().item(),
        "response/length_mean": mask.sum(-1).mean().item(),
        "response/truncated_fraction": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "actor/entropy": entropy[mask > 0].mean().item(),
        "mismatch/log_prob": gap.abs().mean().item(),
        "mismatch/kl": (gap.exp() - 1 - gap).mean().item(),
    }
    if "ref_log_prob" in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
        metrics["kl/reference"] = (batch["old_log_probs"] - batch["ref_log_prob"])[mask > 0].mean().item()
    if "values" in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
        returns, values = batch["returns"][mask > 0], batch["values"][mask > 0]
        unexplained = (returns - values).var(correction=0) / returns.var(correction=0).clamp(min=1e-8)
        metrics["critic/explained_variance"] = (1 - unexplained).item()
    return metrics


def check_mismatch(metrics: Mapping[str, float], config: TrackingConfig, *, stale: bool = False) -> None:
    """Warn, or stop, when engine and trainer disagree about the same tokens: stale or corrupt weights (C04, C21, C28, C34).

    Args:
        metrics: of `batch_metrics`.
        config: the thresholds.
        stale: the samples are older than the policy, which is a part of the difference: only the second threshold counts.
    """
    gap = metrics["mismatch/log_prob"]
    if not gap <= config.mismatch_stop:  # a NaN stops too
        or_else = (
            ", or the policy moves as far within pipeline.max_staleness updates: lower the learning rate or the staleness, or "
            "raise the threshold"
        )
        raise EngineError(
            f"engine and trainer differ by {gap:.3f} nats a token on their own samples, over tracking.mismatch_stop="
            f"{config.mismatch_stop}: the engine does not serve the policy that is trained (check the weight sync)"
            f"{or_else if stale else ''}."
        )
    if gap > config.mismatch_warn and not stale:
        logger.warning(
            "engine and trainer differ by %.3f nats a token, over mismatch_warn=%s", gap, config.mismatch_warn
        )


def mean_of(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step; what was skipped is counted instead."""
    names = dict.fromkeys(name for update in updates for name in update)
    means = {name: torch.tensor([u[name] for u in updates if name in u]).mean().item() for name in names}
    if "skipped" in means:
        means["skipped"] = sum(u.get("skipped", 0.0) for u in updates)
    return means
