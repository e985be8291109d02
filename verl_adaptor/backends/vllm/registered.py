"""The way of a bucket by one of vLLM's own weight transfers: what those gain lies between GPUs."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource

from verl_adaptor.backends.vllm.transfer import Compare, Transport
from verl_adaptor.errors import ConfigError, WeightUpdateError

VLLMS_OWN = ("nccl", "ipc")
Settings = Callable[[int], TrainerInitInfo]
"""From the bytes of the largest bucket, what a transfer is set up with."""


class Registered(Transport):
    """Buckets go one by one through a sender of vLLM's, whose calls reach the workers through `core`.

    vLLM's calls answer nothing: digests are compared before a bucket is sent, not where it arrives.

    Args:
        core: vLLM, started with this backend in its ``weight_transfer_config``.
        backend: its name in vLLM's registry.
        settings: how it is set up.
    """

    why = "that was asked for"

    def __init__(self, core: Any, backend: str, settings: Settings) -> None:
        super().__init__(core)
        self.name = f"by vLLM's own {backend} transfer"
        self._settings = settings
        self._bucket = _Bucket()
        self._sender: Any = None
        self._room = 0

    def prepare(self, room: int) -> None:
        """Set the sender up, anew for larger buckets."""
        if self._sender is not None and room <= self._room:
            return
        self.end()
        try:
            self._sender = WeightTransferTrainerFactory.trainer_init(
                self._settings(room), client=_Calls(self._core), source=self._bucket
            )
        except Exception as error:
            raise WeightUpdateError(
                f"vLLM could not set up the way {self.name}: {error}; leave weight_transport at 'auto'."
            ) from error
        self._room = room

    def begin(self) -> None:
        """vLLM's side makes itself ready."""
        self._core.call("start_weight_update")

    def load(self, bucket: Mapping[str, Tensor], compare: Compare | None) -> None:
        """Send a bucket; waits until it is loaded."""
        self._bucket.tensors = bucket
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM copies on streams of its own
        self._sender.send_weights()

    def complete(self) -> None:
        """vLLM's side prepares the layers for their kernels."""
        self._core.call("finish_weight_update")

    def end(self) -> None:
        """End the sender."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.shutdown()


class _Bucket(WeightSource):
    """The tensors of the bucket that is sent now, on the device that they are sent from."""

    tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return ((name, tensor.detach().to(device)) for name, tensor in self.tensors.items())


class _Calls:
    """What a sender calls on vLLM's side. An update of several buckets begins and ends once: that is the engine's business."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._core.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        # as bytes: CUDA IPC handles hold classes, which vLLM's own encoding between processes refuses
        self._core.call("adaptor_update_weights", pickle.dumps(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def transfer_arguments(backend: str) -> dict[str, Any]:
    """What vLLM's `EngineArgs` need for that transfer."""
    return {"weight_transfer_config": WeightTransferConfig(backend=backend)}


def settings_for(transfer: str, workers: int, device: torch.device) -> Settings:
    """How vLLM's ``nccl`` or ``ipc`` transfer is set up from this process.

    Args:
        transfer: one of the two.
        workers: vLLM's, of all tensor- and pipeline-parallel ranks.
        device: they run on.

    Raises:
        ConfigError: there is no CUDA, ``ipc`` is to reach several GPUs, or this process is one of several ranks.
    """
    if device.type != "cuda":
        raise ConfigError(f"weight_transport={transfer!r} goes between GPUs, and device={device.type!r}; use 'auto'.")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"weight_transport={transfer!r} sends from one process, and this one is one of {dist.get_world_size()} ranks; use "
            "'auto'."
        )
    if transfer == "ipc":
        if workers > 1:
            raise ConfigError(
                f"weight_transport='ipc' reaches a worker on the GPU that the weights are on, and there are {workers} workers; "
                "use 'nccl' or 'auto'."
            )
        return _ipc
    return partial(_nccl, workers)


def _ipc(room: int) -> TrainerInitInfo:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=room)


def _nccl(workers: int, room: int) -> TrainerInitInfo:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + workers, packed_buffer_size_bytes=room
    )
