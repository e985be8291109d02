"""Laws P1 to P3: a trainer and an engine together. Each check is a function too, for pairs that no suite makes."""

from __future__ import annotations

import dataclasses

from verl_adaptor.batch import collate
from verl_adaptor.capabilities import Capability, Role
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.samples import Prompt, SamplingParams, Trajectory
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws import law

TRAINING: Role = "training"
INFERENCE: Role = "inference"
PROBE = 264
"""Tokens of the probe: more than two blocks of any engine's cache (C22, C34)."""


@law("P1", TRAINING)
def a_sync_reaches_the_reference_engine(bench: Bench) -> None:
    """This trainer with the reference engine: after each of three syncs, `score` equals the trainer's."""
    with bench.trainer(learning_rate=0.05) as trainer:
        engine_scores_as_trainer(trainer, bench.reference_engine(), bench)


@law("P1", INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def a_sync_from_the_reference_trainer(bench: Bench) -> None:
    """The reference trainer with this engine."""
    with bench.engine() as engine:
        engine_scores_as_trainer(bench.reference_trainer(learning_rate=0.05), engine, bench)


@law("P2", TRAINING, INFERENCE, needs=(Capability.UPDATE_WEIGHTS,))
def the_first_ratio_is_one(bench: Bench) -> None:
    """On fresh samples of the synced policy, exp(trainer - engine) is 1 within 1e-3 (C20)."""
    with bench.trainer(learning_rate=0.02) as trainer, bench.engine() as engine:
        first_ratio_is_one(trainer, engine, bench)


@law("P3", TRAINING, INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def nothing_drifts_at_learning_rate_zero(bench: Bench) -> None:
    """Twenty syncs at learning rate 0 leave `score` where it was (C21, C28)."""
    with bench.trainer(learning_rate=0.0, weight_decay=0.0) as trainer, bench.engine() as engine:
        nothing_drifts(trainer, engine, bench)


# -- checks of one pair ------------------------------------------------------------------------------------------


def engine_scores_as_trainer(trainer: TrainerBackend, engine: InferenceEngine, bench: Bench) -> float:
    """P1: three updates, each followed by a sync after which both agree on a probe that the engine had cached before.

    Returns:
        The largest difference, in nats.
    """
    probe = list(bench.prompts(1, seed=37, longest=300)[0])
    while len(probe) < PROBE:
        probe += probe
    probe = probe[: min(PROBE, engine.model.max_model_len - 1)]
    sync(trainer, engine)
    before, largest = engine.score([probe])[0], 0.0
    for step in (1, 2, 3):
        engine.generate([probe], SamplingParams(max_tokens=1))  # fills the prefix cache
        trainer.update(bench.batch(seed=step), policy_gradient)
        sync(trainer, engine)
        after = engine.score([probe])[0]
        largest = max(abs(a - b) for a, b in zip(after[1:], trainer_scores(trainer, probe), strict=True))
        assert largest <= 1e-4, f"sync {step}: engine and trainer differ by {largest:.1e} nats"
        [sampled] = engine.generate([probe], SamplingParams(max_tokens=1, seed=step))
        again = engine.score([[*probe, *sampled.token_ids]])[0][-1]
        assert abs(again - sampled.log_probs[0]) <= 1e-4, f"sync {step}: generation does not use the new policy"
    moved = max(abs(a - b) for a, b in zip(after, before, strict=True))
    assert moved >= 1e-2, f"the weights hardly moved ({moved:.1e} nats): the law proved nothing"
    return largest


def first_ratio_is_one(trainer: TrainerBackend, engine: InferenceEngine, bench: Bench) -> float:
    """P2. Returns how far the furthest ratio is from 1."""
    trainer.update(bench.batch(), policy_gradient)
    sync(trainer, engine)
    prompts = [Prompt(token_ids=ids) for ids in bench.prompts(6)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.7, seed=0))
    pairs = zip(completions, prompts, strict=True)
    batch = collate([Trajectory.from_completion(c, p, temperature=0.7) for c, p in pairs], pad_token_id=0)
    gap = trainer.compute_log_probs(batch).log_probs - batch["rollout_log_probs"]
    off = float((gap[batch["response_mask"] > 0].exp() - 1).abs().max())
    assert off <= 1e-3, f"first ratio off by {off:.1e}"
    return off


def nothing_drifts(trainer: TrainerBackend, engine: InferenceEngine, bench: Bench) -> None:
    """P3, for a trainer whose learning rate and weight decay are 0."""
    probe = bench.prompts(2, seed=31, longest=40)
    sync(trainer, engine)
    before, version = engine.score(probe), engine.policy_version
    for step in range(20):
        trainer.update(bench.batch(2, seed=step), policy_gradient)
        sync(trainer, engine)
    assert engine.policy_version == version + 20
    assert engine.score(probe) == before, "the policy drifted though nothing was learnt"


def sync(trainer: TrainerBackend, engine: InferenceEngine) -> None:
    """The trainer's weights as the engine's next version, which may have served another trainer's before; each tensor arrives
    with the bytes that it was sent with."""
    version = engine.policy_version + 1
    engine.update_weights(dataclasses.replace(trainer.export_weights(digests=True), version=version))
    assert engine.policy_version == version


def trainer_scores(trainer: TrainerBackend, ids: list[int]) -> list[float]:
    """The trainer's own log-probs of all tokens but the first two, as one response to a two-token prompt."""
    count = len(ids) - 2
    trajectory = Trajectory(
        prompt_ids=tuple(ids[:2]),
        response_ids=tuple(ids[2:]),
        response_mask=(1,) * count,
        rollout_log_probs=(0.0,) * count,
        finish_reason="length",
    )
    return trainer.compute_log_probs(collate([trajectory], pad_token_id=0)).log_probs[0].tolist()
