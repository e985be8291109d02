"""Laws T1 to T7: what every trainer must do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from tensordict import TensorDict

from verl_adaptor.capabilities import Capability, Role
from verl_adaptor.config import LossAggregation
from verl_adaptor.errors import NonFiniteGradient, TrainerClosed, TrainerError
from verl_adaptor.protocols import LossOutput, TrainerBackend
from verl_adaptor.protocols.trainer import Loss
from verl_adaptor.samples import WeightUpdate
from verl_adaptor.testing.bench import Bench, policy_gradient, squared_error
from verl_adaptor.testing.laws import law

TRAINING: Role = "training"
INFERENCE: Role = "inference"
STEPS = 5
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.8, 0.95), "max_grad_norm": 0.5}
"""Away from the defaults, so that a swallowed option shows."""
SPLITS: tuple[dict[str, Any], ...] = ({}, {"micro_batch_size": 1}, {"micro_batch_size": 4})
LOG_PROB, LOSS, WEIGHT = 1e-5, 1e-5, 5e-5
WORST = 7.0
"""An advantage that marks a row."""


@law("T1", TRAINING)
def log_probs_are_the_oracles(bench: Bench) -> None:
    """Log-probs equal the oracle's whatever the padding side and micro-batch size (C02, C07, C16)."""
    batches = {temperature: bench.batch(temperature=temperature) for temperature in (1.0, 0.6)}
    truths = {t: oracle_log_probs(bench, batch, t) for t, batch in batches.items()}
    for settings in SPLITS[:2]:
        with bench.trainer(**settings) as trainer:
            for temperature, batch in batches.items():
                truth, mask = truths[temperature], response_tokens(batch)
                for padded in (batch, extra_padding(batch)):
                    got = trainer.compute_log_probs(padded).log_probs[:, : truth.shape[1]]
                    gap = float((got - truth)[mask].abs().max())
                    assert gap <= LOG_PROB, f"log-probs differ by {gap:.1e} (T={temperature}, {settings})"


@law("T1", TRAINING, needs=(Capability.PACKING,))
def packing_leaks_nothing(bench: Bench) -> None:
    """Sequences laid end to end have the log-probs they have alone (C17)."""
    batch = bench.batch(8)
    with bench.trainer(packing=True) as trainer:
        got = trainer.compute_log_probs(batch).log_probs
    gap = float((got - oracle_log_probs(bench, batch, 1.0))[response_tokens(batch)].abs().max())
    assert gap <= LOG_PROB, f"packed log-probs differ by {gap:.1e}"


@law("T1", TRAINING, needs=(Capability.PACKING,))
def a_shared_prompt_is_the_same_prompt(bench: Bench) -> None:
    """Samples of one prompt, packed together, have the log-probs, and give the update, that they have apart."""
    batch = bench.batch(8, shared=3)
    mask = response_tokens(batch)
    with bench.trainer(packing=True) as together, bench.trainer(micro_batch_size=1) as apart:
        gap = (together.compute_log_probs(batch).log_probs - apart.compute_log_probs(batch).log_probs)[mask]
        assert float(gap.abs().max()) <= LOG_PROB, f"log-probs differ by {float(gap.abs().max()):.1e}"
        runs = [run(trainer, bench, batch=batch) for trainer in (together, apart)]
    assert_same_run(runs[0], runs[1], "shared prompts")


@law("T2", TRAINING)
def one_update_is_the_same_update(bench: Bench) -> None:
    """Micro-batch size and row order change nothing over five steps (C06, C20)."""
    expected = run(bench.reference_trainer(**OPTIONS), bench)
    assert min(expected.grad_norms) > 0.5, "the clip does nothing here: the law would not see it swallowed"
    for settings in SPLITS:
        reverse = settings == SPLITS[-1]
        with bench.trainer(**OPTIONS, **settings) as trainer:
            assert_same_run(run(trainer, bench, reverse=reverse), expected, f"{settings}, rows reversed: {reverse}")


@law("T2", TRAINING, needs=(Capability.TOKEN_BUDGET,))
def a_token_budget_is_the_same_update(bench: Bench) -> None:
    """So does splitting by tokens."""
    with bench.trainer(max_tokens_per_micro_batch=24) as trainer:
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), "token budget")


@law("T2", TRAINING, needs=(Capability.PACKING,))
def packing_is_the_same_update(bench: Bench) -> None:
    """So does packing."""
    with bench.trainer(packing=True, micro_batch_size=3) as trainer:
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), "packing")


@law("T2", TRAINING, needs=(Capability.ACTIVATION_CHECKPOINTING,))
def checkpointing_is_the_same_update(bench: Bench) -> None:
    """So does recomputing activations (C30)."""
    with bench.trainer(activation_checkpointing=True, micro_batch_size=3) as trainer:
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), "activation checkpointing")


@law("T2", TRAINING, needs=(Capability.BF16,))
def bf16_stays_near(bench: Bench) -> None:
    """bfloat16 compute: first loss within 2e-3, grad norm within 2 %, five steps' update within 10 % of its norm."""
    batch, path = bench.batch(24), bench.smooth_path
    reference = bench.reference_trainer(path)
    before = weights(reference)
    expected = run(reference, bench, batch=batch)
    with bench.trainer(path, dtype="bfloat16") as trainer:
        got = run(trainer, bench, batch=batch)
    assert abs(got.losses[0] - expected.losses[0]) <= 2e-3, (got.losses, expected.losses)
    assert abs(got.grad_norms[0] / expected.grad_norms[0] - 1) <= 0.02, (got.grad_norms, expected.grad_norms)
    moved = sum(float((expected.weights[n] - before[n]).square().sum()) for n in before) ** 0.5
    apart = sum(float((expected.weights[n] - got.weights[n]).square().sum()) for n in before) ** 0.5
    assert apart <= 0.1 * moved, f"the updates are {apart / moved:.1%} of their norm apart"


@law("T2", TRAINING, needs=(Capability.VALUE_HEAD,))
def a_critic_makes_the_same_update(bench: Bench) -> None:
    """A value head is read from the model's folder; its values, losses, grad norms and updates are the reference's."""
    losses, norms, values = critic_run(bench.reference_trainer(bench.critic_path, head="value", **OPTIONS), bench)
    assert losses[-1] < losses[0], "the critic does not learn: the law would not see one that stands still"
    for settings in SPLITS[:2]:
        with bench.trainer(bench.critic_path, head="value", **OPTIONS, **settings) as critic:
            got_losses, got_norms, got_values = critic_run(critic, bench)
        loss = max(abs(a - b) for a, b in zip(got_losses, losses, strict=True))
        norm = max(abs(a - b) / b for a, b in zip(got_norms, norms, strict=True))
        value = float((got_values - values).abs().max())
        assert loss <= 2 * LOSS and norm <= 2 * LOSS and value <= 1e-3, (
            f"{settings}: loss differs by {loss:.1e}, grad norm by {norm:.1e} of itself, values by {value:.1e}"
        )


@law("T3", TRAINING)
def the_five_aggregations(bench: Bench) -> None:
    """Each aggregation is taken over the global mini-batch: split and whole agree with the formula."""
    batch = bench.batch()
    with bench.trainer() as probe:
        per_token = -probe.compute_log_probs(batch).log_probs * batch["advantages"]
    for mode in get_args(LossAggregation):
        expected = aggregated(per_token, batch["response_mask"], mode)
        with bench.trainer(loss_aggregation=mode, micro_batch_size=4) as trainer:  # of 6 rows: uneven
            got = trainer.update(batch, policy_gradient)["loss"]
        assert abs(got - expected) <= LOSS * max(1.0, abs(expected)), f"{mode}: {got} for {expected}"


@law("T4", TRAINING)
def exported_is_what_was_loaded(bench: Bench) -> None:
    """Exported weights equal the model's, bit for bit, under Hugging Face names, tied weights once."""
    with bench.trainer() as trainer:
        exported = weights(trainer)
        update = trainer.export_weights()
    stored = stored_weights(Path(bench.path))
    assert stored.keys() <= exported.keys() | update.tied.keys(), f"not exported: {stored.keys() - exported.keys()}"
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored[name]), f"{name} is not what was loaded"
    metas = {meta.name: meta for meta in update.tensors}
    assert metas.keys() == exported.keys()
    assert all(tuple(exported[n].shape) == metas[n].shape for n in metas)
    assert all(alias not in metas and target in metas for alias, target in update.tied.items())


@law("T4", TRAINING)
def versions_advance_with_the_weights(bench: Bench) -> None:
    """An export after an update has the next version; another export of the same weights does not."""
    with bench.trainer() as trainer:
        assert trainer.export_weights().version == 0
        trainer.update(bench.batch(), policy_gradient)
        assert trainer.export_weights().version == trainer.export_weights().version == 1


@law("T7", TRAINING)
def a_nan_never_reaches_the_weights(bench: Bench) -> None:
    """A non-finite gradient is skipped and counted, or raised; weights and later steps are as if it had not been."""
    batch = bench.batch()
    batch["advantages"][0, 0] = WORST
    with bench.trainer() as clean, bench.trainer() as hit, bench.trainer(non_finite="raise") as strict:
        for trainer in (clean, hit):
            trainer.update(batch, policy_gradient)
        before = weights(hit)
        assert hit.update(batch, poisoned)["skipped"] == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(hit).items()), (
            "a NaN reached the weights"
        )
        after = [trainer.update(batch, policy_gradient) for trainer in (clean, hit)]
        assert after[0] == after[1], f"the skipped step left a trace: {after}"
        try:
            strict.update(batch, poisoned)
        except NonFiniteGradient:
            return
    raise AssertionError("non_finite='raise' did not raise")


@law("T7", TRAINING)
def a_failing_loss_leaves_no_trace(bench: Bench) -> None:
    """Where the loss fails, in whichever way and micro-batch, `update` raises TrainerError; the next is as if it had not."""
    batch = bench.batch()
    with bench.trainer(micro_batch_size=2) as clean, bench.trainer(micro_batch_size=2) as hit:
        ways = {"cannot be scored": raises, "must be LossOutput": is_no_loss, "a pair (sum, weight)": has_no_weight}
        for row, (sentence, way) in zip((0, len(batch) // 2, len(batch) - 1), ways.items(), strict=True):
            marked = batch.clone()
            marked["advantages"][row, 0] = WORST
            try:
                hit.update(marked, partial(failing, way))
            except TrainerError as error:
                assert sentence in str(error), f"another error: {error!r}"
            else:
                raise AssertionError("the loss failed, and update did not")
        results = [[trainer.update(batch, policy_gradient) for _ in range(2)] for trainer in (clean, hit)]
        assert results[0] == results[1], f"the failed step left a trace: {results}"


@law("I10", TRAINING)
def a_closed_trainer_refuses(bench: Bench) -> None:
    """Close twice; use after close is `TrainerClosed`; the process is left as found (I9, I10 for trainers)."""
    before = (dict(os.environ), torch.random.get_rng_state().tolist(), torch.get_num_threads(), signal.getsignal(2))
    trainer = bench.trainer()
    trainer.update(bench.batch(), policy_gradient)
    trainer.close()
    trainer.close()
    after = (dict(os.environ), torch.random.get_rng_state().tolist(), torch.get_num_threads(), signal.getsignal(2))
    names = ("environment", "torch RNG", "threads", "signal handlers")
    effects = [name for name, then, now in zip(names, before, after, strict=True) if then != now]
    declared = " ".join(bench.spec.process_effects)
    assert all(name in declared for name in effects), f"changed and not declared in process_effects: {effects}"
    try:
        trainer.compute_log_probs(bench.batch())
    except TrainerClosed:
        return
    raise AssertionError("a closed trainer still answers")


# -- helpers -----------------------------------------------------------------------------------------------------


def critic_run(critic: TrainerBackend, bench: Bench) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses and grad norms of a few updates, and the values after them at real response tokens."""
    batch = bench.batch()
    results = [critic.update(batch, squared_error) for _ in range(STEPS)]
    values = critic.compute_values(batch)[response_tokens(batch)]
    return [r["loss"] for r in results], [r["grad_norm"] for r in results], values


class Run:
    """What a few updates gave."""

    def __init__(self, results: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> None:
        self.losses = [r["loss"] for r in results]
        self.grad_norms = [r["grad_norm"] for r in results]
        self.learning_rates = [r["learning_rate"] for r in results]
        self.weights = weights


def run(
    trainer: TrainerBackend,
    bench: Bench,
    *,
    steps: int = STEPS,
    reverse: bool = False,
    batch: TensorDict | None = None,
) -> Run:
    """A few updates on one batch of unequal lengths."""
    batch = bench.batch() if batch is None else batch
    if reverse:
        batch = batch[torch.arange(len(batch) - 1, -1, -1)]
    results = [trainer.update(batch, policy_gradient) for _ in range(steps)]
    return Run(results, weights(trainer))


def assert_same_run(got: Run, expected: Run, what: str) -> None:
    """Law T2's tolerances."""
    loss = max(abs(a - b) for a, b in zip(got.losses, expected.losses, strict=True))
    norm = max(abs(a - b) for a, b in zip(got.grad_norms, expected.grad_norms, strict=True))
    weight = max(float((got.weights[n] - expected.weights[n]).abs().max()) for n in expected.weights)
    assert loss <= LOSS and norm <= LOSS and weight <= WEIGHT, (
        f"{what}: loss differs by {loss:.1e}, grad norm by {norm:.1e}, weights by {weight:.1e}"
    )


def weights(trainer: TrainerBackend) -> dict[str, torch.Tensor]:
    """A copy of the exported weights."""
    return copied(trainer.export_weights())


def copied(update: WeightUpdate) -> dict[str, torch.Tensor]:
    """A copy of the tensors of an update."""
    return {n: t.detach().cpu().clone() for bucket in update.buckets() for n, t in bucket.items()}


def stored_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, under the names in its files."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def response_tokens(batch: TensorDict) -> torch.Tensor:
    """[B, R] True at real response tokens, observations included."""
    return batch["attention_mask"][:, -batch["responses"].shape[1] :].bool()


def oracle_log_probs(bench: Bench, batch: TensorDict, temperature: float) -> torch.Tensor:
    """[B, R] by one unpadded forward of the oracle a row."""
    width = batch["responses"].shape[1]
    truth = torch.zeros(batch["responses"].shape)
    for row in range(len(batch)):
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real].tolist()
        count = int(real[-width:].sum())
        table = bench.log_probs(ids, temperature)[-count:]
        truth[row, :count] = table.gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]
    return truth


def extra_padding(batch: TensorDict) -> TensorDict:
    """The same rows with three more padding columns on either side."""
    side = torch.full((len(batch), 3), 5)
    padded = {key: batch[key] for key in ("temperature",)}
    for key in ("input_ids", "attention_mask", "position_ids"):
        filler = side if key == "input_ids" else torch.zeros_like(side)
        padded[key] = torch.cat([filler, batch[key], filler], dim=1)
    padded["responses"] = torch.cat([batch["responses"], side], dim=1)
    return TensorDict(padded, batch_size=batch.batch_size)


def aggregated(per_token: torch.Tensor, mask: torch.Tensor, mode: str) -> float:
    """The five aggregations written out over the whole batch."""
    per_row = (per_token * mask).sum(-1)
    rows = int((mask.sum(-1) > 0).sum())
    formulas: Mapping[str, Callable[[], torch.Tensor]] = {
        "token-mean": lambda: per_row.sum() / mask.sum(),
        "token-sum": lambda: per_row.sum(),
        "seq-mean-token-sum": lambda: per_row.sum() / rows,
        "seq-mean-token-sum-norm": lambda: per_row.sum() / rows / mask.shape[1],
        "seq-mean-token-mean": lambda: (per_row / mask.sum(-1)).sum() / rows,
    }
    return float(formulas[mode]())


def poisoned(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """A loss whose gradient is NaN, because of the one row with the largest advantage: on one rank of several."""
    worst = (batch["advantages"].max(-1).values == WORST)[:, None]
    return LossOutput(torch.where(worst, outputs["log_probs"] * float("nan"), outputs["log_probs"]))


def failing(way: Loss, outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """A loss that fails for the one row with the largest advantage: on one rank of several."""
    return (way if batch["advantages"].max() == WORST else policy_gradient)(outputs, batch)


def raises(*_: Any) -> LossOutput:
    """Nothing."""
    raise ValueError("this row cannot be scored")


def is_no_loss(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> Any:
    """A tensor where `LossOutput` is asked for."""
    return outputs["log_probs"]


def has_no_weight(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """A metric that is no (sum, weight)."""
    return LossOutput(-outputs["log_probs"], {"length": 9.0})  # type: ignore[dict-item]


def refuses(error: type[Exception], call: Callable[[TrainerBackend], Any], trainer: TrainerBackend) -> None:
    """`call` raises `error`, or the law is broken."""
    try:
        call(trainer)
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")
