"""The suite is itself tested: backends that return plausible wrong values are each caught by the law meant for them."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_adaptor import factory
from verl_adaptor.backends.hf.engine import HFEngine
from verl_adaptor.backends.hf.trainer import HFTrainer
from verl_adaptor.batch import denominators
from verl_adaptor.registry import get_spec, register
from verl_adaptor.samples import Delta
from verl_adaptor.testing import saboteurs, suite  # noqa: F401 - importing the suite registers the laws
from verl_adaptor.testing.bench import Bench
from verl_adaptor.testing.laws import LAWS

# -- engines -----------------------------------------------------------------------------------------------------


class StaleWeights(HFEngine):
    """Takes every bucket and writes none (C04)."""

    def _load(self, update):
        for _ in update.buckets():
            pass


class HalfAnUpdate(HFEngine):
    """Writes some of the tensors: a mixture of two policies (C34)."""

    def _load(self, update):
        before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        super()._load(update)
        for name in list(before)[::3]:
            self._tensors[name].copy_(before[name])


class ForgottenVersion(HFEngine):
    def update_weights(self, update, *, in_flight="wait"):
        super().update_weights(dataclasses.replace(update, version=0), in_flight=in_flight)


class WritesBeforeItChecks(HFEngine):
    def update_weights(self, update, *, in_flight="wait"):
        for tensor in self._tensors.values():
            tensor.add_(1e-3)
        super().update_weights(update, in_flight=in_flight)


class ShiftedLogProbs(HFEngine):
    def _step(self):
        return [dataclasses.replace(d, log_probs=tuple(value - 0.01 for value in d.log_probs)) for d in super()._step()]


class RawLogProbs(HFEngine):
    """Reports log-probs at temperature 1 (C02)."""

    def _step(self):
        deltas = super()._step()
        for i, d in enumerate(deltas):
            sample = self._dispatch.samples[d.request_id, d.index]
            ids = [*sample.prompt_token_ids, *sample.token_ids, *d.token_ids]
            deltas[i] = dataclasses.replace(d, log_probs=tuple(self._score([ids], 1.0)[0][-len(d.token_ids) :]))
        return deltas


class DroppedEOS(HFEngine):
    """Strips the EOS token that ended a response (C05)."""

    def _step(self):
        return [
            dataclasses.replace(d, token_ids=d.token_ids[:-1], log_probs=d.log_probs[:-1])
            if d.finish_reason == "stop"
            else d
            for d in super()._step()
        ]


class CallsEverythingStop(HFEngine):
    """Says stop where max_tokens cut (C19)."""

    def _step(self):
        return [dataclasses.replace(d, finish_reason="stop" if d.finish_reason else None) for d in super()._step()]


class OneSeedForAll(HFEngine):
    """The n samples of a prompt share a seed."""

    def _admit(self, samples):
        for sample in samples:
            sample.seed = 1
        super()._admit(samples)


class SeedOfTheBatch(HFEngine):
    """A sample depends on what is admitted with it."""

    def _admit(self, samples):
        for place, sample in enumerate(samples):
            sample.seed += place
        super()._admit(samples)


class GreedyIsNot(HFEngine):
    """Greedy takes a random token: temperature 0 became 'a little'."""

    def _admit(self, samples):
        for sample in samples:
            if sample.params.temperature == 0:
                sample.params = sample.params.replace(temperature=0.5)
        super()._admit(samples)


class NoValidation(HFEngine):
    def _check_request(self, prompt, params):
        pass


class GlobalRNG(HFEngine):
    def _step(self):
        torch.rand(1)
        return super()._step()


class LosesTheLastDelta(HFEngine):
    """The stream's deltas do not join: one token's text is lost."""

    async def stream(self, prompt, params=None):
        async for delta in super().stream(prompt, params):
            yield (
                delta
                if delta.finish_reason is None
                else Delta(request_id=delta.request_id, finish_reason=delta.finish_reason)
            )


class DeafToAbort(HFEngine):
    """Abort ends nothing, so that the request keeps its place."""

    def abort(self, request_ids):
        pass


class AnswersAfterClose(HFEngine):
    def close(self):
        pass


class LeakedProcess(HFEngine):
    """Starts a helper process and forgets it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        LEAKED.append(subprocess.Popen(["sleep", "60"]))


LEAKED: list[subprocess.Popen[bytes]] = []


# -- trainers ----------------------------------------------------------------------------------------------------


class MeanOfEachPart(HFTrainer):
    """Divides by the tokens of the micro-batch (C06)."""

    def _forward_backward(self, batch, loss, over):
        half = max(1, len(batch) // 2)
        parts = [batch[:half], batch[half:]]
        results = [
            super(MeanOfEachPart, self)._forward_backward(
                part, loss, dataclasses.replace(denominators(part), tokens=denominators(part).tokens * len(parts))
            )
            for part in parts
        ]
        return {name: sum(r[name] for r in results) for name in results[0]}


class NoTemperature(HFTrainer):
    """Log-probs at temperature 1 whatever the rollout used (C02)."""

    def _compute_log_probs(self, batch):
        return super()._compute_log_probs(batch.clone().set("temperature", torch.ones(len(batch))))


class OffByOne(HFTrainer):
    """Hands each token the log-prob of its neighbour (verl's alignment missed by one)."""

    def _compute_log_probs(self, batch):
        found = super()._compute_log_probs(batch)
        return found._replace(log_probs=found.log_probs.roll(1, dims=-1))


class MaskedObservations(HFTrainer):
    """Attends to sampled tokens only (C16)."""

    def _compute_log_probs(self, batch):
        batch = batch.clone()
        width = batch["responses"].shape[1]
        batch["attention_mask"][:, -width:] *= (torch.arange(width) != 1).long()
        return super()._compute_log_probs(batch)


class LostOptimizerState(HFTrainer):
    def _load_checkpoint(self, folder):
        super()._load_checkpoint(folder)
        self._optimizer._adamw.state.clear()


class RestartedSchedule(HFTrainer):
    """Resumes with the learning rate of step 0 (C10)."""

    def _load_checkpoint(self, folder):
        super()._load_checkpoint(folder)
        self._optimizer.steps = 0


class LostVersion(HFTrainer):
    def _load_checkpoint(self, folder):
        super()._load_checkpoint(folder)
        self._version = 0


class LoadsAnything(HFTrainer):
    def _load_checkpoint(self, folder):
        try:
            super()._load_checkpoint(folder)
        except Exception:
            self.swallowed = True


class StaleExport(HFTrainer):
    """Exports a copy made once."""

    def _export_weights(self):
        update = super()._export_weights()
        if not hasattr(self, "_copy"):
            self._copy = [{n: t.clone() for n, t in bucket.items()} for bucket in update.buckets()]
        return dataclasses.replace(update, buckets=lambda: iter(self._copy))


class RoundedExport(HFTrainer):
    """Exports through bfloat16."""

    def _export_weights(self):
        update = super()._export_weights()

        def buckets():
            for bucket in update.buckets():
                yield {name: tensor.bfloat16().float() for name, tensor in bucket.items()}

        return dataclasses.replace(update, buckets=buckets)


class FrozenVersion(HFTrainer):
    def export_weights(self):
        self._changed = False
        return super().export_weights()


class SwallowedOptions(HFTrainer):
    """Ignores betas and clipping."""

    def __init__(self, path, config, options, spec):
        super().__init__(path, config.replace(betas=(0.9, 0.999), max_grad_norm=None), options, spec)


class NaNGoesThrough(HFTrainer):
    """A NaN gradient is replaced by zeros and stepped with."""

    def _optimizer_step(self):
        for parameter in self._optimizer.parameters.values():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return super()._optimizer_step()


SABOTEURS: list[tuple[type[Any], str, str]] = [
    (StaleWeights, "I6", "an_update_is_served_whole"),
    (HalfAnUpdate, "I6", "an_update_is_served_whole"),
    (ForgottenVersion, "I6", "an_update_is_served_whole"),
    (StaleWeights, "P1", "a_sync_from_the_reference_trainer"),
    (WritesBeforeItChecks, "I6", "a_wrong_update_changes_nothing"),
    (ShiftedLogProbs, "I2", "log_probs_are_the_tempered_policys"),
    (RawLogProbs, "I2", "log_probs_are_the_tempered_policys"),
    (DroppedEOS, "I1", "tokens_and_finish_reason"),
    (CallsEverythingStop, "I1", "tokens_and_finish_reason"),
    (GreedyIsNot, "I3", "greedy_is_the_oracles_greedy"),
    (OneSeedForAll, "I4", "a_seed_repeats_its_sample"),
    (SeedOfTheBatch, "I4", "a_seed_repeats_its_sample"),
    (LosesTheLastDelta, "I5", "sync_async_and_stream_agree"),
    (DeafToAbort, "I5", "an_aborted_request_frees_its_place"),
    (NoValidation, "I8", "a_bad_request_is_refused_alone"),
    (AnswersAfterClose, "I9", "close_is_final"),
    (LeakedProcess, "I9", "close_is_final"),
    (GlobalRNG, "I10", "the_process_is_left_as_found"),
    (NoTemperature, "T1", "log_probs_are_the_oracles"),
    (OffByOne, "T1", "log_probs_are_the_oracles"),
    (MaskedObservations, "T1", "log_probs_are_the_oracles"),
    (MeanOfEachPart, "T2", "one_update_is_the_same_update"),
    (SwallowedOptions, "T2", "one_update_is_the_same_update"),
    (MeanOfEachPart, "T3", "the_five_aggregations"),
    (RoundedExport, "T4", "exported_is_what_was_loaded"),
    (FrozenVersion, "T4", "versions_advance_with_the_weights"),
    (LostOptimizerState, "T5", "resume_is_exact"),
    (RestartedSchedule, "T5", "resume_is_exact"),
    (LostVersion, "T5", "resume_is_exact"),
    (LoadsAnything, "T5", "a_half_written_checkpoint_is_refused"),
    (NaNGoesThrough, "T7", "a_nan_never_reaches_the_weights"),
    (StaleExport, "P1", "a_sync_reaches_the_reference_engine"),
]


@pytest.mark.parametrize(
    ("saboteur", "number", "name"), SABOTEURS, ids=[f"{n}-{s.__name__}-{name}" for s, n, name in SABOTEURS]
)
def test_the_law_catches_it(saboteur: type[Any], number: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., Any] = factory.load_class
    monkeypatch.setattr(
        factory,
        "load_class",
        lambda spec, role: saboteur if issubclass(saboteur, honest(spec, role)) else honest(spec, role),
    )
    [law] = [law for law in LAWS if (law.number, law.name) == (number, name)]
    bench = Bench(get_spec("hf"))
    try:
        with pytest.raises(AssertionError):
            law.check(bench)
    finally:
        bench.close()
        while LEAKED:
            LEAKED[-1].kill()
            LEAKED.pop().wait()


# -- on several ranks, or of one framework -----------------------------------------------------------------------

TWO = {"data_parallel_size": 2}
ON_RANKS: list[tuple[str, type[Any], dict[str, Any], str]] = [
    ("hf", saboteurs.PerRankMean, {**TWO, "gradient_sync": "manual"}, "one_update_is_the_same_update"),
    ("hf", saboteurs.ForgottenRank, {**TWO, "gradient_sync": "manual"}, "one_update_is_the_same_update"),
    ("hf", saboteurs.LostEmbeddingGradient, {}, "checkpointing_is_the_same_update"),
    ("fsdp", saboteurs.NormOfOwnShards, TWO, "one_update_is_the_same_update"),
    ("fsdp", saboteurs.KeepsHalfAStep, {}, "a_failing_loss_leaves_no_trace"),
    (
        "megatron",
        saboteurs.UnmarkedNorms,
        {"tensor_parallel_size": 2, "sequence_parallel": True},
        "one_update_is_the_same_update",
    ),
    ("megatron", saboteurs.PlainlyConcatenated, {}, "log_probs_are_the_oracles"),
]


@pytest.mark.parametrize(("base", "trainer", "layout", "name"), ON_RANKS, ids=[row[1].__name__ for row in ON_RANKS])
def test_the_law_catches_it_on_ranks(base: str, trainer: type[Any], layout: dict[str, Any], name: str) -> None:
    spec = saboteurs.saboteur(base, trainer)
    register(spec)
    [law] = [law for law in LAWS if law.name == name]
    bench = Bench(spec, trainer_settings=layout)
    try:
        with pytest.raises(AssertionError, match=r"differ|trace"):
            law.check(bench)
    finally:
        bench.close()
