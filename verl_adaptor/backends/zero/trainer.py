"""The ``zero`` trainer: a transformers model in a DeepSpeed engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.backends import checkpoint as checkpoints
from verl_adaptor.backends.adapters import without_base
from verl_adaptor.backends.blueprint import Blueprint
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.backends.probe import share_sequences
from verl_adaptor.backends.sharded import ShardedTrainer
from verl_adaptor.backends.world import ensure_process_group
from verl_adaptor.backends.zero import checkpoint, shards, state
from verl_adaptor.backends.zero.engine import destroy, in_engine, make_engine
from verl_adaptor.backends.zero.optimizer import EngineOptimizer, adamw
from verl_adaptor.backends.zero.options import ZeroOptions, zero_stage


class ZeroTrainer(ShardedTrainer):
    """`TorchTrainer` with optimizer state, gradients and weights sharded over the data- and context-parallel ranks.

    ``zero_stage`` 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 (the default) weights too. Without an
    optimizer (``trainable=False``) stages 0 to 2 have nothing to shard.

    bfloat16 computes under autocast: weights, their gathering and the sum of gradients stay float32.

    Every rank loads the whole model before it keeps its share of it.

    Raises:
        ConfigError: other processes are running than the parallel sizes ask for.
        UnsupportedCapability: packing, activation checkpointing or context parallelism on a model without it.
        ModelError: the folder holds no model that can be trained.
        MissingGradient: activation checkpointing loses gradients of this model.
    """

    checkpoint_format = "verl_adaptor.zero/1"
    _engine: Any = None

    def _parallelize(self) -> None:
        self._stage = zero_stage(self.config)
        self._blueprint = Blueprint(self.head)
        if self.world.context.size > 1:
            share_sequences(self.head, self.world.context)
        kept = self.head.state_dict()
        # the objects that DeepSpeed shards in place, under the module's own names
        self._own: dict[str, Tensor] = dict(self.head.named_parameters())
        self._own |= {name: buffer for name, buffer in self.head.named_buffers() if name in kept}
        if not self.config.trainable and self._stage < 3:
            return
        options = self.options if isinstance(self.options, ZeroOptions) else ZeroOptions()
        ensure_process_group(self.device, self.config.execution.call_timeout_s)  # DeepSpeed needs one for one rank too
        trainable = [p for p in self.head.parameters() if p.requires_grad]
        inner = adamw(trainable, self.config) if self.config.trainable else None
        self._engine = make_engine(self.head, inner, self.config, options, self.device)

    def _make_optimizer(self) -> Optimizer:
        return EngineOptimizer(self._engine, self.config, self.device)

    # -- forward and backward ------------------------------------------------------------------------------------

    def _run(self, micro: TensorDict) -> dict[str, Tensor]:
        with in_engine(self.device):
            outputs: dict[str, Tensor] = (self.head if self._engine is None else self._engine)(micro)
        return outputs

    def _backward(self, share: Tensor) -> None:
        with in_engine(self.device):  # DeepSpeed takes the mean over all ranks, those that share sequences included
            self._engine.backward(share * self.world.size)

    # -- weights -------------------------------------------------------------------------------------------------

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with in_engine(self.device):
            return shards.whole(tensors)

    def _shards(self) -> Mapping[str, Tensor]:
        return self._own

    # -- saving --------------------------------------------------------------------------------------------------

    def _kind(self) -> dict[str, Any]:
        """Shards fit the world and the stage that wrote them, and no other."""
        own = {"world_size": self.world.size, "zero_stage": self._stage, "trainable": self.config.trainable}
        return super()._kind() | own

    def _write_state(self, folder: Path) -> None:
        with in_engine(self.device):
            if self.optimizer is not None:
                checkpoint.write(self._engine, folder, self.optimizer.steps)
                return
            kept: dict[str, Tensor] = {}
            for bucket in shards.in_buckets(self._own_tensors()):
                kept |= {name: t.to("cpu", copy=True) for name, t in bucket.items()} if self.world.is_first else {}
            if self.world.is_first:
                checkpoints.write_tensors(folder, kept)

    def _read_state(self, folder: Path) -> None:
        with in_engine(self.device):
            if isinstance(self.optimizer, EngineOptimizer):
                self.optimizer.zero_grad()
                self.optimizer.resume(checkpoint.read(self._engine, folder, self.world))
                return
            with self.world.together():
                saved = checkpoints.read_tensors(folder, shards.shapes(self._own_tensors()))
            shards.overwrite(self._own_tensors(), saved)

    def _own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint without an optimizer holds."""
        return self._own if self.head.adapters is None else without_base(self._own)

    # -- memory --------------------------------------------------------------------------------------------------

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from state.tensors(self.head, None if self._engine is None else self._engine.optimizer)

    def _release(self) -> None:
        self._own = {}
        if self._engine is not None:
            destroy(self._engine)
            self._engine = None
        super()._release()
        gc.collect()  # DeepSpeed's objects refer to each other: without it their memory would come back some time
