"""`HFEngine`: a transformers model of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_adaptor.backends.causal_lm import load_causal_lm, named_tensors, resolve_device, resolve_dtype
from verl_adaptor.backends.decoding.engine import DecodingEngine
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig


class HFEngine(DecodingEngine):
    """Serves any decoder-only model of transformers that keeps a plain key-value cache.

    Raises:
        ModelError: the folder cannot be loaded, or the model keeps recurrent state or no such cache.
        ConfigError: max_model_len is over what the model was made for, or the device does not exist.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        model = load_causal_lm(
            path,
            dtype=resolve_dtype(config.dtype),
            device=resolve_device(config.device),
            trust_remote_code=config.trust_remote_code,
        )
        self._tensors, tied = named_tensors(model)
        self._use(model, self._tensors, tied)

    def _begin_load(self) -> None:
        self._requeue()

    @torch.no_grad()
    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        for name, new in bucket.items():
            self._tensors[name].copy_(new)

    def _release(self) -> None:
        self._tensors = {}
        super()._release()
