"""What every engine and every trainer understands; a backend adds options of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl_adaptor.config.base import Config, Fraction, LossAggregation, PositiveInt
from verl_adaptor.errors import ConfigError


class ParallelConfig(Config):
    """How a model is spread over ranks: one vocabulary for all frameworks."""

    data_parallel_size: PositiveInt = 1
    """Copies of the model, each on its share of the batch."""
    tensor_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks that share the stack of layers."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share each sequence."""
    expert_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    sequence_parallel: bool = False
    """Share the activations outside the matrices too, along the sequence (needs tensor_parallel_size > 1)."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """What ZeRO shards: 1 optimizer, 2 and gradients, 3 and parameters. None leaves the backend's default."""
    gradient_sync: Literal["ddp", "manual", "zero", "fsdp"] | None = None
    """How gradients are summed over data-parallel ranks. None leaves the backend's default."""

    @property
    def world_size(self) -> int:
        """Ranks needed."""
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )


class ExecutionConfig(Config):
    """Where the ranks of a trainer or an engine run, and how long they may take."""

    executor: Literal["auto", "inline", "ray"] = "auto"
    """``inline``: this process, or the ranks that torchrun started. ``ray``: Ray actors, here or on a cluster. ``auto``:
    inline where that is enough ranks, else ray."""
    ray_address: str | None = None
    """Cluster to join, as ``ray.init(address=...)`` takes it; None: the one this process is in, else a new one here."""
    python_executable: str | None = None
    """Python of another virtual environment with verl-adaptor in it: runs the backend there, beside conflicting pins
    (needs Ray, the same version in both)."""
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that Ray reserves for a rank; a fraction lets ranks share one."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs that Ray reserves for a rank; None: 1 where the device is CUDA, else 0."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait for all ranks to start and load the model, in seconds."""
    call_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest that one call may take on all ranks, in seconds; a collective waits no longer either."""


class EngineConfig(Config):
    """What every inference engine understands."""

    replicas: PositiveInt = 1
    """Copies of the engine behind one door, each with ranks of its own; a request goes to the one with the fewest."""
    mode: Literal["sync", "async"] = "sync"
    """``sync``: in this process where it fits there; it starts fast and advances while somebody waits for it. ``async``: in
    processes of its own where the backend has them, so that it advances while this process does something else. Either
    way it has sync, async and streaming calls."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Log-probs are always computed in float32."""
    max_model_len: PositiveInt | None = None
    """Longest prompt + response, in tokens. None takes the model's own limit."""
    max_batch_size: PositiveInt = 256
    """Most sequences that decode together."""
    max_prefill_tokens: PositiveInt = 16384
    """Most prompt tokens (padding included) in one prefill forward."""
    seed: int = 0
    """Where requests without a seed of their own draw theirs from."""
    lora_rank: PositiveInt | None = None
    """Take the adapters of a trainer with this lora_rank, or a smaller one, without their base: that comes once. None: new
    weights come whole, adapters merged."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: CUDA where it exists."""
    trust_remote_code: bool = False
    """Run Python code that the model folder ships. Off, because that code can do anything."""
    parallel: ParallelConfig = ParallelConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @property
    def world_size(self) -> int:
        """Ranks needed."""
        return self.replicas * self.parallel.world_size


class TrainerConfig(Config):
    """What every trainer understands. The actor, the critic and the reference each have one."""

    head: Literal["policy", "value"] = "policy"
    """``policy``: the language-model head. ``value``: one number a token, for a critic."""
    trainable: bool = True
    """False builds no optimizer: for a reference policy."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """AdamW's step size, before the schedule."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall to min_lr_ratio over total_steps."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps from 0 to the full learning rate."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a fraction of learning_rate."""
    total_steps: PositiveInt | None = None
    """Optimizer steps of the whole run; linear and cosine need it. The command line fills it in from ppo."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's averages."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's addend to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's decoupled decay (arXiv 1711.05101)."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm here; None does not clip."""
    non_finite: Literal["skip", "raise"] = "skip"
    """A NaN or Inf gradient: skip the step and count it, or raise `NonFiniteGradient` (law T7)."""
    loss_aggregation: LossAggregation = "token-mean"
    """How per-token losses become one number over the global mini-batch."""
    loss_scale_factor: Annotated[float, Field(gt=0)] | None = None
    """Divisor of seq-mean-token-sum-norm; None takes the response length R of the batch, as verl does."""
    micro_batch_size: PositiveInt | None = None
    """Rows in one forward and backward, at least 1 (C15); None and no token budget: the whole mini-batch."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Token budget of one forward and backward; rows are balanced by length. Excludes micro_batch_size."""
    packing: bool = False
    """Lay the rows of a micro-batch end to end without padding. Changes speed and memory, not numbers."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass (non-reentrant): less memory, about a third more time."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and optimizer state stay float32."""
    seed: int = 0
    """Initialises a new value head."""
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: CUDA where it exists."""
    trust_remote_code: bool = False
    """Run Python code that the model folder ships. Off, because that code can do anything."""
    lora_rank: PositiveInt | None = None
    """Train low-rank adapters of this rank and nothing else (arXiv 2106.09685); None trains all weights."""
    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are scaled by lora_alpha / lora_rank; None takes lora_rank."""
    lora_target_modules: tuple[str, ...] | None = None
    """Names of the layers that get adapters, e.g. q_proj; None: every linear layer but the output head."""
    parallel: ParallelConfig = ParallelConfig()
    execution: ExecutionConfig = ExecutionConfig()

    @property
    def world_size(self) -> int:
        """Ranks needed."""
        return self.parallel.world_size

    @model_validator(mode="after")
    def _lora_has_a_rank(self) -> TrainerConfig:
        idle = [name for name in ("lora_alpha", "lora_target_modules") if getattr(self, name) is not None]
        if idle and self.lora_rank is None:
            raise ConfigError(f"{', '.join(idle)} without lora_rank does nothing; set lora_rank, or leave it out.")
        return self

    @model_validator(mode="after")
    def _ranks_share_no_gpu(self) -> TrainerConfig:
        gpus, ranks = self.execution.gpus_per_worker, self.parallel.world_size
        if gpus and gpus < 1 and ranks > 1:
            raise ConfigError(
                f"gpus_per_worker={gpus:g}: NCCL refuses two of {ranks} ranks on one GPU; use 1, or fewer ranks."
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_split(self) -> TrainerConfig:
        if self.micro_batch_size and self.max_tokens_per_micro_batch:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} and max_tokens_per_micro_batch="
                f"{self.max_tokens_per_micro_batch} exclude each other; set one to null."
            )
        if self.trainable and self.lr_schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"lr_schedule={self.lr_schedule!r} needs total_steps, the optimizer steps of the run.")
        return self
