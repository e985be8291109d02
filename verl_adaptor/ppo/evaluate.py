"""Held-out reward: the number a run is judged by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_adaptor.config import EvaluationConfig
from verl_adaptor.ppo.reward import Reward
from verl_adaptor.ppo.rollout import Rollout, rollout_all
from verl_adaptor.protocols.engine import InferenceEngine
from verl_adaptor.samples import Prompt, SamplingParams


@dataclass(frozen=True)
class Evaluation:
    """Rewards of one response to each held-out prompt, in the prompts' order."""

    rewards: tuple[float, ...]
    samples: tuple[dict[str, Any], ...] = ()
    """Some completions for the report: prompt, response, reward."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return statistics.fmean(self.rewards)

    def state_dict(self) -> dict[str, Any]:
        """Built-ins for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Evaluation:
        """Undo `state_dict`, after a trip through JSON."""
        return cls(rewards=tuple(state["rewards"]), samples=tuple(state["samples"]))


async def evaluate(
    rollout: Rollout,
    engine: InferenceEngine,
    prompts: Sequence[Prompt],
    reward: Reward,
    params: SamplingParams,
    config: EvaluationConfig,
    *,
    seed: int,
    timeout_s: float,
) -> Evaluation:
    """One response to each prompt, always with the same seeds, so that two evaluations differ by the policy alone."""
    params = params.replace(temperature=config.temperature, top_p=1.0, top_k=0)
    trajectories = await rollout_all(rollout, engine, prompts, params, n=1, seed=seed, timeout_s=timeout_s)
    rewards = [float(sum(r) if isinstance(r, Sequence) else r) for r in await reward.score(trajectories)]
    samples = tuple(
        {"prompt": str(t.info.get("prompt_text", "")), "response": t.text, "reward": r}
        for t, r in list(zip(trajectories, rewards, strict=True))[: config.samples]
    )
    return Evaluation(rewards=tuple(rewards), samples=samples)


def gain_interval(before: Evaluation, after: Evaluation) -> tuple[float, float]:
    """95 % interval of the mean gain, prompts paired (normal approximation; exact enough from some 50 prompts on)."""
    gains = [b - a for a, b in zip(before.rewards, after.rewards, strict=True)]
    half = 1.96 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return statistics.fmean(gains) - half, statistics.fmean(gains) + half
