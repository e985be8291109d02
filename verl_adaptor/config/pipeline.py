"""The asynchronous pipeline: how far its stages may run ahead of each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl_adaptor.config.base import Config, Fraction, PositiveInt
from verl_adaptor.errors import ConfigError


class PipelineConfig(Config):
    """Rollouts, rewards and updates at the same time."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Most policy versions between a sample's oldest token and the policy that its update starts from (eta). 0 is the
    synchronous run, sample for sample."""
    in_flight: Literal["wait", "abort", "keep"] = "keep"
    """What new weights do to running rollouts: ``wait`` finishes them first, ``abort`` ends them and goes on from the tokens
    so far under the new policy, ``keep`` goes on within the engine."""
    concurrency: PositiveInt | None = None
    """Most prompts rolled out at a time. None: as many as max_staleness lets in."""
    early_updates: bool = True
    """Let an update take fewer prompts where it would wait for them. With max_staleness=0 none does."""
    early_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of train_batch_size that an early update has at least."""

    queue_samples: PositiveInt = 4096
    """Samples that wait for their rewards; when there are as many, rollouts wait."""
    queue_bytes: PositiveInt = 1 << 30
    """And bytes."""
    queue_high: Fraction = 0.75
    """Share of these bounds above which fewer prompts are rolled out at a time."""
    queue_low: Fraction = 0.25
    """And below which more are again."""
    buffer_samples: PositiveInt = 16384
    """Scored samples that wait for an update; one more drops the oldest group."""
    buffer_bytes: PositiveInt = 4 << 30
    """And bytes."""
    buffer_high: Annotated[float, Field(gt=0)] = 0.75
    """In train batches: with so many prompts buffered updates are whole ones again."""
    buffer_low: Annotated[float, Field(ge=0)] = 0.25
    """In train batches: with so few prompts buffered, or fewer, updates take what there is."""

    reward_samples: PositiveInt = 256
    """Most samples that are scored in one call."""
    reward_calls: PositiveInt = 4
    """Calls for rewards at a time."""
    on_reward_failure: Literal["stop", "drop"] = "stop"
    """A call for rewards that fails for good stops the run, or its prompts are dropped and counted."""
    drop_silent: bool = False
    """Leave out prompts whose samples all got the same reward, and roll out others for them: they have no signal
    (dynamic sampling, arXiv 2503.14476)."""

    engines: PositiveInt = 1
    """Engines between which prompts are spread, each with the settings of `engine` and ranks of its own."""
    engine_restarts: Annotated[int, Field(ge=0)] = 1
    """How often an engine that has failed is made anew, all engines together; its rollouts begin again, on any of them."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 2400.0
    """Longest that a stage with work may make no progress, in seconds; then the run stops and tells every stack. More than
    engine.call_timeout_s."""

    @model_validator(mode="after")
    def _marks_are_apart(self) -> PipelineConfig:
        for name in ("queue", "buffer"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low >= high:
                raise ConfigError(
                    f"{name}_low={low} is not below {name}_high={high}; between the two nothing changes, which keeps it calm."
                )
        return self
