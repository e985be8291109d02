"""Shared memory as one of vLLM's own weight transfers, for those who drive vLLM themselves (`vllm serve`, `LLM`).

`VLLMEngine` sends the same bytes to the same loader, but calls it directly: vLLM's calls answer nothing, so they cannot
bring back the digests of what has arrived, and there is no call for tensors of the same process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from typing_extensions import override
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferEngine
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

from verl_adaptor.backends.export import BUCKET_BYTES, bucketed
from verl_adaptor.backends.vllm.loading import loader_for
from verl_adaptor.backends.vllm.plugin import NAME
from verl_adaptor.errors import WeightUpdateError
from verl_adaptor.weights import Layout, SharedBucket, attach, packed_size, read


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """Where buckets will lie."""

    path: str
    size: int


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Where the tensors of a bucket lie now."""

    layout: Layout


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """vLLM's side, in each worker."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._memory: Tensor | None = None
        self._loader: Any = None

    @override
    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        self._memory = attach(init_info.path, init_info.size)

    @override
    def start_weight_update(self) -> None:
        if self._loader is None:  # only now is the model prepared for its kernels
            self._loader = loader_for(self.model, self.model_config, self.device)
        self._loader.begin()

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @override
    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        if self._memory is None:
            raise WeightUpdateError("no shared memory was told; call init_weight_transfer_engine first.")
        self._loader.load(read(self._memory, update_info.layout))

    @override
    def finish_weight_update(self) -> None:
        self._loader.finish()

    @override
    def shutdown(self) -> None:
        self._memory = None


@dataclass
class SharedMemoryTrainerInitInfo(TrainerInitInfo):
    """The trainer's side: its rank, and about how many bytes travel at a time."""

    backend: ClassVar[str] = NAME
    bucket_bytes: int = BUCKET_BYTES


class SharedMemoryTrainerEngine(TrainerWeightTransferEngine[SharedMemoryTrainerInitInfo]):
    """Rank 0 writes; the others take part in making the tensors whole. Fused groups travel in one bucket."""

    init_info_cls = SharedMemoryTrainerInitInfo
    _bucket_bytes: int
    _shared: SharedBucket | None = None

    @classmethod
    @override
    def trainer_init(cls, init_info: SharedMemoryTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        if source is None:
            raise WeightUpdateError("there is no source of weights; give one, e.g. vLLM's ModuleSource(model).")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._bucket_bytes = init_info.bucket_bytes
        return engine

    @override
    def send_weights(self) -> None:
        metadata = self.source.metadata() if self.source else []
        sizes = {meta.name: packed_size([meta.dtype.itemsize * math.prod(meta.shape)]) for meta in metadata}
        plan = bucketed(sizes, self._bucket_bytes)
        shared = self._room(max(sum(sizes[name] for name in names) for names in plan)) if self.is_sender else None
        if shared is not None:
            self.client.start_weight_update()
        for bucket in self._buckets(plan):
            if shared is not None:
                self.client.update_weights({"layout": shared.write(bucket)})
        if shared is not None:
            self.client.finish_weight_update()

    def _room(self, size: int) -> SharedBucket:
        """Shared memory of at least this many bytes that vLLM's side has open; kept for the next round."""
        if self._shared is None or self._shared.size < size:
            self._shared, shared = None, SharedBucket(size)
            try:
                self.client.init_weight_transfer_engine({"path": str(shared.path), "size": shared.size})
            finally:
                shared.unlink()
            self._shared = shared
        return self._shared

    def _buckets(self, plan: list[list[str]]) -> Iterator[dict[str, Tensor]]:
        """As planned, from tensors that may come in another order within a layer."""
        have: dict[str, Tensor] = {}
        coming = iter(self.source or ())
        for names in plan:
            while not have.keys() >= set(names):
                name, tensor = next(coming)
                have[name] = tensor.detach()
            yield {name: have.pop(name) for name in names}
