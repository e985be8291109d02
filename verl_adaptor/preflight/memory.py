"""How much memory a run takes in each of its processes, told before anything loads (C25).

Sizes follow from the model's config.json and the headers of its weights. What lasts is counted exactly (as in arXiv 1910.02054,
section 3); what a forward and backward pass keeps is counted tensor by tensor, as arXiv 2205.05198 does, for a layer of the
Llama kind: norm, attention with grouped queries, norm, gated feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from verl_adaptor.errors import ModelError
from verl_adaptor.findings import rule
from verl_adaptor.preflight.model import read_model_config

if TYPE_CHECKING:
    from verl_adaptor.capabilities import BackendSpec
    from verl_adaptor.config import EngineConfig, TrainerConfig

FLOAT, HALF = 4, 2
SPARE_COLUMNS = 64
"""Of a key-value cache, which grows in steps."""
TOLERANCE = 0.25
"""The estimate is that near to what benchmarks/memory.py measures."""


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    """Width inside the feed-forward layers; of a mixture, of all the experts that a token goes to."""
    query: int
    """Width of all query heads."""
    key_value: int
    """Width of all key heads, which is that of all value heads."""
    vocabulary: int

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return max(0, self.parameters - self.vocabulary * self.hidden) // max(1, self.layers)


def model_size(path: str | Path) -> ModelSize | None:
    """Of a Hugging Face folder; None for a hub id, or a folder without safetensors.

    Raises:
        ModelError: it is no model folder, or a file is cut off.
    """
    config = read_model_config(path)
    files = sorted(Path(path).glob("*.safetensors"))
    return None if config is None or not files else dimensions(config, sum(map(_elements, files)))


def dimensions(config: Mapping[str, Any], parameters: int = 0) -> ModelSize:
    """What a ``config.json`` says."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def first(*names: str, default: int = 0) -> int:
        return next((int(text[name]) for name in names if text.get(name) is not None), default)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head", default=1)
    width = first("head_dim", default=hidden // heads)
    inner = first("moe_intermediate_size", "intermediate_size", "n_inner", default=4 * hidden)
    return ModelSize(
        parameters=parameters,
        layers=first("num_hidden_layers", "n_layer"),
        hidden=hidden,
        intermediate=inner * first("num_experts_per_tok", default=1),
        query=heads * width,
        key_value=first("num_key_value_heads", default=heads) * width,
        vocabulary=first("vocab_size"),
    )


def _elements(file: Path) -> int:
    """Of all tensors of a file, from its header."""
    try:
        with safe_open(file, "np") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118 - no dictionary
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({error}); write the folder again.") from error


@dataclass(frozen=True)
class Step:
    """What one step of a run asks for."""

    samples: int
    """Of an optimizer step, on all ranks."""
    group: int
    """Samples that share a prompt."""
    prompt: int
    """Longest prompt, in tokens."""
    response: int
    """Longest response, in tokens."""
    decoding: int
    """Most samples that are generated at a time."""


@dataclass(frozen=True)
class Part:
    """A trainer's or an engine's memory on one rank, in bytes."""

    lasting: Mapping[str, int]
    """Held from start to end."""
    working: int
    """On top of that, while it works."""


def trainer_part(size: ModelSize, spec: BackendSpec, config: TrainerConfig, step: Step) -> Part:
    """Of one rank of a trainer."""
    parallel = config.parallel
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    data_ranks = parallel.data_parallel_size * parallel.context_parallel_size
    stage = spec.default_zero_stage if parallel.zero_stage is None else parallel.zero_stage
    held = size.parameters // model_ranks
    trained = held if config.lora_rank is None else _adapters(size, config.lora_rank) // model_ranks
    weights, gradients, averages = (
        FLOAT * count // (data_ranks if stage >= least else 1)
        for count, least in ((held, 3), (trained, 2), (2 * trained, 1))
    )
    if config.lora_rank is not None:
        weights += FLOAT * trained
    tokens, predicted = _micro_batch(config, step, data_ranks)
    logits = 0 if config.head == "value" else _compute_bytes(config) * predicted * size.vocabulary
    working = _activations(size, config, tokens) + logits * (2 if config.trainable else 1)  # and their gradient
    working //= model_ranks
    if config.dtype == "bfloat16":
        working += HALF * held  # autocast's copies, which the backward pass needs too
    if stage >= 3 and data_ranks > 1:
        working += FLOAT * (size.vocabulary * size.hidden + 2 * size.layer) // model_ranks  # whole while they compute
    if not config.trainable:
        return Part({"weights": weights}, working)
    if stage == 0 and data_ranks > 1 and parallel.gradient_sync != "manual":
        gradients *= 2  # the buckets that they are summed in
    return Part({"weights": weights, "optimizer": averages}, working + gradients)


def engine_part(size: ModelSize, config: EngineConfig, step: Step, cache: int | None = None) -> Part:
    """Of one rank of an engine.

    Args:
        size: of the model.
        config: of the engine.
        step: what is generated.
        cache: bytes that it keeps for keys and values all the time; None: as much as the running samples take.
    """
    ranks = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    width = HALF if config.dtype == "bfloat16" else FLOAT
    rows = -(-min(step.decoding, config.max_batch_size * config.replicas) // config.replicas)
    columns = step.prompt + step.response + SPARE_COLUMNS
    growing = 2 * size.layers * size.key_value * rows * columns * width // ranks
    read = min(config.max_prefill_tokens, -(-rows // step.group) * step.prompt)
    forward = read * width * (3 * size.intermediate + 4 * size.hidden + size.query + 2 * size.key_value) // ranks
    sampled = rows * size.vocabulary * (3 * FLOAT)  # logits, their log-softmax, what is drawn from
    lasting = {"weights": width * size.parameters // ranks}
    if cache is not None:
        return Part({**lasting, "key-value cache": cache}, max(forward, sampled))
    return Part(lasting, growing + max(forward, sampled))


def _micro_batch(config: TrainerConfig, step: Step, data_ranks: int) -> tuple[int, int]:
    """Tokens of one forward pass, and how many of them are predicted."""
    length = step.prompt + step.response
    rows = -(-step.samples // max(1, config.parallel.data_parallel_size))
    if config.max_tokens_per_micro_batch is not None:
        rows = min(rows, max(1, config.max_tokens_per_micro_batch // length))
    elif config.micro_batch_size is not None:
        rows = min(rows, config.micro_batch_size)
    prompts = -(-rows // step.group) if config.packing else rows
    cut = config.parallel.context_parallel_size
    return (rows * step.response + prompts * step.prompt) // cut, rows * step.response // cut


def _activations(size: ModelSize, config: TrainerConfig, tokens: int) -> int:
    """Bytes that the layers hold at the fullest moment of a forward (and backward) pass over this many tokens."""
    width = _compute_bytes(config)
    # float32 in any case: what flows past the layers, and the two norms' inputs and outputs before scaling
    residual = FLOAT * 4 * size.hidden
    # inputs of the matrices, queries, keys and values, what attention gives, and the four of the feed-forward layer
    inside = width * (3 * size.hidden + 2 * size.query + 2 * size.key_value + 4 * size.intermediate)
    one = tokens * (residual + inside)
    if not config.trainable:
        return one
    moving = tokens * width * (3 * size.intermediate + 2 * size.hidden)  # gradients on their way through one layer
    if config.activation_checkpointing:
        return tokens * FLOAT * size.hidden * size.layers + one + moving
    return one * size.layers + moving


def _compute_bytes(config: TrainerConfig) -> int:
    return HALF if config.dtype == "bfloat16" else FLOAT


def _adapters(size: ModelSize, rank: int) -> int:
    """Elements of adapters on every matrix of every layer."""
    attention = 2 * (size.hidden + size.query) + 2 * (size.hidden + size.key_value)
    return rank * size.layers * (attention + 3 * (size.hidden + size.intermediate))


@dataclass(frozen=True)
class ProcessMemory:
    """What one process takes."""

    name: str
    count: int
    """How many such processes there are."""
    parts: Mapping[str, int]
    """Name -> bytes: what lasts, and ``working``, the most that is needed at a time on top of it."""

    @property
    def total(self) -> int:
        """Bytes of one of them."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        told = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in self.parts.items() if size >= 2**20)
        many = f" ({self.count} of them)" if self.count > 1 else ""
        return f"{self.name}{many}: about {self.total / 2**20:.0f} MiB: {told}"


@rule("C25")
def enough_memory(processes: Sequence[ProcessMemory], free: int) -> Iterator[tuple[str, str]]:
    """All processes fit into what is free, even where the estimate is a quarter too high."""
    needed = sum(process.total * process.count for process in processes)
    if needed * (1 - TOLERANCE) > free:
        gib = 2**30
        told = "; ".join(map(str, processes))
        yield (
            f"about {needed / gib:.1f} GiB are needed and {free / gib:.1f} GiB are free ({told})",
            "take a smaller model, micro_batch_size or max_batch_size, activation_checkpointing, lora_rank or bfloat16, or more "
            "ranks on other machines",
        )


@rule("C25", severity="warning")
def little_memory(processes: Sequence[ProcessMemory], free: int) -> Iterator[tuple[str, str]]:
    """It may be too little."""
    needed = sum(process.total * process.count for process in processes)
    if needed * (1 - TOLERANCE) <= free < needed:
        gib = 2**30
        yield f"about {needed / gib:.1f} GiB are needed and {free / gib:.1f} GiB are free", "leave some more free"
