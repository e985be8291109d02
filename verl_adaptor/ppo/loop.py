"""The reference loop: PPO and its relatives, synchronously, top to bottom.

One step is: prompts -> rollouts -> rewards -> log-probs and values -> advantages -> updates -> weight sync. The loop is
given its objects and knows no backend. What it leaves out, on purpose: overlapping the stages (``pipeline.py`` is the
asynchronous page) and anything distributed (that is inside the trainers and the engine).

Shapes: B samples (prompts x n), T = prompt + response columns, R = response columns; see `verl_adaptor.batch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from verl_adaptor.batch import collate, denominators, spread_rewards
from verl_adaptor.config import EvaluationConfig, PPOConfig, RolloutConfig, TrackingConfig
from verl_adaptor.data import PromptSource
from verl_adaptor.ppo.advantage import compute_advantages
from verl_adaptor.ppo.checkpoints import Checkpoints
from verl_adaptor.ppo.correction import correct_rollout
from verl_adaptor.ppo.evaluate import Evaluation, evaluate
from verl_adaptor.ppo.kl import apply_kl_penalty, kl_controller
from verl_adaptor.ppo.loss import PolicyLoss, ValueLoss
from verl_adaptor.ppo.metrics import batch_metrics, check_mismatch, mean_of
from verl_adaptor.ppo.reward import Reward, Scores
from verl_adaptor.ppo.rollout import Rollout, rollout_all, sampling_params, single_turn
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.protocols.requests import mix_seed
from verl_adaptor.samples import Prompt, Trajectory
from verl_adaptor.tracking import Tracker


@dataclass(kw_only=True)
class PPO:
    """What a run is made of. `train` runs it; every part can be replaced."""

    config: PPOConfig
    rollout_config: RolloutConfig
    evaluation_config: EvaluationConfig
    tracking_config: TrackingConfig
    seed: int
    prompts: PromptSource
    held_out: Sequence[Prompt]
    engine: InferenceEngine
    actor: TrainerBackend
    critic: TrainerBackend | None
    reference: TrainerBackend | None
    reward: Reward
    tracker: Tracker
    checkpoints: Checkpoints
    pad_token_id: int = 0
    rollout: Rollout = single_turn
    new_engine: Callable[[int], InferenceEngine] | None = None
    """Makes the engine of this number, 0 the first, beside others or in place of one that has failed; None: that ends the run."""
    stop_requested: Callable[[], bool] = lambda: False
    """Asked after every step: True saves a checkpoint and raises KeyboardInterrupt."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """Step -> held-out rewards; 0 is before training."""

    def __post_init__(self) -> None:
        self.kl = kl_controller(self.config.kl)
        self.policy_loss = PolicyLoss.from_config(self.config)
        self.value_loss = ValueLoss.from_config(self.config)
        self.params = sampling_params(self.rollout_config)


async def train(run: PPO) -> None:
    """All steps that are left; resumes from the newest checkpoint where there is one."""
    step = run.checkpoints.restore(run)
    run.engine.update_weights(run.actor.export_weights())
    if step == 0:
        await evaluate_at(run, 0)
    while step < run.config.total_steps:
        metrics = await train_step(run, step)
        step += 1
        last = step == run.config.total_steps
        if last or (run.evaluation_config.every and step % run.evaluation_config.every == 0):
            metrics["eval/reward"] = await evaluate_at(run, step, last=last)
        run.tracker.log(step, metrics)
        interrupted = run.stop_requested() and not last
        if run.checkpoints.due(step, last=last) or interrupted:
            run.checkpoints.save(run, step)
        if interrupted:
            raise KeyboardInterrupt


async def train_step(run: PPO, step: int) -> dict[str, float]:
    """One round, and what is to be logged of it."""
    config, clock, baselines = run.config, Clock(), None
    with clock("rollout"):
        prompts = [next(run.prompts) for _ in range(config.train_batch_size)]
        trajectories = await rollout_all(
            run.rollout,
            run.engine,
            prompts,
            run.params,
            n=run.rollout_config.n,
            seed=mix_seed(run.seed, step),
            timeout_s=run.rollout_config.timeout_s,
        )
    with clock("reward"):
        rewards = await run.reward.score(trajectories)
    if config.advantage == "remax":
        with clock("rollout"):
            baselines = await greedy_baselines(run, prompts)
    metrics = learn(run, step, trajectories, rewards, clock, baselines)
    if step >= config.critic_warmup_steps:
        with clock("weight_sync"):
            run.engine.update_weights(run.actor.export_weights())
    return metrics | clock.metrics()


def learn(
    run: PPO,
    step: int,
    trajectories: Sequence[Trajectory],
    rewards: Scores,
    clock: Clock,
    baselines: torch.Tensor | None = None,
) -> dict[str, float]:
    """From scored samples to updated weights, which the engine has not got yet; what is to be logged of it.

    Args:
        run: whose actor, critic and reference.
        step: updates so far.
        trajectories: B samples, those of one prompt together.
        rewards: one for each, or one for each of its sampled tokens.
        clock: gets the seconds of each phase, and the tokens.
        baselines: [B] ReMax's.
    """
    config, seed = run.config, mix_seed(run.seed, step)
    batch = collate(trajectories, pad_token_id=run.pad_token_id)
    batch["token_level_scores"] = spread_rewards(rewards, batch["response_mask"])
    punish_truncated(batch, trajectories, config.missing_eos_penalty)
    if baselines is not None:
        batch["reward_baselines"] = baselines

    with clock("old_log_probs"):
        batch["old_log_probs"], entropy = run.actor.compute_log_probs(batch)
    if run.reference is not None:
        with clock("reference"):
            batch["ref_log_prob"] = run.reference.compute_log_probs(batch).log_probs
    if run.critic is not None:
        with clock("values"):
            batch["values"] = run.critic.compute_values(batch)

    kl_metrics = apply_kl_penalty(batch, run.kl, config.kl)
    compute_advantages(batch, config)
    metrics = batch_metrics(batch, trajectories, entropy) | kl_metrics
    served = run.engine.policy_version
    stale = any(t.version_runs and t.policy_version < served for t in trajectories)
    check_mismatch(metrics, run.tracking_config, stale=stale)
    metrics |= correct_rollout(batch, config.rollout_correction)
    if config.mask_truncated:
        batch["response_mask"] = batch["response_mask"] * finished(trajectories)[:, None]

    if run.critic is not None:
        with clock("update_critic"):
            updates = [run.critic.update(mini, run.value_loss) for mini in mini_batches(batch, run, seed)]
            metrics |= {f"critic/{name}": value for name, value in mean_of(updates).items()}
    if step >= config.critic_warmup_steps:
        with clock("update_actor"):
            updates = [update_actor(run, mini) for mini in mini_batches(batch, run, seed)]
            metrics = {f"actor/{name}": value for name, value in mean_of(updates).items()} | metrics
    clock.tokens += int(batch["attention_mask"].sum())
    return metrics


def mini_batches(batch: TensorDict, run: PPO, seed: int) -> Iterator[TensorDict]:
    """`epochs` passes over the rows, each in a new order, in mini-batches of mini_batch_size prompts' worth of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = (run.config.mini_batch_size or run.config.train_batch_size) * run.rollout_config.n
    for _ in range(run.config.epochs):
        order = torch.randperm(len(batch), generator=generator) if run.config.shuffle else torch.arange(len(batch))
        for chosen in order.split(rows):
            yield batch[
                chosen.sort().values
            ]  # the order within does not matter, but samples of one prompt stay together


def update_actor(run: PPO, mini: TensorDict) -> dict[str, float]:
    """One optimizer step on a mini-batch, whose rows without a signal are counted and not computed.

    Where all advantages of a row are 0 (a group whose samples all got one reward), its gradient is 0 unless the loss has
    an entropy or KL term. The denominators are those of the whole mini-batch, so the update is the same.
    """
    silent = ~mini["advantages"].any(-1)
    if run.policy_loss.moves_every_row or not silent.any():
        return run.actor.update(mini, run.policy_loss)
    heard = mini[~silent] if not silent.all() else mini[:1]
    metrics = run.actor.forward_backward(heard, run.policy_loss, denominators(mini))
    return metrics | run.actor.optimizer_step() | {"silent_fraction": float(silent.float().mean())}


def finished(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """[B] 1 where the response stopped by itself, 0 where it ran into max_tokens (C19, C27: told by the engine)."""
    return torch.tensor([float(t.finish_reason == "stop") for t in trajectories])


def punish_truncated(batch: TensorDict, trajectories: Sequence[Trajectory], penalty: float) -> None:
    """Add the missing-EOS penalty where it is due: on the last sampled token."""
    if penalty:
        due = ((1 - finished(trajectories)) * penalty).tolist()
        batch["token_level_scores"] = batch["token_level_scores"] + spread_rewards(due, batch["response_mask"])


async def greedy_baselines(run: PPO, prompts: Sequence[Prompt]) -> torch.Tensor:
    """[B] reward of the greedy response to each sample's prompt: ReMax's baseline (arXiv 2310.10505)."""
    greedy = run.params.replace(temperature=0.0, top_p=1.0, top_k=0)
    trajectories = await rollout_all(
        run.rollout, run.engine, prompts, greedy, n=1, seed=0, timeout_s=run.rollout_config.timeout_s
    )
    totals = [sum(r) if isinstance(r, Sequence) else r for r in await run.reward.score(trajectories)]
    return torch.tensor(totals, dtype=torch.float32).repeat_interleave(run.rollout_config.n)


async def evaluate_at(run: PPO, step: int, *, last: bool = False) -> float:
    """Mean held-out reward now; kept in `run.evaluations`, some completions in the tracker."""
    evaluation = await evaluate(
        run.rollout,
        run.engine,
        run.held_out,
        run.reward,
        run.params,
        run.evaluation_config,
        seed=run.seed,
        timeout_s=run.rollout_config.timeout_s,
    )
    run.evaluations[step] = evaluation
    if step == 0 or last:
        run.tracker.samples("after" if last else "before", evaluation.samples)
    return evaluation.mean


class Clock:
    """Seconds a phase, for the log."""

    def __init__(self) -> None:
        self.tokens = 0
        """That were trained on, prompts too."""
        self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of this block to a phase."""
        before = time.perf_counter()
        yield
        self._spent[phase] = self._spent.get(phase, 0.0) + time.perf_counter() - before

    def metrics(self) -> dict[str, Any]:
        """``time/<phase>`` and ``time/step`` in seconds, tokens of the step, and tokens a second over all phases."""
        total = time.perf_counter() - self._start
        spent = {f"time/{phase}": seconds for phase, seconds in self._spent.items()}
        return {"tokens": self.tokens, **spent, "time/step": total, "tokens_per_second": self.tokens / total}
