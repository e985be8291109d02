"""What of a vllm engine's settings would fail late, said before anything loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def heads_divide(facts: Any) -> Iterator[str]:
    """Each tensor-parallel rank has the same number of attention heads."""
    heads = (facts.model or {}).get("num_attention_heads")
    size = facts.config.parallel.tensor_parallel_size
    if heads and heads % size:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"tensor_parallel_size={size} does not divide num_attention_heads={heads} of the model; allowed: {allowed}."


RULES = (heads_divide,)
