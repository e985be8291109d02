"""`HostedTrainer`: a trainer as its `RemoteTrainer` drives it, on each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.errors import TrainerError
from verl_adaptor.execution.hosted_engine import HostedEngine
from verl_adaptor.protocols import TrainerBackend
from verl_adaptor.samples import UpdatePart, WeightUpdate
from verl_adaptor.weights import Layout, attach, digests, write

if TYPE_CHECKING:
    from torch import Tensor


class HostedTrainer:
    """All methods of the trainer, and those whose results cannot cross as they are.

    Weights are pulled bucket by bucket: every rank takes the step, because it may be a collective, and the first one
    hands the bytes on: through shared memory where the driver is on its machine, else as the reply.
    """

    def __init__(self, trainer: TrainerBackend) -> None:
        self._trainer = trainer
        self._update: WeightUpdate | None = None
        self._pulls: dict[int, Iterator[dict[str, Any]]] = {}
        self._memories: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def export_weights(self) -> dict[str, Any]:
        """What a `WeightUpdate` says before its bytes move."""
        self._update = update = self._trainer.export_weights()
        facts = _facts(update)
        if update.adapters is not None:
            facts["adapters"] = {
                "rank": update.adapters.rank,
                "alpha": update.adapters.alpha,
                "base": _facts(update.adapters.base),
                "weights": _facts(update.adapters.weights),
            }
        return facts

    def export_digests(self, part: UpdatePart) -> dict[str, int]:
        """Of the tensors of a part of the last export."""
        return {name: digest for bucket in self._part(part).buckets() for name, digest in digests(bucket).items()}

    def open_export(self, version: int, part: UpdatePart, pull: int, memory: tuple[str, int] | None) -> None:
        """Begin to hand out the buckets of a version, under the number `pull`. Raises `TrainerError` for a stale one.

        Args:
            version: policy version.
            part: of its update.
            pull: a number of the driver's.
            memory: path and size of the shared memory for the buckets; None: they are the replies.
        """
        if self._update is None or self._update.version != version:
            raise TrainerError(f"the weights of policy version {version} are gone; export again.")
        if memory is not None and self._is_first:
            self._memories[pull] = attach(*memory)
        self._pulls[pull] = self._part(part).buckets()

    def next_bucket(self, pull: int) -> dict[str, Any] | Layout | None:
        """The next bucket, or where its tensors lie in shared memory; None after the last."""
        bucket = next(self._pulls[pull], None)
        if bucket is None or pull not in self._memories:
            return bucket if self._is_first else None
        return write(self._memories[pull], bucket)

    def close_export(self, pull: int) -> None:
        """Stop handing out: on all ranks at the same bucket, so that no rank is left in a collective."""
        self._memories.pop(pull, None)
        buckets = self._pulls.pop(pull, None)
        if buckets is not None and hasattr(buckets, "close"):
            buckets.close()

    @property
    def _is_first(self) -> bool:
        return os.environ.get("RANK", "0") == "0"

    def load_checkpoint(self, folder: Path) -> int:
        """Load, and tell the policy version."""
        self._trainer.load_checkpoint(folder)
        return self._trainer.policy_version

    def rollout_engine(self, **settings: Any) -> HostedEngine:
        """An engine on this trainer's weights, hosted likewise."""
        return HostedEngine(self._trainer.rollout_engine(**settings), self._exported)

    def _part(self, part: UpdatePart) -> WeightUpdate:
        update = self._exported()
        if part == "merged":
            return update
        if update.adapters is None:
            raise TrainerError("this trainer trains all weights and exports no adapters.")
        return update.adapters.base if part == "base" else update.adapters.weights

    def _exported(self) -> WeightUpdate:
        if self._update is None:
            raise TrainerError("nothing was exported yet; call export_weights() first.")
        return self._update

    def reference(self) -> HostedTrainer:
        """The reference policy on this trainer's weights, hosted likewise."""
        return HostedTrainer(self._trainer.reference())


def _facts(update: WeightUpdate) -> dict[str, Any]:
    return {
        "version": update.version,
        "tensors": update.tensors,
        "tied": dict(update.tied),
        "fused_groups": update.fused_groups,
        "largest_bucket": update.largest_bucket,
    }
