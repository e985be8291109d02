"""What the vllm engine understands beyond `EngineConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from verl_adaptor.config.base import Config, Fraction


class VLLMOptions(Config):
    """Options of the ``vllm`` engine."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory of the key-value cache, in GiB. None: on CUDA what gpu_memory_utilization leaves; on a CPU what
    max_batch_size sequences of max_model_len need, and a sixteenth of the machine's memory at most."""
    gpu_memory_utilization: Fraction = 0.9
    """Share of a GPU's memory that vLLM takes, weights and cache together. Without a GPU it does nothing."""
    prefix_caching: bool = True
    """Keep the key-value cache of prompts that may come again. It is emptied with every weight update."""
    enforce_eager: bool | None = None
    """No compilation and no CUDA graphs: a faster start, a slower decode. None: on a CPU only."""
    weight_transport: Literal["auto", "shared_memory", "disk", "nccl", "ipc"] = "auto"
    """How new weights reach workers in processes of their own. ``auto``: shared memory, and where that is too small or not on
    the workers' machine, safetensors files in weight_folder. ``nccl`` (to other GPUs) and ``ipc`` (CUDA IPC, to the same GPU)
    are vLLM's own transfers. The log says which."""
    weight_folder: str | None = None
    """Folder for those files, which all workers see. None: the one for temporary files."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More fields of vLLM's own `EngineArgs`, as they are; those that have a setting here are refused."""
