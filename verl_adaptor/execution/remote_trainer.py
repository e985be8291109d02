"""`RemoteTrainer`: a trainer whose ranks are processes of their own, used like one that is here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import TrainerError
from verl_adaptor.execution.group import WorkerGroup
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, TrainerBackend
from verl_adaptor.samples import AdapterUpdate, UpdatePart, WeightUpdate
from verl_adaptor.weights import SharedBucket, read

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from verl_adaptor.protocols.engine import InferenceEngine


@dataclass(frozen=True)
class Recipe:
    """How a trainer or an engine is built on a rank."""

    builder: str
    """``package.module:function`` that returns a `HostedTrainer` or a `HostedEngine`."""
    arguments: Mapping[str, Any]
    """Its keyword arguments: built-ins, and a pickled spec where no package has it."""


class RemoteTrainer(TrainerBackend):
    """Every call runs on all ranks of a worker group; results are on the CPU, or on the batch's device.

    Args:
        path, config, options, spec: as every trainer's.
        group: the ranks.
        recipe: how to build the trainer there; None for a view that `reference` made.
        owns_group: close the group with the trainer.
        key: the object's name on the group, for a view.
    """

    def __init__(
        self,
        path: str,
        config: TrainerConfig,
        options: Config | None,
        spec: BackendSpec,
        *,
        group: WorkerGroup,
        recipe: Recipe | None,
        owns_group: bool = False,
        key: str | None = None,
    ) -> None:
        super().__init__(path, config, options, spec)
        self._group = group
        self._recipe = recipe
        self._owns_group = owns_group
        self._key = key or group.new_key(f"{spec.name} {config.head} trainer")
        self._pulls = itertools.count()
        if recipe is not None:
            try:
                group.create(self._key, recipe.builder, recipe.arguments)
            except BaseException:
                self.close()
                raise

    def restart(self, checkpoint: Path | None = None) -> None:
        """Build the trainer again after a `WorkerError`, in fresh processes, and load a checkpoint.

        Trainers that share the ranks are lost with them: call this on each.

        Args:
            checkpoint: a folder of `save_checkpoint`; None starts from the model as it was given.
        """
        self._check_alive()
        if self._recipe is None:
            raise TrainerError("a view of another trainer is not restarted; restart that, and ask it for a new view.")
        self._group.restart()
        self._group.drop(self._key)
        self._group.create(self._key, self._recipe.builder, self._recipe.arguments)
        self._version, self._tier = 0, None
        if checkpoint is not None:
            self.load_checkpoint(checkpoint)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        found: LogProbs = self._call("compute_log_probs", batch)
        device = batch["responses"].device
        return LogProbs(found.log_probs.to(device), found.entropy.to(device))

    def _compute_values(self, batch: TensorDict) -> Tensor:
        values: Tensor = self._call("compute_values", batch)
        return values.to(batch["responses"].device)

    def update(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        """One optimizer step over one mini-batch, in one call; see `TrainerBackend.update`."""
        self._check(batch, head=self.config.head, also=("response_mask",))
        self._check_trainable()
        return self._noted(self._call("update", batch, loss))

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        return self._noted(self._call("forward_backward", batch, loss, over))

    def _optimizer_step(self) -> dict[str, float]:
        return self._noted(self._call("optimizer_step"))

    def _call(self, method: str, *args: Any) -> Any:
        return self._group.call(self._key, method, *args)

    def _noted(self, metrics: dict[str, float]) -> dict[str, float]:
        self._group.note(self._key, metrics)
        return metrics

    # -- weights -------------------------------------------------------------------------------------------------

    def export_weights(self, *, digests: bool = False) -> WeightUpdate:
        """The weights, pulled from the ranks bucket by bucket; this process holds one bucket at a time (law T4)."""
        self._check_open()
        return self._signed(self._export_weights(), digests=digests)

    def _digests(self, update: WeightUpdate, part: UpdatePart) -> dict[str, int]:
        found: dict[str, int] = self._call("export_digests", part)  # where the weights are trained
        return found

    def _export_weights(self) -> WeightUpdate:
        facts = self._call("export_weights")
        self._version = facts["version"]
        parts = facts.pop("adapters", None)
        update = self._pulled("merged", facts)
        if parts is None:
            return update
        base, weights = self._pulled("base", parts.pop("base")), self._pulled("adapters", parts.pop("weights"))
        return dataclasses.replace(update, adapters=AdapterUpdate(base=base, weights=weights, **parts))

    def _pulled(self, part: UpdatePart, facts: Mapping[str, Any]) -> WeightUpdate:
        """A part of the last export, whose bytes come when they are asked for."""
        room = facts["largest_bucket"] if self._group.workers.share_memory else 0
        return WeightUpdate(buckets=partial(self._pull, self._version, part, room), **facts)

    def _pull(self, version: int, part: UpdatePart, room: int) -> Iterator[dict[str, Tensor]]:
        """Each bucket through shared memory of this size, where there is any, else as a reply of the first rank."""
        pull = next(self._pulls)
        self._check_open()
        shared = SharedBucket(room) if room else None
        try:
            self._call("open_export", version, part, pull, shared and (str(shared.path), shared.size))
        finally:
            if shared is not None:
                shared.unlink()
        try:
            while True:
                self._check_open()
                found = self._call("next_bucket", pull)
                if found is None:
                    return
                yield found if shared is None else read(shared.memory, found)
        finally:
            if not (self._closed or self._group.broken):
                self._call("close_export", pull)

    # -- saving, memory, views -----------------------------------------------------------------------------------

    def _save_checkpoint(self, folder: Path) -> None:
        self._call("save_checkpoint", folder)

    def _load_checkpoint(self, folder: Path) -> None:
        self._version = self._call("load_checkpoint", folder)

    def save_pretrained(self, folder: Path) -> None:
        """A folder that plain transformers opens; a relative one is relative to this process."""
        self._check_open()
        self._call("save_pretrained", Path(folder))

    def _save_adapter(self, folder: Path) -> None:
        self._call("save_adapter", folder)

    def _offload(self, tier: str) -> None:
        self._call("offload", tier)

    def _onload(self) -> None:
        self._call("onload")

    def reference(self) -> TrainerBackend:
        """The backend's reference view, on the same ranks."""
        self._check_open()
        key = self._group.new_key(f"reference of the {self._key}")
        self._group.derive(self._key, "reference", key)
        config = self.config.replace(trainable=False, lora_rank=None, lora_alpha=None, lora_target_modules=None)
        return RemoteTrainer(self.path, config, self.options, self.spec, group=self._group, recipe=None, key=key)

    def _rollout_engine(self, config: EngineConfig, settings: Mapping[str, Any]) -> InferenceEngine:
        """The backend's rollout engine, on the same ranks."""
        from verl_adaptor.execution.remote_engine import RemoteEngine

        self.export_weights()  # what it serves first
        key = self._group.new_key(f"rollout engine of the {self._key}")
        self._group.derive(self._key, "rollout_engine", key, **settings)
        return RemoteEngine(
            self.path, config, None, self.spec, group=self._group, recipe=None, key=key, source=self._source
        )

    # -- life ----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._owns_group:
            self._group.close()
        else:
            self._group.drop(self._key)
