"""Token by token through Megatron's layers with their key-value cache, on ranks that share the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor

from verl_adaptor.backends.decoding.rows import Row
from verl_adaptor.backends.decoding.sampler import Sampler
from verl_adaptor.backends.megatron import layout
from verl_adaptor.backends.megatron.model import Chunk

_SHARED = ("sequence_parallel", "reduce_scatter_embeddings", "scatter_to_sequence_parallel")
"""What Megatron's modules call sequence parallelism."""


class Stages:
    """All stages of the pipeline as one function of new tokens; every rank calls it alike.

    Args:
        chunks: this rank's.
        device: where they are.
    """

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.device = device
        self._chunks = list(chunks)
        modules = [*(module for chunk in chunks for module in chunk.modules()), chunks[0].config]
        self._shared = [(m, name) for m in modules for name in _SHARED if getattr(m, name, None) is True]

    def __call__(self, ids: Tensor, positions: Tensor, hidden: Tensor, context: StaticInferenceContext) -> Tensor:
        """Logits [rows, vocabulary] after the last column, on the last stage; elsewhere none.

        Args:
            ids: [rows, new] tokens.
            positions: [rows, columns so far].
            hidden: [rows, 1, new, columns so far], True where a token must not see another.
            context: gets the new tokens' keys and values.
        """
        pipeline = layout.pipeline_axis()
        last = pipeline.size - 1
        with _whole_sequences(self._shared):
            states = ids.new_empty(0, dtype=torch.float32)
            for stretch, chunk in enumerate(self._chunks):
                first_of_all = pipeline.rank == 0 and stretch == 0
                if not first_of_all:
                    states = self._receive(chunk, ids.shape, (pipeline.rank - 1) % pipeline.size, pipeline.size)
                    chunk.set_input_tensor(states)
                states = chunk.read(ids, positions, hidden, context)
                if not (pipeline.rank == last and stretch == len(self._chunks) - 1):
                    self._send(chunk, states, (pipeline.rank + 1) % pipeline.size, pipeline.size)
            if pipeline.rank != last:
                return states[:0]
            return self._logits(self._chunks[-1], states[-1:])

    def _receive(self, chunk: Chunk, shape: torch.Size, source: int, ranks: int) -> Tensor:
        rows, new = shape
        dtype = chunk.config.pipeline_dtype
        states = torch.empty(new, rows, chunk.config.hidden_size, dtype=dtype, device=self.device)
        if ranks > 1:
            dist.recv(states, group=layout.pipeline_axis().group, group_src=source)
        return states

    def _send(self, chunk: Chunk, states: Tensor, target: int, ranks: int) -> None:
        if ranks > 1:
            states = states.to(chunk.config.pipeline_dtype).contiguous()
            dist.send(states, group=layout.pipeline_axis().group, group_dst=target)

    def _logits(self, chunk: Chunk, states: Tensor) -> Tensor:
        """[rows, vocabulary] float32, whole on every tensor-parallel rank."""
        tied = chunk.share_embeddings_and_output_weights
        weight = chunk.shared_embedding_or_output_weight() if tied else None
        cut = chunk.output_layer(states, weight=weight)[0][0].float().contiguous()
        tensor = layout.tensor_axis()
        if tensor.size == 1:
            return cut[:, : chunk.real_vocab_size]
        cuts = [torch.empty_like(cut) for _ in range(tensor.size)]
        dist.all_gather(cuts, cut, group=tensor.group)
        return torch.cat(cuts, dim=-1)[:, : chunk.real_vocab_size]


@contextmanager
def _whole_sequences(shared: Sequence[tuple[object, str]]) -> Iterator[None]:
    """Without sequence parallelism: one new token a row cannot be shared out."""
    for owner, name in shared:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in shared:
            setattr(owner, name, True)


class StaticBatch:
    """Rows that are read together and decode together until all have ended.

    Contexts are padded on the left, and no token sees the padding; rows with one context are read once. Rows that have ended
    are decoded along until half of the batch has, and then leave the cache.

    Args:
        rows: what to generate.
        stages: the model.
        vocabulary: ids from here on are never sampled.
        window: how far a token sees, in tokens; None: all the way.
        budget: most tokens, padding included, that are read at once.
    """

    def __init__(self, rows: Sequence[Row], stages: Stages, vocabulary: int, window: int | None, budget: int) -> None:
        self.rows = list(rows)
        self._stages = stages
        self._vocabulary = vocabulary
        self._window = window
        contexts = list(dict.fromkeys(row.context for row in rows))
        places = [contexts.index(row.context) for row in rows]
        self._width = max(map(len, contexts))
        room = max(row.sample.params.max_tokens - len(row.sample.token_ids) for row in rows)
        self._context = StaticInferenceContext(len(contexts), self._width + room)
        self._empty = torch.tensor([self._width - len(ids) for ids in contexts], device=stages.device)
        """[rows] columns of padding before each."""
        self._tokens = torch.empty(0, device=stages.device)
        logits = self._read(contexts, budget)
        self._logits = logits[places] if self._speaks else logits
        self._keep(places)

    def step(self) -> tuple[list[int], list[float]]:
        """The next token of each row and its log-prob, NaN included; the same on all ranks that share the model."""
        if self._tokens.numel():
            ids, self._width = self._tokens[:, None], self._width + 1
            self._logits = self._forward(ids, self._width - 1)
        drawn = torch.zeros(2, len(self.rows), dtype=torch.float64, device=self._stages.device)
        if self._speaks:
            sampler = Sampler([row.sample for row in self.rows], self._vocabulary, self._stages.device)
            tokens, log_probs = sampler(self._logits, [row.number for row in self.rows])
            drawn[0], drawn[1] = tokens.double(), log_probs.double()
        pipeline = layout.pipeline_axis()
        if pipeline.size > 1:
            dist.broadcast(drawn, group=pipeline.group, group_src=pipeline.size - 1)
        self._tokens = drawn[0].long()
        return self._tokens.tolist(), drawn[1].tolist()

    def shrink(self) -> None:
        """Let rows that have ended leave, once they are half of all."""
        alive = [number for number, row in enumerate(self.rows) if row.alive]
        if 2 * len(alive) <= len(self.rows):
            self.rows = [self.rows[number] for number in alive]
            self._tokens = self._tokens[alive]
            self._keep(alive)

    @property
    def _speaks(self) -> bool:
        pipeline = layout.pipeline_axis()
        return pipeline.rank == pipeline.size - 1

    def _keep(self, places: Sequence[int]) -> None:
        """These rows of the cache, in this order."""
        index = torch.tensor(places, device=self._stages.device)
        kept = {layer: (k[:, index], v[:, index]) for layer, (k, v) in self._context.key_value_memory_dict.items()}
        self._context.key_value_memory_dict = kept
        self._context.max_batch_size = len(places)
        self._empty = self._empty[index]

    def _read(self, contexts: Sequence[Sequence[int]], budget: int) -> Tensor:
        """Logits [contexts, vocabulary] after each context, whose keys and values are cached."""
        width, rows = self._width, max(1, budget // self._width)
        padded = [[0] * (width - len(ids)) + list(ids) for ids in contexts]
        ids = torch.tensor(padded, device=self._stages.device)
        logits = []
        for start in range(0, len(ids), rows):
            self._context.batch_size_offset = start
            logits.append(self._forward(ids[start : start + rows], 0, slice(start, start + rows)))
        self._context.batch_size_offset = 0
        return torch.cat(logits)

    def _forward(self, ids: Tensor, start: int, rows: slice = slice(None)) -> Tensor:
        """`ids` [rows, new] stand in the columns from `start` on."""
        empty = self._empty[rows, None]
        column = torch.arange(start + ids.shape[1], device=ids.device)
        positions = (column - empty).clamp(min=0)
        behind = column[start:, None] - column
        hidden = (behind < 0) | (behind >= (self._window or len(column)))
        self._context.sequence_len_offset = start
        return self._stages(ids, positions, hidden | (column < empty[..., None])[:, None], self._context)
