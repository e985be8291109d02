"""A whole run: the sections of a recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_adaptor.config.base import (
    LONGEST_PAUSE_S,
    BackoffSeconds,
    Config,
    HttpUrl,
    ObjectPath,
    PositiveInt,
    Retries,
    refuse_idle,
)
from verl_adaptor.config.data import DataConfig
from verl_adaptor.config.pipeline import PipelineConfig
from verl_adaptor.config.ppo import PPOConfig, RolloutConfig
from verl_adaptor.errors import ConfigError


class ModelConfig(Config):
    """Which model to train."""

    path: str | None = None
    """A Hugging Face model folder (or hub id) with tokenizer."""
    build: ObjectPath | None = None
    """A function ``(folder, seed, **build_args) -> dict`` that makes such a folder on the spot; excludes path."""
    build_args: dict[str, Any] = {}
    """Keyword arguments of the build function."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.build is None):
            raise ConfigError("give exactly one of path (a model folder) and build (a function that makes one).")
        return self


TRAINERS_OWN = "trainer"
"""In place of an engine's backend: the actor's `rollout_engine`."""


class RewardConfig(Config):
    """Who scores responses: at most one of function, model and url. All None: the task's own scorer."""

    function: ObjectPath | None = None
    """``(trajectories) -> list[float]``, sync or async; may also return one float list a trajectory (dense)."""
    model: str | None = None
    """Folder of a sequence-classification model with one label."""
    model_batch_size: PositiveInt = 16
    """Responses that the reward model scores in one forward."""
    url: HttpUrl | None = None
    """Address of a reward service, which is sent samples as JSON: ``http://host:port/path``. See docs/rewards.md."""
    batch_size: PositiveInt = 16
    """Samples in one request to the service."""
    concurrency: PositiveInt = 8
    """Most requests that the service has at a time."""
    retries: Retries = 5
    """How often a request is repeated that found no service, no answer in time, or no answer that can be read."""
    backoff_s: BackoffSeconds = 1.0
    """Longest pause before the first repetition, in seconds. It doubles with each one, up to 60; the pause is drawn
    between 0 and that, and what the service asks for with Retry-After comes on top (60 at most, together)."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait for an answer, in seconds: of the function or the model for the samples of one step, of the service for
    one request, its connection included. Repetitions have each their own."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardConfig:
        given = [name for name in ("function", "model", "url") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; keep one, set the rest to null.")
        return self

    @model_validator(mode="after")
    def _all_read(self) -> RewardConfig:
        url = dict.fromkeys(("batch_size", "concurrency", "retries", "backoff_s"), ("reward.url", self.url is not None))
        refuse_idle(self, {"model_batch_size": ("reward.model", self.model is not None), **url})
        return self

    def longest_s(self, samples: int) -> float:
        """Longest that scoring this many samples may take, in seconds, pauses and repetitions included."""
        if self.url is None:
            return self.timeout_s
        rounds = math.ceil(math.ceil(samples / self.batch_size) / self.concurrency)
        return rounds * ((self.retries + 1) * self.timeout_s + self.retries * LONGEST_PAUSE_S)


class EvaluationConfig(Config):
    """Held-out prompts, before and after training and in between."""

    prompts: PositiveInt = 200
    """Held-out prompts."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: before and after only."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 is greedy."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Completions kept for the report, before and after."""


class CheckpointConfig(Config):
    """When to save, and how much to keep."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0: only at the end and when interrupted."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""


class TrackingConfig(Config):
    """Where metrics go besides ``metrics.jsonl``, which is always written."""

    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Any of tensorboard, wandb and mlflow."""
    project: str = "verl-adaptor"
    """Project or experiment name of the sinks that have one."""
    report: bool = True
    """Write ``report.html`` at the end."""
    mismatch_warn: Annotated[float, Field(gt=0)] = 0.05
    """Warn above this mean |log p_trainer - log p_engine| a token, in nats."""
    mismatch_stop: Annotated[float, Field(gt=0)] = 1.0
    """Stop above this: the engine does not serve the policy that is trained (C04, C34)."""


class Recipe(Config):
    """A whole run: what ``verl-adaptor train`` reads from YAML.

    `engine`, `trainer`, `critic` and `reference` hold ``backend`` and that backend's settings; the factory checks them,
    because which keys exist depends on the backend. An engine whose backend is ``trainer`` is the actor's own
    `rollout_engine`; its other settings are those that this takes. `critic` and `reference` inherit from `trainer` what they
    leave out.
    """

    seed: int = 0
    """Of everything: model building, data order, sampling, mini-batches."""
    threads: PositiveInt | None = None
    """CPU threads of torch; None leaves its default. Small models are fastest with 1: threads that wait for each
    other cost more than they share."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    engine: dict[str, Any] = {"backend": "hf"}
    trainer: dict[str, Any] = {"backend": "hf"}
    critic: dict[str, Any] | None = None
    reference: dict[str, Any] = {}
    reward: RewardConfig = RewardConfig()
    ppo: PPOConfig = PPOConfig()
    pipeline: PipelineConfig | None = None
    """Set: rollouts, rewards and updates run at the same time. None: one after the other."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        problems = []
        if self.ppo.advantage == "gae" and self.critic is None:
            problems.append("ppo.advantage: 'gae' needs a critic section; write 'critic: {}' to take the trainer's.")
        if self.ppo.advantage != "gae" and self.critic is not None:
            problems.append(f"critic: ppo.advantage={self.ppo.advantage!r} uses no critic; delete the section.")
        if self.critic is None and self.ppo.critic_warmup_steps:
            problems.append(f"ppo.critic_warmup_steps={self.ppo.critic_warmup_steps}: there is no critic to warm up.")
        if self.ppo.kl.where == "none" and self.reference:
            problems.append(f"reference: ppo.kl.where='none' uses no reference; delete {', '.join(self.reference)}.")
        for section, settings in (("trainer", self.trainer), ("critic", self.critic), ("reference", self.reference)):
            fixed = sorted({"head", "trainable"} & (settings or {}).keys())
            problems += [f"{section}.{key}: the section decides it; delete the key." for key in fixed]
        if self.ppo.advantage in ("grpo", "rloo") and self.rollout.n < 2:
            problems.append(
                f"rollout.n={self.rollout.n}: {self.ppo.advantage} compares samples of one prompt; use n >= 2."
            )
        problems += self._pipeline_problems()
        if problems:
            raise ConfigError("\n".join(problems))
        return self

    def _pipeline_problems(self) -> Iterator[str]:
        """What would stand still, or cannot happen at the same time."""
        pipeline = self.pipeline
        if pipeline is None:
            return
        n = self.rollout.n
        samples = (pipeline.max_staleness + 1) * self.ppo.train_batch_size * n
        if pipeline.buffer_samples < samples:
            yield (
                f"pipeline.buffer_samples={pipeline.buffer_samples} does not hold the {samples} samples that max_staleness="
                f"{pipeline.max_staleness} lets in; raise it."
            )
        if pipeline.queue_samples < n:
            yield f"pipeline.queue_samples={pipeline.queue_samples} does not hold the {n} samples of one prompt; raise it."
        if pipeline.drop_silent and n < 2:
            yield f"pipeline.drop_silent: with rollout.n={n} no sample differs from another of its prompt; use n >= 2."
        if self.ppo.advantage == "remax":
            yield "pipeline: the greedy rollouts of ppo.advantage='remax' belong to one step; use another advantage."
        if self.engine.get("backend") == TRAINERS_OWN:
            yield (
                "pipeline: with engine.backend='trainer' rollouts and updates share the same ranks and cannot overlap; name an "
                "engine of its own, or delete the section."
            )
