"""What trainers of a sharded transformers model share: weights leave whole, under Hugging Face names, bucket by bucket."""

from __future__ import annotations

import abc
from collections.abc import Mapping

from torch import Tensor

from verl_adaptor.backends import export
from verl_adaptor.backends.blueprint import Blueprint
from verl_adaptor.backends.torch_trainer import TorchTrainer

_VALUE_HEAD = "value_head."


class ShardedTrainer(TorchTrainer, abc.ABC):
    """`TorchTrainer` for a framework that keeps shards. `_parallelize` sets `_blueprint` before it shards."""

    _blueprint: Blueprint

    @abc.abstractmethod
    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These tensors of the module, whole, on every rank; a collective on all of them."""

    @abc.abstractmethod
    def _shards(self) -> Mapping[str, Tensor]:
        """This rank's shards under the module's own names."""

    def lent_parameters(self) -> None:
        """None: here are shards."""
        return

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        return self._blueprint.tensors, self._blueprint.tied

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = self._blueprint.pieces.keys()
        own = self._whole({name: tensor for name, tensor in tensors.items() if name not in known})
        held = self._shards()
        return own | self._blueprint.gather(
            (name for name in tensors if name in known),
            lambda names: self._whole({name: held[name] for name in names}),
        )

    def _whole_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """One bucket at a time, kept in host memory by the first rank."""
        kept: dict[str, Tensor] = {}
        tensors = self._blueprint.tensors
        for names in export.bucketed({name: t.numel() * t.element_size() for name, t in tensors.items()}):
            bucket = self._exported({name: tensors[name] for name in names})
            if self.world.is_first:  # copied: the memory of a bucket may be its framework's
                kept |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket.items()}
        head = {n.removeprefix(_VALUE_HEAD): kept.pop(n) for n in list(kept) if n.startswith(_VALUE_HEAD)}
        return kept, head
