"""Settings of the ``zero`` backend alone."""

from __future__ import annotations

from typing import Literal

from verl_adaptor.config import Config, TrainerConfig
from verl_adaptor.config.base import PositiveInt

DEFAULT_STAGE = 3
"""`zero_stage` where the config leaves it open: the one that saves most."""


class ZeroOptions(Config):
    """What DeepSpeed offers beyond the common vocabulary; `zero_stage` itself is a common setting, 3 by default here."""

    offload_optimizer: Literal["none", "cpu"] = "none"
    """``cpu`` keeps master weights and AdamW's averages in host memory, where torch's fused AdamW steps (stages 1 to 3)."""
    offload_parameters: Literal["none", "cpu"] = "none"
    """``cpu`` keeps the sharded weights in host memory between uses (stage 3)."""
    reduce_bucket_size: PositiveInt = 50_000_000
    """Gradient elements summed over ranks in one collective; fewer save memory and cost speed."""
    gather_bucket_size: PositiveInt = 50_000_000
    """Weight elements gathered in one collective after a step (stages 1 and 2)."""
    prefetch_bucket_size: PositiveInt = 50_000_000
    """Weight elements gathered ahead of their use (stage 3)."""
    persistence_threshold: PositiveInt = 100_000
    """Weights with fewer elements stay whole on every rank: gathering them would cost more than it saves (stage 3)."""


def zero_stage(config: TrainerConfig) -> int:
    """The stage in force."""
    stage = config.parallel.zero_stage
    return DEFAULT_STAGE if stage is None else stage
