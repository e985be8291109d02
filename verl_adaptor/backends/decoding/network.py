"""A causal LM of transformers as one function, whatever its forward happens to take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from verl_adaptor.backends.decoding.attention import use_grouped_decode
from verl_adaptor.backends.decoding.cache import is_plain, new_cache
from verl_adaptor.errors import ModelError


class Network:
    """Token ids -> logits, with or without a cache.

    Raises:
        ModelError: the model keeps recurrent state, or its cache is not one of keys and values a token, so that rows
            could not join and leave a running batch.
    """

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        use_grouped_decode(model)
        self.model = model
        self.device = model.device
        takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes  # ALiBi models read positions off the mask
        self._takes_logits_to_keep = "logits_to_keep" in takes
        # transformers has renamed it, with 5.20 or later
        self._takes_cache = next((name for name in ("past_key_values", "cache") if name in takes), None)
        stateful = getattr(model, "_is_stateful", False)
        if stateful or self._takes_cache is None or not self._caches_plainly():
            why = "keeps recurrent state" if stateful else "keeps no key-value cache that rows can join and leave"
            raise ModelError(
                f"{path}: {type(model).__name__} {why}, so it cannot decode in changing batches here; use an engine that "
                "serves this architecture, or another model."
            )

    @torch.inference_mode()
    def _caches_plainly(self) -> bool:
        cache = new_cache()
        self(torch.zeros(1, 1, dtype=torch.long, device=self.device), None, None, cache)
        return is_plain(cache)

    def __call__(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: DynamicCache | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [B, T, V], or [B, 1, V] if `last_only`.

        Args:
            ids: [B, T] new tokens.
            mask: [B, columns in the cache + T], 0 at padding; None if there is no padding, which is faster.
            positions: [B, T]; None: counted from the cache's width.
            cache: gets the new tokens' keys and values.
            last_only: want the last position's logits only.
        """
        wishes: dict[str, object] = {}
        if self._takes_positions and positions is not None:
            wishes["position_ids"] = positions
        if self._takes_logits_to_keep and last_only:
            wishes["logits_to_keep"] = 1
        if cache is not None and self._takes_cache is not None:
            wishes[self._takes_cache] = cache
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=cache is not None, return_dict=True, **wishes)
        return output.logits[:, -1:] if last_only else output.logits

    def read(
        self, rows: Sequence[Sequence[int]], budget: int, cache: DynamicCache | None = None, *, last_only: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """Read whole sequences, padded on the left. Yields (first column, logits [B, columns, V]).

        That is one piece, unless a single row is longer than `budget` tokens: it is read in pieces through a cache.
        """
        ids, mask, positions = left_padded(rows, self.device)
        width = ids.shape[1]
        piece = budget if len(rows) == 1 and width > budget else width
        if cache is None and piece < width:
            cache = new_cache()
        for start in range(0, width, piece):
            columns = slice(start, start + piece)
            yield start, self(ids[:, columns], mask, positions[:, columns], cache, last_only=last_only)


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
    """ids, mask (None if nothing is padded), positions: each [B, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    positions = (torch.arange(width, device=device) - (width - lengths)[:, None]).clamp(min=0)
    return ids, padding_mask(lengths.tolist(), width, device), positions


def padding_mask(lengths: Sequence[int], width: int, device: torch.device, spare: int = 0) -> Tensor | None:
    """[B, width + spare]: 1 in the last `length` of the first `width` columns and in the spare ones; None if all are."""
    if min(lengths) == width:
        return None
    start = width - torch.tensor(lengths, device=device)[:, None]
    return (torch.arange(width + spare, device=device) >= start).long()


def packed(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers in groups of like length, each at most `budget` tokens with its padding, but at least one row."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
