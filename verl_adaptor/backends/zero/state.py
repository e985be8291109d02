"""Every tensor that DeepSpeed keeps: what offload moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_WALKED = ("deepspeed.", "torch.optim.")
"""Modules whose objects are looked into; others (hooks, loggers, process groups) hold no state of training."""


def tensors(*roots: Any) -> Iterator[Tensor]:
    """All tensors within `roots`, each object once: DeepSpeed keeps flat buffers, shards and views of them in many places,
    some of them as attributes of a parameter (``ds_tensor``, ``_hp_mapping``), and has no list of them.
    """
    seen: set[int] = set()
    pending: list[Any] = list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
            pending += [found.grad] if found.is_leaf and found.grad is not None else []
        pending += _within(found)


def _within(found: Any) -> list[Any]:
    if isinstance(found, Mapping):
        return [*found.values(), *(key for key in found if isinstance(key, Tensor))]
    if isinstance(found, list | tuple | set | frozenset):
        return [value for value in found if not isinstance(value, int | float | str)]
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    if isinstance(found, Tensor) or type(found).__module__.startswith(_WALKED):
        return list(getattr(found, "__dict__", {}).values())
    return []
