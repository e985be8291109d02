"""Every setting, explained where it stands and checked where it is made.

Configs are frozen, keyword-only pydantic models. A wrong value or an unknown key is `ConfigError` / `UnknownKey` in one
sentence a problem, all problems at once, each with the nearest valid name.
"""

from verl_adaptor.config.backends import EngineConfig, ExecutionConfig, ParallelConfig, TrainerConfig
from verl_adaptor.config.base import Config, KLEstimator, LossAggregation, ObjectPath, flatten_fields
from verl_adaptor.config.data import DataConfig
from verl_adaptor.config.pipeline import PipelineConfig
from verl_adaptor.config.ppo import KLConfig, PPOConfig, RolloutConfig, RolloutCorrectionConfig
from verl_adaptor.config.recipe import (
    CheckpointConfig,
    EvaluationConfig,
    ModelConfig,
    Recipe,
    RewardConfig,
    TrackingConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExecutionConfig",
    "KLConfig",
    "KLEstimator",
    "LossAggregation",
    "ModelConfig",
    "ObjectPath",
    "PPOConfig",
    "ParallelConfig",
    "PipelineConfig",
    "Recipe",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "TrackingConfig",
    "TrainerConfig",
    "flatten_fields",
]
