"""The algorithm: PPO and its relatives, the KL term, and how responses are sampled for training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl_adaptor.config.base import Config, Fraction, KLEstimator, ObjectPath, PositiveInt
from verl_adaptor.errors import ConfigError


class KLConfig(Config):
    """Keeping the policy near the reference."""

    where: Literal["none", "reward", "loss"] = "none"
    """``reward``: subtracted from the token rewards. ``loss``: added to the policy loss. ``none``: no reference."""
    estimator: KLEstimator | None = None
    """k1 = log-ratio, abs = its absolute value, k2 = half its square, k3 = the low-variance one
    (http://joschu.net/blog/kl-approx.html). None: k1 in the reward, k3 in the loss, where k1's gradient is mere noise."""
    coef: Annotated[float, Field(ge=0)] = 0.001
    """Weight of the KL term; the adaptive controller starts here."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive`` steers the coefficient towards target (arXiv 1909.08593); in the reward only."""
    target: Annotated[float, Field(gt=0)] = 0.1
    """KL a token, in nats, that the adaptive controller aims at."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller corrects."""

    @property
    def chosen_estimator(self) -> KLEstimator:
        """The estimator, defaults applied."""
        return self.estimator or ("k3" if self.where == "loss" else "k1")

    @model_validator(mode="after")
    def _adaptive_in_reward(self) -> KLConfig:
        if self.controller == "adaptive" and self.where != "reward":
            raise ConfigError(
                f"controller='adaptive' works on where='reward', not {self.where!r}; use controller='fixed'."
            )
        return self


class RolloutCorrectionConfig(Config):
    """Importance weights for the gap between the policy that sampled and the one that is trained (verl's rollout correction).

    A token's weight is p_trainer / p_engine; `upper` alone truncates it, `lower` too leaves out what is beyond either.
    """

    level: Literal["none", "token", "sequence"] | None = None
    """``token``: of each token by itself, a little biased and quiet. ``sequence``: the product over the response, unbiased
    and loud. ``none``: no weights; the gap is measured all the same. None: ``token`` where ``pipeline.max_staleness`` lets
    samples be older than the policy, so that the clipped ratio is the step's own (decoupled PPO, arXiv 2505.24298), else
    ``none``."""
    upper: Annotated[float, Field(gt=0)] = 2.0
    """Weights above this count as this (truncated importance sampling, TIS)."""
    lower: Annotated[float, Field(gt=0)] | None = None
    """Set: weights below this or above upper count as 0 (masked, IcePop)."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""

    @model_validator(mode="after")
    def _a_range(self) -> RolloutCorrectionConfig:
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(f"lower={self.lower} is above upper={self.upper}; no weight would be left.")
        return self


class PPOConfig(Config):
    """The algorithm. Conventions and defaults are verl's."""

    total_steps: PositiveInt = 100
    """Rollout-and-update rounds."""
    train_batch_size: PositiveInt = 64
    """Prompts a step; samples a step are this times rollout.n."""
    mini_batch_size: PositiveInt | None = None
    """Prompts in one optimizer step; must divide train_batch_size. None: all, one optimizer step an epoch."""
    epochs: PositiveInt = 1
    """Passes over the samples of a step."""
    shuffle: bool = True
    """New order of the samples in every epoch."""
    advantage: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "remax"] = "gae"
    """gae needs a critic; grpo and rloo need rollout.n > 1; remax adds a greedy rollout a prompt."""
    gamma: Fraction = 1.0
    """Discount a token."""
    lam: Fraction = 1.0
    """GAE's lambda (arXiv 1506.02438)."""
    grpo_norm_by_std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO (arXiv 2503.20783)."""
    policy_loss: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """vanilla: PPO's clipped objective. gspo: sequence-level ratio (arXiv 2507.18071). cispo: clipped
    importance weight with a live gradient (arXiv 2506.13585)."""
    clip_ratio_low: Annotated[float, Field(ge=0)] = 0.2
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: Annotated[float, Field(ge=0)] = 0.2
    """The ratio is clipped above at 1 + this (DAPO's clip-higher uses 0.28, arXiv 2503.14476)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of tokens with a negative advantage (arXiv 1912.09729); None switches it off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the policy loss."""
    value_clip: Annotated[float, Field(gt=0)] = 0.5
    """New values stay this near to the old ones in the value loss."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which only the critic learns."""
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    missing_eos_penalty: float = 0.0
    """Added to the reward of a response that ran into max_tokens without an EOS."""
    mask_truncated: bool = False
    """Leave responses without an EOS out of the loss (DAPO's overlong filtering)."""

    @model_validator(mode="after")
    def _divides(self) -> PPOConfig:
        mini = self.mini_batch_size
        if mini is not None and self.train_batch_size % mini:
            sizes = [n for n in range(1, self.train_batch_size + 1) if self.train_batch_size % n == 0]
            raise ConfigError(
                f"mini_batch_size={mini} does not divide train_batch_size={self.train_batch_size}; allowed: {sizes}."
            )
        return self

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: what a learning-rate schedule counts."""
        return (
            self.total_steps * self.epochs * (self.train_batch_size // (self.mini_batch_size or self.train_batch_size))
        )


class RolloutConfig(Config):
    """How responses are sampled for training."""

    max_tokens: PositiveInt = 16
    """Most tokens in one response, EOS included."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in the engine and in the trainer alike (C02)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that together have this probability; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens; 0 keeps all."""
    n: PositiveInt = 1
    """Samples of each prompt: the group of GRPO and RLOO."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Longest that all rollouts of one step may take together, in seconds."""
    function: ObjectPath | None = None
    """``async def rollout(engine, prompt, params) -> Trajectory`` of your own; None is the single-turn one."""
