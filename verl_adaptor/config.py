"""Every setting, explained where it stands and checked where it is made.

Configs are frozen, keyword-only pydantic models. A wrong value or an unknown key is `ConfigError` / `UnknownKey` in one
sentence a problem, all problems at once, each with the nearest valid name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from verl_adaptor.errors import ConfigError, UnknownKey, nearest


class Config(BaseModel):
    """Base of all configs: frozen, unknown keys refused, errors in our own words."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems, unknown = _problems(error, type(self))
            raise (UnknownKey if unknown else ConfigError)("\n".join(problems)) from None

    def replace(self, **changes: Any) -> Any:
        """A checked copy with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})


def _problems(error: ValidationError, model: type[BaseModel]) -> tuple[list[str], bool]:
    """One sentence a problem, and whether an unknown key is among them."""
    sentences: list[str] = []
    unknown = False
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        cause = problem.get("ctx", {}).get("error")
        if problem["type"] == "extra_forbidden":
            unknown = True
            sentences.append(f"{path}: unknown key; {nearest(path, model.model_fields)}.")
        elif isinstance(cause, ConfigError):  # a nested config has already put it into words
            unknown |= isinstance(cause, UnknownKey)
            sentences += [_under(path, line) for line in str(cause).splitlines()]
        elif cause is not None:
            sentences.append(_under(path, str(cause)))
        else:
            sentences.append(f"{path}={problem['input']!r} is not allowed: {problem['msg']}.")
    return sentences, unknown


def _under(path: str, sentence: str) -> str:
    """The sentence with the path of its section before it: ``ppo`` + ``epochs=0 is ...`` -> ``ppo.epochs=0 is ...``."""
    if not path:
        return sentence
    return f"{path}.{sentence}" if re.match(r"[\w.]+[=:]", sentence) else f"{path}: {sentence}"


def _module_colon_name(value: str) -> str:
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError(f"{value!r} names no Python object; write 'package.module:name'.")
    return value


ObjectPath = Annotated[str, AfterValidator(_module_colon_name)]
"""A Python object by ``package.module:name``."""

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


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


class EngineConfig(Config):
    """What every inference engine understands."""

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
    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1``, or ``auto``: CUDA where it exists."""
    trust_remote_code: bool = False
    """Run Python code that the model folder ships. Off, because that code can do anything."""
    parallel: ParallelConfig = ParallelConfig()


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
    """Rows in one forward and backward; None and no token budget: the whole mini-batch."""
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
    parallel: ParallelConfig = ParallelConfig()

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
    function: ObjectPath | None = None
    """``async def rollout(engine, prompt, params) -> Trajectory`` of your own; None is the single-turn one."""


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


class DataConfig(Config):
    """Where prompts come from. Exactly one of path, task and generator."""

    path: Path | None = None
    """A ``.jsonl`` or ``.parquet`` file, or a folder written by `datasets.save_to_disk`."""
    task: str | None = None
    """A task with its own scorer: ``digits``, ``reasoning_gym:NAME``, or ``package.module:factory``."""
    generator: ObjectPath | None = None
    """A function that returns an iterable of records."""
    args: dict[str, Any] = {}
    """Arguments of the task or the generator."""
    prompt_key: str = "prompt"
    """The record's field with the prompt: text, a list of chat messages, or token ids."""
    system_prompt: str | None = None
    """Put before a text prompt as a system message; needs a chat template."""
    chat_template: bool | None = None
    """Wrap text prompts as one user message. None: where the tokenizer has a template."""
    shuffle_buffer: Annotated[int, Field(ge=0)] = 1024
    """Records held for shuffling; 0 keeps the source's order."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens, after the chat template."""
    overlong: Literal["error", "drop"] = "error"
    """A longer prompt is an error, or dropped and counted."""
    eval_path: Path | None = None
    """Held-out records in the same format. A task brings its own."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        given = [name for name in ("path", "task", "generator") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"give exactly one of path, task and generator; given: {', '.join(given) or 'none'}.")
        return self


class RewardConfig(Config):
    """Who scores responses. All None: the task's own scorer."""

    function: ObjectPath | None = None
    """``(trajectories) -> list[float]``, sync or async; may also return one float list a trajectory (dense)."""
    model: str | None = None
    """Folder of a sequence-classification model with one label."""
    model_batch_size: PositiveInt = 16
    """Responses that the reward model scores in one forward."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardConfig:
        if self.function and self.model:
            raise ConfigError("function and model exclude each other; set one to null.")
        return self


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
    because which keys exist depends on the backend. `critic` and `reference` inherit from `trainer` what they leave out.
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
        if self.ppo.advantage in ("grpo", "rloo") and self.rollout.n < 2:
            problems.append(
                f"rollout.n={self.rollout.n}: {self.ppo.advantage} compares samples of one prompt; use n >= 2."
            )
        if problems:
            raise ConfigError("\n".join(problems))
        return self


def flatten_fields(model: type[Config], nested: Mapping[str, type[Config]]) -> dict[str, str | None]:
    """Keyword -> name of the nested config it belongs to (None: the model itself). For flat keyword arguments."""
    flat: dict[str, str | None] = {name: None for name in model.model_fields if name not in nested}
    for name, inner in nested.items():
        flat.update(dict.fromkeys(inner.model_fields, name))
    return flat
