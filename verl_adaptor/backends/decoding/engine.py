"""`DecodingEngine`: transformers' forward under a decode loop of our own.

A step either prefills what waits, as far as there are places, or decodes one token for every running row. New rows join
the running batch, finished ones leave it (continuous batching, as in Orca, OSDI 2022).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl_adaptor.backends.causal_lm import token_log_probs
from verl_adaptor.backends.decoding.cache import new_cache
from verl_adaptor.backends.decoding.network import Network, packed
from verl_adaptor.backends.decoding.rows import Batch, Prefilled, Row
from verl_adaptor.backends.decoding.sampler import Sampler
from verl_adaptor.backends.limits import eos_token_ids, max_model_len, sampled_ids
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import EngineError
from verl_adaptor.protocols import EngineModel, InferenceEngine, SampleRequest
from verl_adaptor.samples import Delta, FinishReason
from verl_adaptor.tokenizer import load_tokenizer

_SCORE_LOGITS = 1 << 27
"""Most logits that `score` holds at once (512 MiB in float32), whatever max_prefill_tokens allows."""
_ADMIT_SHARE = 16
"""While not all that wait find a place, new rows are admitted by the sixteenth of a batch: each join copies the cache."""


class DecodingEngine(InferenceEngine):
    """Generates with a transformers model in this process. A subclass brings the model (`_use`), and loads its weights.

    Requests wait until a place is free; rows of one prompt are read once.
    """

    _network: Network

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        self._rows: dict[tuple[str, int], Row] = {}
        self._waiting: deque[Row] = deque()
        self._prefilled: list[Prefilled] = []
        self._batch: Batch | None = None
        self._rows_left = False

    def _use(self, model: PreTrainedModel, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
        """Run this model, whose checkpoint's tensors these are; only their shapes are read."""
        self._network = Network(model, self.path)
        self.model = EngineModel(
            vocab_size=int(cast(Tensor, model.get_input_embeddings().weight).shape[0]),
            max_model_len=max_model_len(model.config, self.config.max_model_len, self.path),
            eos_token_ids=eos_token_ids(model.config, model.generation_config, self.tokenizer),
            tensors={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            tied=tied,
        )
        self._sampled_ids = sampled_ids(self.model.vocab_size, self.model.eos_token_ids, self.tokenizer)

    # -- the queue -----------------------------------------------------------------------------------------------

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            row = self._rows[sample.key] = Row(sample)
            self._waiting.append(row)

    def _drop(self, keys: Iterable[tuple[str, int]]) -> None:
        dropped = [row for key in keys if (row := self._rows.pop(key, None)) is not None]
        for row in dropped:
            row.alive = False
        if dropped:
            self._rows_left = True
            self._waiting = deque(row for row in self._waiting if row.alive)
        if not self._rows:  # an idle engine holds no cache
            self._prefilled, self._batch = [], None

    def _next_rows(self) -> list[Row]:
        """Take from the queue what is to be prefilled now."""
        places = self.config.max_batch_size - (len(self._rows) - len(self._waiting))
        if places < min(len(self._waiting), max(1, self.config.max_batch_size // _ADMIT_SHARE)):
            return []
        return [self._waiting.popleft() for _ in range(min(places, len(self._waiting)))]

    # -- a step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> list[Delta]:
        rows = self._next_rows()
        if rows:
            return self._prefill(rows)
        self._rejoin()
        return self._book(self._batch.rows, *self._batch.step()) if self._batch is not None else []

    def _prefill(self, rows: Sequence[Row]) -> list[Delta]:
        """Read each context once, and sample the next token of every row that has it."""
        sharing: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            sharing.setdefault(row.context, []).append(row)
        contexts = list(sharing)
        deltas: list[Delta] = []
        for group in packed([len(context) for context in contexts], self.config.max_prefill_tokens):
            cache = new_cache()
            budget = self.config.max_prefill_tokens
            for _, piece in self._network.read([contexts[i] for i in group], budget, cache, last_only=True):
                logits = piece[:, -1]
            members = [(place, row) for place, i in enumerate(group) for row in sharing[contexts[i]]]
            places = torch.tensor([place for place, _ in members], device=self._network.device)
            its_rows = [row for _, row in members]
            sampler = Sampler([row.sample for row in its_rows], self._sampled_ids, self._network.device)
            tokens, log_probs = sampler(logits[places], [row.number for row in its_rows])
            self._prefilled.append(Prefilled(its_rows, cache, places, tokens))
            deltas += self._book(its_rows, tokens, log_probs)
        return deltas

    def _rejoin(self) -> None:
        """Let new rows into the batch, and dead ones out where that pays."""
        shrinks = self._batch is not None and self._rows_left and self._batch.worth_joining
        self._rows_left = False
        if self._prefilled or shrinks:
            sources = self._sources()
            self._prefilled, self._batch = [], None
            if any(row.alive for source in sources for row in source.rows):
                self._batch = Batch(sources, self._network, self._sampled_ids)

    def _book(self, rows: Sequence[Row], tokens: Tensor, log_probs: Tensor) -> list[Delta]:
        """One delta for each living row; those that end leave."""
        deltas = []
        ids, values = torch.stack((tokens.double(), log_probs.double())).tolist()  # one transfer; both are exact
        for row, token, log_prob in zip(rows, map(int, ids), values, strict=True):
            if not row.alive:
                continue
            if log_prob != log_prob:
                raise EngineError("the model's logits are NaN; check its weights, and the last weight update.")
            sample = row.sample
            reason: FinishReason | None = None
            if token in sample.stop_token_ids:
                reason = "stop"
            elif len(sample.token_ids) + 1 >= sample.params.max_tokens:
                reason = "length"
            deltas.append(
                Delta(
                    request_id=sample.request_id,
                    index=sample.index,
                    token_ids=(token,),
                    log_probs=(log_prob,),
                    finish_reason=reason,
                )
            )
        self._drop([(delta.request_id, delta.index) for delta in deltas if delta.finish_reason])
        return deltas

    # -- score ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        budget = max(1, min(self.config.max_prefill_tokens, _SCORE_LOGITS // self.model.vocab_size))
        scores: list[list[float]] = [[] for _ in token_ids]
        for group in packed([len(ids) for ids in token_ids], budget):
            width = len(token_ids[group[0]])
            targets = torch.tensor(
                [[0] * (width - len(token_ids[i])) + list(token_ids[i][1:]) for i in group], device=self._network.device
            )
            pieces = []
            for start, logits in self._network.read([token_ids[i] for i in group], budget):
                ids = targets[:, start : start + logits.shape[1]]
                pieces.append(token_log_probs(logits[:, : ids.shape[1]], ids, temperature))
            for i, values in zip(group, torch.cat(pieces, 1).tolist(), strict=True):
                scores[i] = values[width - len(token_ids[i]) :]
        return scores

    def _requeue(self) -> None:
        """Running rows back to the head of the queue: their cache is the old policy's, so they are read anew."""
        running = [row for source in self._sources() for row in source.rows if row.alive]
        self._waiting.extendleft(reversed(running))
        self._prefilled, self._batch = [], None

    def _sources(self) -> list[Prefilled | Batch]:
        """All that holds rows which have been read."""
        return [*([self._batch] if self._batch is not None else []), *self._prefilled]

    def _release(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._prefilled, self._batch = [], None
        del self._network
