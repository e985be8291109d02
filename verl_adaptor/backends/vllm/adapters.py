"""A trainer's low-rank adapters in vLLM, alone: the base stays where it is.

Every request runs with one adapter, from the start: zeros. Each update replaces it in place, so that running requests go on
with the new one too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from verl_adaptor.errors import ConfigError, WeightUpdateError
from verl_adaptor.protocols import EngineModel
from verl_adaptor.samples import AdapterUpdate

POLICY = LoRARequest("policy", 1, "policy")
"""What a request names. It is always loaded, so that vLLM never looks for the path."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM may be told."""


class PolicyAdapters:
    """The adapter that all requests of a core run with.

    Args:
        rank: the largest that it takes.
        model: what its layers are adapted of.
        folder: where its files lie for the moment of an update; None: with the temporary files.
    """

    def __init__(self, rank: int, model: EngineModel, folder: str | None) -> None:
        self._rank = rank
        self._shapes = {
            name.removesuffix(".weight"): shape
            for name, shape in model.tensors.items()
            if name.endswith(".weight") and len(shape) == 2 and shape[0] != model.vocab_size and ".experts." not in name
        }
        self._folder = folder
        self._written: tempfile.TemporaryDirectory[str] | None = None
        self.base: tuple[str, int] | None = None
        """The source of the base that the core has, where a trainer has sent it."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of vLLM's `EngineArgs`. Raises `ConfigError` for a rank that vLLM does not have."""
        fits = [rank for rank in _RANKS if rank >= self._rank]
        if not fits:
            raise ConfigError(f"lora_rank={self._rank} is over {_RANKS[-1]}, the largest of vLLM.")
        return {
            "enable_lora": True,
            "max_lora_rank": fits[0],
            "max_loras": 1,
            "max_cpu_loras": 1,
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._shapes}),
        }

    def check(self, update: AdapterUpdate) -> None:
        """Raise `WeightUpdateError` for adapters that do not fit; nothing is written."""
        if update.rank > self._rank:
            raise WeightUpdateError(
                f"the trainer's lora_rank={update.rank} is over the engine's lora_rank={self._rank}; nothing was written. Make "
                "the engine with the trainer's."
            )
        brought = {meta.name: tuple(meta.shape) for meta in update.weights.tensors}
        for layer in update.layers:
            if layer not in self._shapes:
                raise WeightUpdateError(
                    f"{layer} has an adapter, which vLLM takes merged only; nothing was written. Leave the engine's lora_rank "
                    "out, or this layer out of lora_target_modules."
                )
            out, into = self._shapes[layer]
            wanted = {f"{layer}.lora_A.weight": (update.rank, into), f"{layer}.lora_B.weight": (out, update.rank)}
            for name, shape in wanted.items():
                if brought.get(name) != shape:
                    raise WeightUpdateError(
                        f"{name} is {brought.get(name)} instead of {shape}; nothing was written. Load engine and trainer from "
                        "the same model."
                    )

    def clear(self, core: Any) -> None:
        """The base alone."""
        layer, (out, into) = next(iter(self._shapes.items()))
        zeros = {f"{layer}.lora_A.weight": torch.zeros(1, into), f"{layer}.lora_B.weight": torch.zeros(out, 1)}
        self._write(zeros, rank=1, alpha=1.0, layers=[layer])
        self.load(core)

    def bring(self, update: AdapterUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Have them where the workers find them; requests run with the ones before.

        Raises:
            WeightUpdateError: their files cannot be written.
        """
        try:
            self._write(tensors, rank=update.rank, alpha=update.alpha, layers=update.layers)
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(
                f"adapters cannot be written ({error}) and nothing was changed; set weight_folder to a folder with room."
            ) from error

    def load(self, core: Any) -> None:
        """Requests run with what was written, on all workers."""
        assert self._written is not None  # by `clear` or `bring`
        with self._written as folder:
            core.call("adaptor_load_adapters", folder)
        self._written = None

    def _write(self, tensors: Mapping[str, Tensor], *, rank: int, alpha: float, layers: Iterable[str]) -> None:
        targets = sorted({layer.rpartition(".")[2] for layer in layers})
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
        self._written = tempfile.TemporaryDirectory(prefix="verl-adaptor-adapters-", dir=self._folder)
        folder = Path(self._written.name)
        save_file(
            {f"base_model.model.{part}": tensor.contiguous() for part, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
        )
        (folder / "adapter_config.json").write_text(json.dumps(config))
