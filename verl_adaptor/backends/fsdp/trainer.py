"""The fsdp trainer: a transformers model whose weights, gradients and optimizer state lie in shards (arXiv 2304.11277)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl_adaptor.backends.blueprint import Blueprint
from verl_adaptor.backends.fsdp import checkpoint, shards
from verl_adaptor.backends.fsdp.options import FSDPOptions
from verl_adaptor.backends.fsdp.tensor_parallel import share_layers
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.backends.probe import share_sequences
from verl_adaptor.backends.sharded import ShardedTrainer
from verl_adaptor.backends.world import ensure_process_group
from verl_adaptor.errors import UnsupportedCapability


class FSDPTrainer(ShardedTrainer):
    """`TorchTrainer` over shards, on a mesh of (copies, ranks that share one, tensor-parallel ranks).

    Context-parallel ranks (Ulysses) share copies as data-parallel ranks do: each adds its tokens' part of the gradients.

    Layers are whole only while they compute. Between calls a rank holds shards, and the optimizer sees them as plain
    tensors: so one AdamW serves parameters that lie on different meshes.

    Every rank loads the whole model before it keeps its share of it.

    Raises:
        ConfigError: other processes are running than the parallel sizes ask for, or tensor parallelism does not fit the model.
        UnsupportedCapability: packing, activation checkpointing or context parallelism on a model without it; a model
            without layers to shard.
        ModelError: the folder holds no model that can be trained.
        MissingGradient: activation checkpointing loses gradients of this model.
    """

    checkpoint_format = "verl_adaptor.fsdp/1"

    # -- sharding ------------------------------------------------------------------------------------------------

    def _parallelize(self) -> None:
        options, parallel = self._fsdp_options, self.config.parallel
        self._blueprint = Blueprint(self.head)
        ensure_process_group(self.device, self.config.execution.call_timeout_s)  # shards of one rank need one too
        shard = (options.shard_size or parallel.data_parallel_size) * parallel.context_parallel_size
        tensor = parallel.tensor_parallel_size
        copies = parallel.world_size // (shard * tensor)
        mesh = _mesh(self.device.type, (copies, shard, tensor))
        if self.world.context.size > 1:
            share_sequences(self.head, self.world.context)
        if tensor > 1:
            share_layers(self.head, mesh["tensor"], self.world.tensor, sequence_parallel=parallel.sequence_parallel)
        self._shard(mesh["copies", "shard"] if copies > 1 else mesh["shard"])
        self._parameters: dict[str, nn.Parameter] = dict(self.head.named_parameters())

    def _shard(self, mesh: DeviceMesh) -> None:
        """Each layer is gathered as one; embedding, last norm and output head with the root."""
        bf16 = self.head.compute_dtype == torch.bfloat16
        # autocast decides what is computed in bfloat16, here as everywhere; this only moves half the bytes
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._reshards,
            "offload_policy": self._offload_policy(),
        }
        if self.config.head == "value":
            layer = self.head.get_submodule("value_head")
            layer.register_forward_hook(_copied)
            fully_shard(layer, **settings)  # computes in float32
        if bf16:
            settings["mp_policy"] = half
        for layer in _layers(self.head.model):
            fully_shard(layer, **settings)
        # the root's forward ends with the output head and its backward begins there: let go, it would be gathered at once
        fully_shard(self.head, **settings | {"reshard_after_forward": None if self._reshards else False})
        for module in self._fsdp_modules():
            module.set_gradient_divide_factor(1.0)  # the sum over ranks, not their mean
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    @property
    def _fsdp_options(self) -> FSDPOptions:
        return self.options if isinstance(self.options, FSDPOptions) else FSDPOptions()

    @property
    def _reshards(self) -> bool:
        wanted = self._fsdp_options.reshard_after_forward
        return self.config.parallel.zero_stage != 2 if wanted is None else wanted

    def _offload_policy(self) -> OffloadPolicy:
        if not self._fsdp_options.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.head.modules() if isinstance(module, FSDPModule)]

    def _reshard(self) -> None:
        """Drop whole weights: they would outlive the shards that the next step changes."""
        for module in self._fsdp_modules():
            module.reshard()

    # -- computing -----------------------------------------------------------------------------------------------

    def _forward(self, batch: TensorDict) -> dict[str, Tensor]:
        try:
            return super()._forward(batch)
        finally:
            self._reshard()

    def _micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        root = self._root
        root.set_requires_gradient_sync(last or self._fsdp_options.sync_every_micro_batch)
        root.set_reshard_after_backward(last or self._reshards)
        root.set_is_last_backward(last)
        return nullcontext()

    @property
    def _root(self) -> FSDPModule:
        return cast(FSDPModule, self.head)  # fully_shard changes its class in place

    # -- the optimizer -------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> Optimizer:
        """Over this rank's shards, which share the parameters' memory."""
        trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        local = {name: nn.Parameter(shards.local(p)) for name, p in trainable.items()}
        return Optimizer(local, self.config, global_norm=self._global_norm)

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        return shards.global_norm(gradients, self._counts, self.device, self.world)

    def _optimizer_step(self) -> dict[str, float]:
        self._counts = []
        for name, shard in self._optimizer.parameters.items():
            gradient = self._parameters[name].grad
            shard.grad = None if gradient is None else shards.local(gradient)
            if gradient is not None:
                self._counts.append(shards.copies(gradient, self.world))
        try:
            return super()._optimizer_step()
        finally:
            self._zero_grad()

    def _abandon(self) -> None:
        """FSDP expects the end of a backward pass that broke off, and until it is told otherwise would reduce nothing."""
        self._root.reset_iter_state()
        super()._abandon()

    def _zero_grad(self) -> None:
        """Also what was summed on this rank and not yet over the ranks."""
        super()._zero_grad()
        for parameter in self._parameters.values():
            parameter.grad = None
        shards.drop_unreduced(self._fsdp_modules())
        self._reshard()

    # -- weights -------------------------------------------------------------------------------------------------

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return shards.whole(tensors)

    def _shards(self) -> Mapping[str, Tensor]:
        return self.head.state_dict()

    def _value_head(self, prefix: str = "") -> dict[str, Tensor]:
        return shards.whole(super()._value_head(prefix))

    # -- saving --------------------------------------------------------------------------------------------------

    def _own_tensors(self) -> dict[str, Tensor]:
        """Shards as DTensors, which know where they belong."""
        self._reshard()
        return super()._own_tensors()

    def _write_state(self, folder: Path) -> None:
        checkpoint.write(folder, self._own_tensors(), self.optimizer, self._parameters)

    def _read_state(self, folder: Path) -> None:
        checkpoint.read(folder, self._own_tensors(), self.optimizer, self._parameters)

    def _release(self) -> None:
        self._parameters = {}
        super()._release()


def _copied(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """FSDP warns of views, because writing into one would lose its hook."""
    return output.clone()


def _layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers itself would not split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedCapability(
            f"{type(model).__name__} does not say what its layers are (_no_split_modules), so they cannot be sharded one by "
            "one; train it with a backend that holds it whole."
        )
    return layers


@functools.cache
def _mesh(device_type: str, sizes: tuple[int, int, int]) -> DeviceMesh:
    """The same order of ranks as `world.AXES`; cached, because process groups cost sockets."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=("copies", "shard", "tensor"))
