"""Options of the fsdp trainer beyond the common ones."""

from __future__ import annotations

from verl_adaptor.config.base import Config, PositiveInt


class FSDPOptions(Config):
    """How FSDP2 shards, and what it keeps whole."""

    fsdp_version: int = 2
    """2, PyTorch's ``fully_shard``. FSDP1 (``FullyShardedDataParallel``) is deprecated there and refused here."""
    reshard_after_forward: bool | None = None
    """Free a layer's whole weights between its forward and its backward pass: less memory, one more all-gather. None:
    yes, unless zero_stage=2 asks for the other."""
    shard_size: PositiveInt | None = None
    """Data-parallel ranks that share one copy of the model; the others replicate it (HSDP). None: all share one copy."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory, and step there."""
    sync_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch instead of once: more traffic, but no whole gradient stays in memory."""
