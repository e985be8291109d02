"""Laws P1 to P3: a trainer and an engine together."""

from __future__ import annotations

from verl_adaptor.batch import collate
from verl_adaptor.capabilities import Capability, Role
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.samples import Prompt, SamplingParams, Trajectory
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws import law

TRAINING: Role = "training"
INFERENCE: Role = "inference"


@law("P1", TRAINING)
def a_sync_reaches_the_reference_engine(bench: Bench) -> None:
    """This trainer with the reference engine: after each of three syncs, `score` equals the trainer's."""
    check_pair(bench.trainer(learning_rate=0.05), bench.reference_engine(), bench)


@law("P1", INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def a_sync_from_the_reference_trainer(bench: Bench) -> None:
    """The reference trainer with this engine."""
    check_pair(bench.reference_trainer(learning_rate=0.05), bench.engine(), bench)


@law("P2", TRAINING, INFERENCE, needs=(Capability.UPDATE_WEIGHTS,))
def the_first_ratio_is_one(bench: Bench) -> None:
    """On fresh samples of the synced policy, exp(trainer - engine) is 1 within 1e-3 (C20)."""
    with bench.trainer(learning_rate=0.02) as trainer, bench.engine() as engine:
        trainer.update(bench.batch(), policy_gradient)
        engine.update_weights(trainer.export_weights())
        prompts = [Prompt(token_ids=ids) for ids in bench.prompts(6)]
        completions = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.7, seed=0))
        pairs = zip(completions, prompts, strict=True)
        batch = collate([Trajectory.from_completion(c, p, temperature=0.7) for c, p in pairs], pad_token_id=0)
        gap = trainer.compute_log_probs(batch).log_probs - batch["rollout_log_probs"]
        ratio = gap[batch["response_mask"] > 0].exp()
        assert float((ratio - 1).abs().max()) <= 1e-3, f"first ratio off by {float((ratio - 1).abs().max()):.1e}"


@law("P3", TRAINING, INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def nothing_drifts_at_learning_rate_zero(bench: Bench) -> None:
    """Twenty syncs at learning rate 0 leave `score` where it was (C21, C28)."""
    probe = bench.prompts(2, seed=31, longest=40)
    with bench.trainer(learning_rate=0.0, weight_decay=0.0) as trainer, bench.engine() as engine:
        before = engine.score(probe)
        for sync in range(20):
            trainer.update(bench.batch(2, seed=sync), policy_gradient)
            engine.update_weights(trainer.export_weights())
        assert engine.policy_version == 20
        assert engine.score(probe) == before, "the policy drifted though nothing was learnt"


# -- helpers -----------------------------------------------------------------------------------------------------


def check_pair(trainer: TrainerBackend, engine: InferenceEngine, bench: Bench) -> None:
    """Three updates, each followed by a sync after which both agree on a probe longer than two cache blocks."""
    probe = list(bench.prompts(1, seed=37, longest=300)[0])
    while len(probe) < 264:
        probe += probe
    probe = probe[: min(264, engine.model.max_model_len - 1)]
    before = engine.score([probe])[0]
    for version in (1, 2, 3):
        trainer.update(bench.batch(seed=version), policy_gradient)
        engine.update_weights(trainer.export_weights())
        assert engine.policy_version == version
        after = engine.score([probe])[0]
        truth = trainer_scores(trainer, probe)
        gap = max(abs(a - b) for a, b in zip(after[1:], truth, strict=True))
        assert gap <= 1e-4, f"sync {version}: engine and trainer differ by {gap:.1e} nats"
    moved = max(abs(a - b) for a, b in zip(after, before, strict=True))
    assert moved >= 1e-2, f"the weights hardly moved ({moved:.1e} nats): the law proved nothing"


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
