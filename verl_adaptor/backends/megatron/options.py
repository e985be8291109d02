"""What the megatron trainer understands beyond `TrainerConfig`."""

from __future__ import annotations

from verl_adaptor.config.base import Config, PositiveInt


class MegatronTrainerOptions(Config):
    """Options of the ``megatron`` trainer."""

    virtual_pipeline_parallel_size: PositiveInt = 1
    """Stretches of layers on each pipeline rank. Above 1 the schedule is interleaved (arXiv 2104.04473): a smaller
    bubble for more messages. Needs pipeline_parallel_size > 1 and divides the layers of a rank."""
