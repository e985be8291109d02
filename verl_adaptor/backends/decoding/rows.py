"""Rows that decode together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from verl_adaptor.backends.decoding.cache import Part, join
from verl_adaptor.backends.decoding.network import Network, padding_mask
from verl_adaptor.backends.decoding.sampler import Sampler
from verl_adaptor.backends.sampling import uniform
from verl_adaptor.protocols import SampleRequest

_SPARE = 64
"""Columns by which a mask grows ahead."""


class Row:
    """One sample on its way."""

    def __init__(self, sample: SampleRequest) -> None:
        self.sample = sample
        self.alive = True
        """False once it is finished or dropped; its place in a batch is then only padding."""

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response so far."""
        return (*self.sample.prompt_token_ids, *self.sample.token_ids)

    @property
    def number(self) -> float:
        """What the next token is drawn with."""
        return uniform(self.sample.seed, len(self.sample.token_ids))

    @property
    def cached(self) -> int:
        """Tokens in the cache: all but the newest."""
        return len(self.sample.prompt_token_ids) + len(self.sample.token_ids) - 1


@dataclass(frozen=True)
class Prefilled:
    """Rows whose context has been read and whose next token has been sampled."""

    rows: Sequence[Row]
    cache: DynamicCache
    places: Tensor
    """[rows] each row's place in the cache: samples of one prompt share one."""
    tokens: Tensor
    """[rows] the token sampled last."""


class Batch:
    """Joined rows: one cache, one forward a step.

    Nothing in it depends on a row being alive: dead rows are decoded along until a new batch is worth its copying.
    """

    rows: Sequence[Row]
    cache: DynamicCache
    places: Tensor
    """[B] each row's place in the cache: its own."""
    tokens: Tensor
    """[B] the token sampled last, and not yet in the cache."""

    def __init__(self, sources: Sequence[Prefilled | Batch], network: Network, vocabulary: int) -> None:
        """Join the living rows of `sources`, whose caches are emptied."""
        device = network.device
        kept = [(s, [i for i, row in enumerate(s.rows) if row.alive]) for s in sources]
        kept = [(source, alive) for source, alive in kept if alive]
        indices = [(source, torch.tensor(alive, device=device)) for source, alive in kept]
        self.rows = [source.rows[i] for source, alive in kept for i in alive]
        lengths = [row.cached for row in self.rows]
        self.width = max(lengths)
        self.cache = join([Part(s.cache, s.places[index]) for s, index in indices], self.width)
        self.places = torch.arange(len(self.rows), device=device)
        self.tokens = torch.cat([s.tokens[index] for s, index in indices])
        self.sampler = Sampler([row.sample for row in self.rows], vocabulary, device)
        self._network = network
        self._mask = padding_mask(lengths, self.width, device, _SPARE)
        self._positions = torch.tensor(lengths, device=device)[:, None]

    @property
    def worth_joining(self) -> bool:
        """True if at least an eighth of the cache is dead rows and all-padding columns."""
        lengths = [row.cached for row in self.rows if row.alive]
        return 8 * len(lengths) * max(lengths, default=0) <= 7 * len(self.rows) * self.width

    def step(self) -> tuple[Tensor, Tensor]:
        """Decode one token a row: [B] tokens, [B] log-probs."""
        self.width += 1
        if self._mask is not None and self.width > self._mask.shape[1]:
            self._mask = torch.nn.functional.pad(self._mask, (0, _SPARE), value=1)
        mask = None if self._mask is None else self._mask[:, : self.width]
        logits = self._network(self.tokens[:, None], mask, self._positions, self.cache)[:, -1]
        self._positions += 1
        self.tokens, log_probs = self.sampler(logits, [row.number for row in self.rows])
        return self.tokens, log_probs
