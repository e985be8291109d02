"""What the fsdp trainer refuses before torch is imported. Each rule is handed a `preflight.Facts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_adaptor.backends.fsdp.options import FSDPOptions
from verl_adaptor.findings import rule

TENSOR_PARALLEL = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` whose layers have a tensor-parallel plan."""


@rule()
def fsdp_version(facts: Any) -> Iterator[tuple[str, str]]:
    """FSDP1 is refused by name."""
    version = _options(facts).fsdp_version
    if version != 2:
        what = (
            "FSDP1 (FullyShardedDataParallel) is deprecated in PyTorch" if version == 1 else "there is no such version"
        )
        yield f"fsdp_version={version}: {what}", "leave it at 2 (fully_shard)"


@rule()
def shard_size(facts: Any) -> Iterator[tuple[str, str]]:
    """Copies are of equal size."""
    size, ranks = _options(facts).shard_size, facts.config.parallel.data_parallel_size
    if size is not None and ranks % size:
        allowed = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield f"shard_size={size} does not divide data_parallel_size={ranks}", f"allowed: {allowed}"


@rule()
def one_answer_on_resharding(facts: Any) -> Iterator[tuple[str, str]]:
    """``zero_stage`` and ``reshard_after_forward`` say the same thing, or one of them nothing."""
    stage, reshard = facts.config.parallel.zero_stage, _options(facts).reshard_after_forward
    if stage is not None and reshard is not None and reshard != (stage == 3):
        yield (
            f"zero_stage={stage} contradicts reshard_after_forward={reshard} (stage 3 reshards after forward, stage 2 "
            "does not)",
            "set one of them",
        )


@rule("C29")
def tensor_parallel(facts: Any) -> Iterator[tuple[str, str]]:
    """A plan for the architecture, and dimensions that divide (C29)."""
    size = facts.config.parallel.tensor_parallel_size
    if size > 1 and facts.model is not None:
        yield from tensor_parallel_problems(facts.model, size)


def tensor_parallel_problems(model: Mapping[str, Any], size: int) -> Iterator[tuple[str, str]]:
    """What keeps a model with this ``config.json`` from being shared by `size` ranks."""
    kind = model.get("model_type")
    if kind not in TENSOR_PARALLEL:
        yield (
            f"tensor_parallel_size={size}: no plan for model_type={kind!r}, only for {', '.join(TENSOR_PARALLEL)}",
            "use data_parallel_size instead, which shards any model",
        )
        return
    for dimension in ("num_key_value_heads", "intermediate_size", "vocab_size"):
        total = model.get(dimension)
        if total and total % size:
            cure = "pad the vocabulary (model.resize_token_embeddings) or " if dimension == "vocab_size" else ""
            yield (
                f"tensor_parallel_size={size} does not divide {dimension}={total} of the model, which fsdp splits evenly",
                f"{cure}take a size that does",
            )


def _options(facts: Any) -> FSDPOptions:
    return facts.options if isinstance(facts.options, FSDPOptions) else FSDPOptions()
