"""What the settings ask of a backend, as capabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from verl_adaptor.capabilities import Capability
from verl_adaptor.config import EngineConfig, ParallelConfig, TrainerConfig


class Request(NamedTuple):
    """One setting that not every backend can honour."""

    setting: str
    """As it was written: ``tensor_parallel_size=2``."""
    capability: Capability


def requests(config: EngineConfig | TrainerConfig) -> Iterator[Request]:
    """The settings that differ from what every backend can do.

    >>> list(requests(TrainerConfig(packing=True)))
    [Request(setting='packing=True', capability=<Capability.PACKING: 'packing'>)]
    """
    yield from _parallel(config.parallel)
    if isinstance(config, TrainerConfig):
        yield from _training(config)
    elif config.lora_rank:
        yield Request(f"lora_rank={config.lora_rank}", Capability.ADAPTER_SYNC)


def _parallel(parallel: ParallelConfig) -> Iterator[Request]:
    for strategy in ("data", "tensor", "pipeline", "context", "expert"):
        size = getattr(parallel, f"{strategy}_parallel_size")
        if size > 1:
            yield Request(f"{strategy}_parallel_size={size}", Capability(f"{strategy}_parallel"))
    if parallel.sequence_parallel:
        yield Request("sequence_parallel=True", Capability.SEQUENCE_PARALLEL)


def _training(config: TrainerConfig) -> Iterator[Request]:
    if config.head == "value":
        yield Request("head='value'", Capability.VALUE_HEAD)
    if config.dtype == "bfloat16":
        yield Request("dtype='bfloat16'", Capability.BF16)
    if config.packing:
        yield Request("packing=True", Capability.PACKING)
    if config.lora_rank:
        yield Request(f"lora_rank={config.lora_rank}", Capability.LORA)
    if config.activation_checkpointing:
        yield Request("activation_checkpointing=True", Capability.ACTIVATION_CHECKPOINTING)
    if config.max_tokens_per_micro_batch:
        yield Request(f"max_tokens_per_micro_batch={config.max_tokens_per_micro_batch}", Capability.TOKEN_BUDGET)
