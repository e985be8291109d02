"""What Megatron cannot do, told before anything loads (C29). Each rule is handed a `preflight.Facts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_adaptor.backends.megatron.options import MegatronTrainerOptions
from verl_adaptor.config import TrainerConfig
from verl_adaptor.findings import Rule, rule

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""The architectures with a name mapping; `names.FAMILIES` holds it."""
_EXPERTS = ("num_local_experts", "num_experts")


@rule()
def known_architecture(facts: Any) -> Iterator[tuple[str, str]]:
    """A model whose tensors can be mapped."""
    kind = (facts.model or {}).get("model_type")
    if facts.model is not None and kind not in MODEL_TYPES:
        yield (
            f"megatron has no name mapping for model_type={kind!r}, only for {', '.join(MODEL_TYPES)}",
            "take another backend",
        )


@rule("C29")
def heads_divide(facts: Any) -> Iterator[tuple[str, str]]:
    """Each tensor-parallel rank has whole key-value heads, the same number of them."""
    heads = (facts.model or {}).get("num_key_value_heads")
    size = facts.config.parallel.tensor_parallel_size
    if heads and heads % size:
        yield (
            f"tensor_parallel_size={size} does not divide num_key_value_heads={heads} of the model, and megatron gives "
            "each rank whole ones",
            f"allowed: {_divisors(heads)}",
        )


@rule("C29")
def layers_divide(facts: Any) -> Iterator[tuple[str, str]]:
    """Each stretch of each pipeline stage has the same number of layers."""
    stages, stretches = facts.config.parallel.pipeline_parallel_size, _stretches(facts)
    if stretches > 1 and stages == 1:
        yield (
            f"virtual_pipeline_parallel_size={stretches} needs pipeline_parallel_size > 1",
            "raise it, or leave it out",
        )
    layers = (facts.model or {}).get("num_hidden_layers")
    if layers and layers % (stages * stretches):
        times = f" x virtual_pipeline_parallel_size={stretches}" if stretches > 1 else ""
        yield (
            f"pipeline_parallel_size={stages}{times} does not divide num_hidden_layers={layers} of the model",
            f"the product may be {_divisors(layers)}",
        )


@rule("C29")
def experts_fit(facts: Any) -> Iterator[tuple[str, str]]:
    """Whole experts are spread over tensor- and data-parallel ranks; tensor parallelism needs sequence parallelism then."""
    parallel, experts = facts.config.parallel, _expert_count(facts.model or {})
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if ranks % parallel.expert_parallel_size:
        yield (
            f"expert_parallel_size={parallel.expert_parallel_size} does not divide tensor_parallel_size x "
            f"data_parallel_size = {ranks}, the ranks that share the experts",
            f"allowed: {_divisors(ranks)}",
        )
    if facts.model and not experts and parallel.expert_parallel_size > 1:
        yield f"expert_parallel_size={parallel.expert_parallel_size}: the model has no experts", "leave it out"
    if experts and parallel.tensor_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"tensor_parallel_size={parallel.tensor_parallel_size} with experts needs sequence_parallel=true in Megatron",
            "set it, or use expert_parallel_size instead",
        )


@rule()
def distributed_optimizer_has_ranks(facts: Any) -> Iterator[tuple[str, str]]:
    """ZeRO-1 shares the optimizer among data-parallel ranks of a trainer that has one."""
    config = facts.config
    if isinstance(config, TrainerConfig) and config.parallel.zero_stage == 1 and not config.trainable:
        yield "zero_stage=1 with trainable=false: there is no optimizer to share", "leave zero_stage out"


RULES: Sequence[Rule] = (
    known_architecture,
    heads_divide,
    layers_divide,
    experts_fit,
    distributed_optimizer_has_ranks,
)


def _stretches(facts: Any) -> int:
    options = facts.options
    return options.virtual_pipeline_parallel_size if isinstance(options, MegatronTrainerOptions) else 1


def _expert_count(model: Mapping[str, Any]) -> int:
    return next((int(model[key]) for key in _EXPERTS if model.get(key)), 0)


def _divisors(total: int) -> str:
    return ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
