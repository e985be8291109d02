"""Parallel sizes against the model's dimensions (C29)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from verl_adaptor.findings import rule

if TYPE_CHECKING:
    from verl_adaptor.config import ParallelConfig
    from verl_adaptor.preflight import Facts

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What the configs of mixture-of-experts models call their number of experts."""


@rule()
def sequence_parallel_has_ranks(facts: Facts) -> Iterator[tuple[str, str]]:
    """Sequence parallelism shares activations among the tensor-parallel ranks, so there must be some."""
    parallel = facts.config.parallel
    if parallel.sequence_parallel and parallel.tensor_parallel_size == 1:
        yield "sequence_parallel=True needs tensor_parallel_size > 1", "raise it, or leave sequence_parallel off"


@rule("C29")
def parallel_size_divides(facts: Facts) -> Iterator[tuple[str, str]]:
    """The model's dimensions spread evenly over ranks."""
    if facts.model:
        yield from divisible(facts.model, facts.config.parallel)


def divisible(model: Mapping[str, Any], parallel: ParallelConfig) -> Iterator[tuple[str, str]]:
    """Heads, key-value heads, layers and experts must spread evenly over their ranks.

    Context-parallel ranks share a sequence by dealing out the heads in attention (DeepSpeed-Ulysses, arXiv 2309.14509).
    Frameworks pad the vocabulary to fit, and copy key-value heads where there are fewer of them than ranks: so those two
    are no problem in general, and a framework that differs has a rule of its own.

    >>> from verl_adaptor.config import ParallelConfig
    >>> list(divisible({"num_attention_heads": 9}, ParallelConfig(tensor_parallel_size=2)))
    [('tensor_parallel_size=2 does not divide num_attention_heads=9 of the model', 'allowed: 1, 3, 9')]
    """
    text = model.get("text_config") or model
    tensor, heads = parallel.tensor_parallel_size, text.get("num_attention_heads")
    if heads and heads % tensor:
        yield _problem("tensor_parallel_size", tensor, "num_attention_heads", heads)
    context = parallel.context_parallel_size
    if heads and heads % tensor == 0 and heads // tensor % context:
        dealt = "num_attention_heads" + (" / tensor_parallel_size" if tensor > 1 else "")
        yield _problem("context_parallel_size", context, dealt, heads // tensor)
    kv_heads = text.get("num_key_value_heads")
    if kv_heads and kv_heads % tensor and tensor % kv_heads:
        fact, cure = _problem("tensor_parallel_size", tensor, "num_key_value_heads", kv_heads)
        yield fact, f"{cure}, or a multiple of {kv_heads}"
    layers = text.get("num_hidden_layers")
    if layers and parallel.pipeline_parallel_size > layers:
        yield (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is more than the model's num_hidden_layers={layers}",
            f"use at most {layers}",
        )
    experts = next((text[key] for key in _EXPERTS if text.get(key)), 1)
    if experts % parallel.expert_parallel_size:
        yield _problem("expert_parallel_size", parallel.expert_parallel_size, "number of experts", experts)


def _problem(size: str, value: int, dimension: str, total: int) -> tuple[str, str]:
    allowed = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
    return f"{size}={value} does not divide {dimension}={total} of the model", f"allowed: {allowed}"
