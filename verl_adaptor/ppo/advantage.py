"""Advantage estimators: token rewards -> advantages and returns, all [B, R] float32, no gradient.

Conventions are verl's. A response ends after its last sampled token, EOS or not: beyond it the value is 0 (C19).
Observation tokens, where `response_mask` is 0 inside a response, are stepped over as if they were not there: they neither
earn nor block (C26). Padding may hold anything; results are 0 wherever the mask is 0.

A worked example, gamma = lam = 1 and no critic: tokens ``a b [tool's answer] c EOS`` with reward 1 at EOS have the returns
``1 1 0 0 1 1``: the answer's tokens get 0, and the reward reaches what was sampled before them whole.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.config import PPOConfig
from verl_adaptor.ppo.masked import masked_mean, masked_sum, masked_whiten, take

__all__ = ["compute_advantages", "gae", "grpo", "masked_mean", "masked_whiten", "reinforce_plus_plus", "remax", "rloo"]


def compute_advantages(batch: TensorDict, config: PPOConfig) -> TensorDict:
    """Set ``advantages`` and ``returns`` [B, R] in the batch, by ``config.advantage``. Returns the same batch.

    Args:
        batch: needs token_level_rewards and response_mask [B, R]; gae also values [B, R], grpo and rloo group_ids [B],
            remax reward_baselines [B].
        config: names the estimator and its settings.

    Raises:
        BatchError: one of these is missing or misshapen.
    """
    mask = take(batch, "response_mask")
    shape = mask.shape
    rewards = take(batch, "token_level_rewards", shape)
    match config.advantage:
        case "gae":
            result = gae(rewards, take(batch, "values", shape), mask, config.gamma, config.lam)
        case "grpo":
            result = grpo(rewards, mask, take(batch, "group_ids", shape[:1]), config.grpo_norm_by_std)
        case "rloo":
            result = rloo(rewards, mask, take(batch, "group_ids", shape[:1]))
        case "reinforce_plus_plus":
            result = reinforce_plus_plus(rewards, mask, config.gamma)
        case "remax":
            result = remax(rewards, take(batch, "reward_baselines", shape[:1]), mask)
    batch["advantages"], batch["returns"] = result
    return batch


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized Advantage Estimation (arXiv 1506.02438), advantages whitened over the mask.

    Over the sampled tokens t of a response: ``delta_t = r_t + gamma V_{t+1} - V_t`` and
    ``A_t = delta_t + gamma lam A_{t+1}``; the return, the critic's target, is ``A_t + V_t`` before whitening.

    Args:
        token_level_rewards: [B, R].
        values: [B, R] the critic's value of the state before each token.
        response_mask: [B, R]; 1 at sampled tokens.
        gamma: discount a token.
        lam: 0 is one-step TD, 1 is Monte Carlo.
    """
    advantages = _gae(token_level_rewards, values, response_mask, gamma, lam)
    returns = torch.where(response_mask > 0, advantages + values, 0.0)
    return masked_whiten(advantages, response_mask), returns


@torch.no_grad()
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """A response's score against its group's: (score - mean) / (std + 1e-6) on each of its tokens (arXiv 2402.03300).

    Args:
        token_level_rewards: [B, R]; a response's score is their sum over the mask.
        response_mask: [B, R]. A row without sampled tokens has no score and takes no part in its group.
        group_ids: [B] int64; equal for the samples of one prompt. A group of one has mean 0 and std 1.
        norm_by_std: False leaves the division out (Dr. GRPO, arXiv 2503.20783).

    Returns:
        The advantages twice: without a critic they are the returns too.
    """
    scores, mean, std, _ = _groups(token_level_rewards, response_mask, group_ids)
    advantages = (scores - mean) / (std + 1e-6) if norm_by_std else scores - mean
    return _on_tokens(advantages, response_mask, token_level_rewards)


@torch.no_grad()
def rloo(token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A response's score less the mean of the others of its group (arXiv 2402.14740). Arguments as `grpo`.

    Written as n / (n - 1) (score - mean of all n), which is the same; alone in its group a score stays as it is.
    """
    scores, mean, _, count = _groups(token_level_rewards, response_mask, group_ids)
    return _on_tokens((scores - mean) * count / (count - 1).clamp(min=1), response_mask, token_level_rewards)


@torch.no_grad()
def reinforce_plus_plus(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted sum of the rewards from each token on, whitened over the whole batch (arXiv 2501.03262)."""
    returns = _gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, gamma, lam=1.0)
    return masked_whiten(returns, response_mask), returns


@torch.no_grad()
def remax(token_level_rewards: Tensor, baselines: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the rewards from each token on, less the greedy response's reward (arXiv 2310.10505).

    Args:
        token_level_rewards: [B, R].
        baselines: [B] reward of the greedy response to the row's prompt.
        response_mask: [B, R].
    """
    returns = _gae(token_level_rewards, torch.zeros_like(token_level_rewards), response_mask, gamma=1.0, lam=1.0)
    return torch.where(response_mask > 0, returns - baselines[:, None], 0.0), returns


def _gae(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> Tensor:
    """[B, R] advantages before whitening, 0 outside the mask."""
    mask = response_mask > 0
    next_value = running = rewards.new_zeros(len(rewards))
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = running
    return torch.where(mask, advantages, 0.0)


def _groups(rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row [B] float64: score, and its group's mean, unbiased std and size.

    float64, because in float32 the mean of equal scores can miss them by a rounding error, which the division by a std of
    the same size would blow up into an advantage.
    """
    scores = masked_sum(rewards.double(), response_mask, dim=-1)
    scored = (response_mask > 0).any(-1).double()
    _, group = group_ids.unique(return_inverse=True)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(len(x)).index_add(0, group, x)[group]

    count = total(scored)
    mean = torch.where(count > 1, total(scores) / count.clamp(min=1), 0.0)
    squares = total(scored * (scores - mean).square())
    std = torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), 1.0)
    return scores, mean, std, count


def _on_tokens(advantages: Tensor, response_mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """[B] -> [B, R]: each response's advantage on its sampled tokens, 0 elsewhere; as advantages and as returns."""
    spread = torch.where(response_mask > 0, advantages.to(like.dtype)[:, None], 0.0)
    return spread, spread.clone()
