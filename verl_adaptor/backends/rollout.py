"""`RolloutEngine`: generation with a trainer's own weights, on the trainer's own ranks.

While anything runs each rank holds the model whole and serves its share of the requests: a token needs every layer, and to
gather them for each would cost more than the decoding. Between generations a rank holds its shards alone. A trainer that
holds the model whole anyway lends its parameters, and nothing is copied at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_adaptor.backends.causal_lm import named_tensors, resolve_dtype, skeleton
from verl_adaptor.backends.decoding.engine import DecodingEngine
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, unsupported
from verl_adaptor.config import EngineConfig
from verl_adaptor.errors import EngineError, TrainerError, WeightUpdateError
from verl_adaptor.samples import Delta, WeightUpdate

if TYPE_CHECKING:
    from verl_adaptor.backends.torch_trainer import TorchTrainer


class RolloutEngine(DecodingEngine):
    """One rank's.

    Args:
        trainer: whose weights; it stays open for as long as the engine is used.
        config: of the engine.
    """

    def __init__(self, trainer: TorchTrainer, config: EngineConfig) -> None:
        super().__init__(trainer.path, config, None, rollout_spec(trainer.spec.name))
        self._trainer = trainer
        self._update = trainer.export_weights()
        self._version = self._update.version
        model = _twin(trainer, resolve_dtype(config.dtype))
        self._parameters = dict(model.named_parameters())  # those tied to others left out
        self._is_awake = False
        """The same on all ranks, whichever of them has rows: what is asked before a collective."""
        self._lends = trainer.lent_parameters() is not None and config.dtype == "float32"
        self._tensors: dict[str, Tensor] = {}
        self._take()
        self._tensors, tied = named_tensors(model)
        self._fill()
        self._use(model, self._tensors, tied)
        self._rest()

    # -- whole weights, while anything runs ----------------------------------------------------------------------

    def _wake(self) -> None:
        """Take the weights of the version served; a collective on all ranks where they are sharded.

        Raises:
            EngineError: the trainer has gone on.
        """
        self._check_fresh()
        self._take()
        self._fill()
        self._is_awake = True

    def _check_fresh(self) -> None:
        try:
            self._trainer.check_exported(self._update.source[1])
        except TrainerError as error:
            raise EngineError(
                f"this engine runs on its trainer's weights, and the trainer has gone on since policy version {self._version}: "
                "call engine.update_weights(trainer.export_weights())."
            ) from error

    def _take(self) -> None:
        """Memory for the weights, or the trainer's own."""
        lent = self._trainer.lent_parameters() if self._lends else None
        for name, parameter in self._parameters.items():
            if lent is not None:
                parameter.data = lent[name].detach()
            elif not parameter.untyped_storage().size():
                parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())

    @torch.no_grad()
    def _fill(self) -> None:
        """Copy the version served, bucket by bucket, unless it is lent."""
        for bucket in self._update.buckets() if not self._lends else ():
            for name, tensor in bucket.items():
                self._tensors[name].copy_(tensor)

    def _rest(self) -> None:
        self._is_awake = False
        for parameter in self._parameters.values() if not self._lends else ():
            parameter.untyped_storage().resize_(0)

    def _step(self) -> list[Delta]:
        self._check_lent()
        return super()._step()

    def _check_lent(self) -> None:
        """What is lent changes with the trainer, also while the engine is awake."""
        if self._lends:
            self._check_fresh()

    # -- weights -------------------------------------------------------------------------------------------------

    def _check_update(self, update: WeightUpdate) -> None:
        if update.source[0] != self._update.source[0]:
            raise WeightUpdateError(
                "this engine runs on its trainer's own weights and can serve no others; export from that trainer, or make an "
                "engine with create_inference_engine."
            )
        super()._check_update(update)

    def _load(self, update: WeightUpdate) -> None:
        """Nothing is moved until something runs; what runs already goes on with the new weights."""
        self._requeue()
        self._update = update
        if self._is_awake:
            self._fill()

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        raise WeightUpdateError(
            "this engine runs on its trainer's own weights and takes no others; update the trainer."
        )

    def _release(self) -> None:
        super()._release()
        self._parameters, self._tensors = {}, {}
        del self._trainer


def rollout_spec(name: str) -> BackendSpec:
    """What a rollout engine on this trainer can do."""
    return BackendSpec(
        name=f"{name} (rollout engine)",
        capabilities={
            Capability.STREAM: FULL,
            Capability.ABORT: FULL,
            Capability.SCORE: FULL,
            Capability.UPDATE_WEIGHTS: FULL,
            Capability.IN_FLIGHT_KEEP: FULL,
            Capability.PENALTIES: FULL,
            Capability.SLEEP: unsupported("while nothing runs it holds no weights of its own"),
        },
    )


def _twin(trainer: TorchTrainer, dtype: torch.dtype) -> PreTrainedModel:
    """The trainer's model without weights: parameters have shapes and no memory, buffers are the trainer's."""
    model = skeleton(trainer.path, trainer.config.trust_remote_code)
    model.generation_config = trainer.head.model.generation_config
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in module._parameters.items():
            if meta is not None and id(meta) not in made:
                empty = torch.empty(meta.shape, dtype=dtype, device=trainer.device)
                made[id(meta)] = nn.Parameter(empty, requires_grad=False)
                empty.untyped_storage().resize_(0)
            module._parameters[name] = None if meta is None else made[id(meta)]
    for name, buffer in trainer.head.model.named_buffers():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner)._buffers[own] = buffer
    return model
