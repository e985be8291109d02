"""`MegatronEngine`: generation on Megatron's own shards, in static batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from verl_adaptor.backends.decoding.rows import Row
from verl_adaptor.backends.limits import eos_token_ids, max_model_len, sampled_ids
from verl_adaptor.backends.megatron import shim
from verl_adaptor.batch import collate
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import ConfigError, EngineError, TrainerError, WeightUpdateError
from verl_adaptor.protocols import EngineModel, InferenceEngine, SampleRequest
from verl_adaptor.samples import Delta, FinishReason, Trajectory, WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer

with shim.quiet():  # Megatron's modules warn when they are imported
    from verl_adaptor.backends.megatron import layout
    from verl_adaptor.backends.megatron.generation import Stages, StaticBatch
    from verl_adaptor.backends.megatron.trainer import MegatronTrainer


class ShardEngine(InferenceEngine):
    """One rank of an engine on a trainer's tensor- and pipeline-parallel shards; each data-parallel rank is a replica.

    Requests run in static batches: what comes while one runs waits until all of it has ended.

    Args:
        trainer: whose shards; it stays open for as long as the engine is used.
        config, spec: of the engine.
    """

    scores_together = True

    def __init__(self, trainer: MegatronTrainer, config: EngineConfig, spec: BackendSpec) -> None:
        super().__init__(trainer.path, config, None, spec)
        if trainer.layout.expert > 1 and trainer.layout.data > 1:
            raise ConfigError(
                "a megatron engine with expert_parallel_size > 1 and data_parallel_size > 1: its replicas would wait for each "
                "other's tokens; use one replica."
            )
        self._trainer = trainer
        self._stages = Stages(trainer.chunks, trainer.device)
        self.tokenizer = load_tokenizer(trainer.path, config.trust_remote_code)
        eos = eos_token_ids(trainer.model, _generation_config(trainer.path), self.tokenizer)
        update = trainer.export_weights()
        self._update = update
        self._version = update.version
        self.model = EngineModel(
            vocab_size=trainer.model.vocab_size,
            max_model_len=max_model_len(trainer.model, config.max_model_len, trainer.path),
            eos_token_ids=eos,
            tensors={meta.name: meta.shape for meta in update.tensors},
            tied=update.tied,
        )
        self._sampled_ids = sampled_ids(self.model.vocab_size, eos, self.tokenizer)
        self._rows: dict[tuple[str, int], Row] = {}
        self._waiting: deque[Row] = deque()
        self._batch: StaticBatch | None = None

    @property
    def place(self) -> tuple[int, bool]:
        """The data-parallel rank is the replica; the first rank of its pipeline and of the matrices reports."""
        data = layout.data_axis()
        return data.rank, layout.pipeline_axis().rank == 0 and layout.tensor_axis().rank == 0

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            row = self._rows[sample.key] = Row(sample)
            self._waiting.append(row)

    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            row = self._rows.pop(key, None)
            if row is not None:
                row.alive = False
        self._waiting = deque(row for row in self._waiting if row.alive)
        if self._batch is not None and not any(row.alive for row in self._batch.rows):
            self._batch = None

    @torch.no_grad()
    def _step(self) -> list[Delta]:
        self._check_fresh()
        with shim.active():
            if self._batch is None:
                size = min(self.config.max_batch_size, len(self._waiting))
                rows = [self._waiting.popleft() for _ in range(size)]
                window = getattr(self._trainer.model, "sliding_window", None)
                budget = self.config.max_prefill_tokens
                self._batch = StaticBatch(rows, self._stages, self._sampled_ids, window, budget)
            else:
                self._batch.shrink()
            return self._book(self._batch.rows, *self._batch.step())

    def _book(self, rows: Sequence[Row], tokens: Sequence[int], log_probs: Sequence[float]) -> list[Delta]:
        """One delta for each living row; those that end leave."""
        deltas = []
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if not row.alive:
                continue
            if log_prob != log_prob:
                raise EngineError("the model's logits are NaN; check its weights, and the last weight update.")
            sample = row.sample
            full = len(sample.token_ids) + 1 >= sample.params.max_tokens
            reason: FinishReason | None = "stop" if token in sample.stop_token_ids else "length" if full else None
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

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """By the trainer itself, each row as a response to its first token."""
        self._check_fresh()
        scores: list[list[float]] = []
        for group in _groups(token_ids, self.config.max_prefill_tokens):
            rows = [
                Trajectory(
                    prompt_ids=(ids[0],),
                    response_ids=tuple(ids[1:]),
                    response_mask=(1,) * (len(ids) - 1),
                    rollout_log_probs=(0.0,) * (len(ids) - 1),
                    finish_reason="length",
                    temperature=temperature,
                )
                for ids in group
            ]
            found = self._trainer.compute_log_probs(collate(rows, pad_token_id=0)).log_probs.tolist()
            scores += [values[: len(ids) - 1] for values, ids in zip(found, group, strict=True)]
        return scores

    def _check_fresh(self) -> None:
        try:
            self._trainer.check_exported(self._update.source[1])
        except TrainerError as error:
            raise EngineError(
                f"this engine runs on its trainer's weights, and the trainer has gone on since policy version {self._version}: "
                "call engine.update_weights(trainer.export_weights())."
            ) from error

    # -- weights -------------------------------------------------------------------------------------------------

    def _check_update(self, update: WeightUpdate) -> None:
        if update.source[0] != self._update.source[0]:
            raise WeightUpdateError(
                "this engine runs on its trainer's own weights and can serve no others; export from that trainer, or make an "
                "engine with create_inference_engine."
            )
        super()._check_update(update)

    def _load(self, update: WeightUpdate) -> None:
        """Nothing is moved."""
        self._requeue()
        self._update = update

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        raise WeightUpdateError(
            "this engine runs on its trainer's own weights and takes no others; update the trainer."
        )

    def _requeue(self) -> None:
        """Running rows back to the head of the queue: their cache is the old policy's, so they are read anew."""
        if self._batch is not None:
            self._waiting.extendleft(row for row in reversed(self._batch.rows) if row.alive)
            self._batch = None

    def _release(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._batch = None
        del self._stages, self._trainer


class MegatronEngine(ShardEngine):
    """An engine with shards of its own, loaded as a trainer without an optimizer loads them.

    Raises:
        ConfigError: as `MegatronTrainer`.
        ModelError: as `MegatronTrainer`.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        shards = TrainerConfig(
            trainable=False,
            dtype=config.dtype,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
            parallel=config.parallel.replace(data_parallel_size=config.replicas),
            execution=config.execution,
        )
        trainer = MegatronTrainer(path, shards, None, spec)
        try:
            super().__init__(trainer, config, spec)
        except BaseException:
            trainer.close()
            raise

    def _check_update(self, update: WeightUpdate) -> None:
        InferenceEngine._check_update(self, update)

    def _load(self, update: WeightUpdate) -> None:
        InferenceEngine._load(self, update)

    def _begin_load(self) -> None:
        self._requeue()

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        with shim.active():
            for parameter, value in self._trainer.weights.cut(bucket):
                self._trainer.assign(parameter, "param", value)

    def _release(self) -> None:
        trainer: Any = self._trainer
        super()._release()
        trainer.close()


def _groups(rows: Sequence[Sequence[int]], budget: int) -> list[list[Sequence[int]]]:
    """Neighbours, each group at most `budget` tokens with its padding, but at least one row."""
    groups: list[list[Sequence[int]]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row))
        if groups and longest * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = len(row)
    return groups


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
