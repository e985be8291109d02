"""A key-value cache whose rows come and go: spare columns at its right edge, and caches joined row by row.

Columns are right-aligned: the newest token of every row is in the last one, shorter rows have padding on the left. So a
row can join any batch, and a sliding window, which counts columns, counts that row's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

MIN_SPARE = 64
"""Least spare columns of a buffer; otherwise an eighth of its width."""


class SpareLayer(DynamicLayer):
    """Keys and values, [rows, heads, columns, head dim], as views of buffers with spare columns.

    A decode step then writes one column, where transformers' own layer copies all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all keys and all values."""
        if self.keys is None or self.values is None:  # a prompt: kept as it is, because `join` will copy it anyway
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if self._buffers is None or stop > self._buffers[0].shape[-2]:
            self._buffers = _widened(self.keys, stop), _widened(self.values, stop)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self._buffers)
        return self.keys, self.values

    def adopt(self, keys: Tensor, values: Tensor, width: int) -> None:
        """Take over buffers of which the first `width` columns are filled."""
        self.lazy_initialization(keys, values)
        self._buffers = keys, values
        self.keys, self.values = keys[:, :, :width], values[:, :, :width]

    def free(self) -> None:
        """Let go of the memory."""
        self._buffers = self.keys = self.values = None


def new_cache() -> DynamicCache:
    """An empty cache of full layers, also for models with sliding windows: their masks do the windowing."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = SpareLayer
    return cache


@dataclass(frozen=True)
class Part:
    """Rows of one cache that go into a joined one."""

    cache: DynamicCache
    rows: Tensor
    """[n] int64 row numbers; repeated ones are copied (the n samples of one prompt)."""


def join(parts: Sequence[Part], width: int) -> DynamicCache:
    """One cache of all these rows, `width` columns wide. The old ones are emptied layer by layer to save memory."""
    cache = new_cache()
    for layers in zip(*(part.cache.layers for part in parts), strict=True):
        layer = SpareLayer()
        keys = _stacked([(old.keys, part.rows) for old, part in zip(layers, parts, strict=True)], width)
        values = _stacked([(old.values, part.rows) for old, part in zip(layers, parts, strict=True)], width)
        layer.adopt(keys, values, width)
        cache.layers.append(layer)
        for old in {id(old): old for old in layers}.values():
            old.free()
    return cache


def _stacked(pieces: Sequence[tuple[Tensor, Tensor]], width: int) -> Tensor:
    """The chosen rows of each piece, right-aligned at `width`, in a buffer with spare columns."""
    first = pieces[0][0]
    buffer = first.new_empty(sum(len(rows) for _, rows in pieces), first.shape[1], _room(width), first.shape[-1])
    start = 0
    for states, rows in pieces:
        target = buffer[start : start + len(rows)]
        kept = min(width, states.shape[-2])
        target[:, :, : width - kept] = 0.0  # masked, but 0 * NaN would be NaN
        target[:, :, width - kept : width] = states[:, :, states.shape[-2] - kept :].index_select(0, rows)
        start += len(rows)
    return buffer


def _widened(states: Tensor, width: int) -> Tensor:
    buffer = states.new_empty(*states.shape[:2], _room(width), states.shape[-1])
    buffer[:, :, : states.shape[-2]] = states
    return buffer


def _room(width: int) -> int:
    return width + max(MIN_SPARE, width // 8)


def is_plain(cache: Any) -> bool:
    """True if a forward of one token left one column of keys and values in every layer, and nothing else."""
    layers: Sequence[Any] = getattr(cache, "layers", ())
    return bool(layers) and all(
        type(layer) is SpareLayer
        and all(isinstance(t, torch.Tensor) and t.ndim == 4 and t.shape[-2] == 1 for t in (layer.keys, layer.values))
        for layer in layers
    )
