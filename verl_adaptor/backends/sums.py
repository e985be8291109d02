"""The loss and its metrics, added up over micro-batches and ranks, so that no split can change one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl_adaptor.backends.world import Axis
from verl_adaptor.errors import VerlAdaptorError


class Sums:
    """The loss, and metrics as (sum, weight), of one mini-batch; and the first failure of the loss function."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self.failure: VerlAdaptorError | None = None

    def add(self, share: Tensor, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """One micro-batch's share of the loss, and its metrics."""
        self._add("loss", share.item(), 1.0)
        for name, (value, weight) in metrics.items():
            self._add(name, _number(value), _number(weight))

    def _add(self, name: str, value: float, weight: float) -> None:
        old_value, old_weight = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = old_value + value, old_weight + weight

    def failed(self, error: VerlAdaptorError) -> None:
        """Remember the first; `check` raises it when the ranks have met."""
        self.failure = self.failure or error

    def check(self, ranks: Axis, device: torch.device) -> None:
        """Raises on all ranks what the loss function raised on one; `device` is what their group exchanges on.

        One number is asked for; words only where there is something to tell.
        """
        failed = self.failure is not None
        if ranks.size > 1:
            failed = bool(ranks.sum(torch.tensor(float(failed), device=device)))
        if failed:
            ranks.raise_first(self.failure)

    def total(self, ranks: Axis, *, counts: bool = True) -> dict[str, float]:
        """The whole loss, and each metric's sum / weight over all ranks; 0 where the weight is.

        Args:
            ranks: whose sums are added up.
            counts: False where another of the ranks has the same to tell.
        """
        whole = Sums()
        for told, sums in ranks.gather((counts, self._sums)):
            for name, (value, weight) in sums.items() if told else ():
                whole._add(name, value, weight)
        loss, _ = whole._sums.pop("loss", (0.0, 0.0))
        return {"loss": loss} | {
            name: value / weight if weight else 0.0 for name, (value, weight) in whole._sums.items()
        }


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
