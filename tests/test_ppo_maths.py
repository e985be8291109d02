"""Advantages, KL and losses: verl's numbers, and the laws that hold for any input."""

import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.batch import Denominators, aggregate, collate, denominators, spread_rewards
from verl_adaptor.config import KLConfig, PPOConfig, RolloutCorrectionConfig
from verl_adaptor.errors import BatchError, CheckpointError
from verl_adaptor.ppo.advantage import compute_advantages, gae, grpo, masked_whiten, reinforce_plus_plus, remax, rloo
from verl_adaptor.ppo.correction import correct_rollout
from verl_adaptor.ppo.kl import AdaptiveKLController, FixedKLController, apply_kl_penalty, estimate_kl, kl_controller
from verl_adaptor.ppo.loop import punish_truncated
from verl_adaptor.ppo.loss import PolicyLoss, ValueLoss
from verl_adaptor.protocols.trainer import LossOutput
from verl_adaptor.samples import Trajectory

ORACLE = json.loads((Path(__file__).parent / "data" / "verl_oracle.json").read_text(encoding="utf-8"))
S = ORACLE["settings"]
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
law = settings(max_examples=40, deadline=None, derandomize=True, database=None)

ESTIMATORS = {
    "gae": lambda x: gae(x["token_level_rewards"], x["values"], x["response_mask"], 0.95, 0.9),
    "grpo": lambda x: grpo(x["token_level_rewards"], x["response_mask"], x["group_ids"], True),
    "grpo_centred": lambda x: grpo(x["token_level_rewards"], x["response_mask"], x["group_ids"], False),
    "rloo": lambda x: rloo(x["token_level_rewards"], x["response_mask"], x["group_ids"]),
    "reinforce_plus_plus": lambda x: reinforce_plus_plus(x["token_level_rewards"], x["response_mask"], 0.95),
    "remax": lambda x: remax(x["token_level_rewards"], x["reward_baselines"], x["response_mask"]),
}
LOSSES = {
    "vanilla": PolicyLoss(entropy_coef=0.01, kl_coef=0.1),
    "gspo": PolicyLoss(objective="gspo", entropy_coef=0.01, kl_coef=0.1, kl_estimator="k2"),
    "cispo": PolicyLoss(objective="cispo", entropy_coef=0.01),
    "value": ValueLoss(),
}


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def make_batch(mask: Tensor, seed: int) -> TensorDict:
    """Random columns around a mask, under the keys of a batch; ``new_*`` is what a model would say now."""
    random = torch.Generator().manual_seed(seed)
    rows = len(mask)
    names = ["token_level_scores", "values", "advantages", "returns", "old_log_probs"]
    x = {name: torch.randn(mask.shape, generator=random) for name in names}
    for name in ("new_log_probs", "ref_log_prob"):
        x[name] = x["old_log_probs"] + 0.5 * torch.randn(mask.shape, generator=random)
    x["new_entropy"], x["new_values"] = torch.rand(2, *mask.shape, generator=random)
    x["token_level_rewards"] = x["token_level_scores"]
    x["group_ids"] = torch.randint(0, 2, (rows,), generator=random)
    x["reward_baselines"] = torch.randn(rows, generator=random)
    return TensorDict({"response_mask": mask, **x}, batch_size=[rows])


@st.composite
def batches(draw, rows: int = 5, columns: int = 6) -> TensorDict:
    """Any mask: observations, early ends, empty rows."""
    shape = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    mask = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return make_batch(torch.tensor(mask).float().view(shape), draw(st.integers(0, 2**31)))


def spoiled(batch: TensorDict, extra: int) -> TensorDict:
    """The same batch with `extra` columns more, and garbage wherever the mask is 0."""
    wide = {}
    outside = torch.nn.functional.pad(batch["response_mask"], (0, extra)) == 0
    for number, (name, value) in enumerate(sorted(batch.items())):
        if value.dim() == 2 and name != "response_mask":
            garbage = (float("nan"), float("inf"), -1e30, 7.0)[(number + extra) % 4]
            value = torch.nn.functional.pad(value, (0, extra)).masked_fill(outside, garbage)
        elif name == "response_mask":
            value = torch.nn.functional.pad(value, (0, extra))
        wide[name] = value
    return TensorDict(wide, batch_size=batch.batch_size)


def run_loss(name: str, batch: TensorDict) -> tuple[LossOutput, dict[str, Tensor]]:
    """The loss on a batch, and what the model said, ready for a backward pass."""
    kinds = ("values",) if name == "value" else ("log_probs", "entropy")
    outputs = {kind: batch[f"new_{kind}"].clone().requires_grad_() for kind in kinds}
    return LOSSES[name](outputs, batch), outputs


def total_and_gradients(name: str, batch: TensorDict, mode: str = "token-mean") -> tuple[Tensor, list[Tensor]]:
    output, outputs = run_loss(name, batch)
    total = aggregate(output.per_token, batch["response_mask"], mode, denominators(batch), scale=10.0)
    total.backward()
    # entropy is outside the graph where it has no coefficient
    return total.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in outputs.values()]


# -- verl's numbers --------------------------------------------------------------------------------------------------


@pytest.fixture(params=sorted(ORACLE["cases"]))
def case(request):
    return ORACLE["cases"][request.param]


@pytest.fixture
def inputs(case) -> TensorDict:
    x = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    return TensorDict({**x, "token_level_rewards": x["token_level_scores"]}, batch_size=[len(x["group_ids"])])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_verl(name, case, inputs):
    mask = inputs["response_mask"]
    for got, key in zip(ESTIMATORS[name](inputs), ("advantages", "returns"), strict=True):
        close(got, torch.tensor(case["advantages"][name][key]) * mask)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_equals_verl(estimator, case, inputs):
    log_probs = inputs["new_log_probs"].clone().requires_grad_()
    kl = estimate_kl(log_probs, inputs["ref_log_prob"], estimator)
    kl.sum().backward()
    close(kl.detach(), torch.tensor(case["kl_estimates"][estimator]["value"]))
    close(log_probs.grad, torch.tensor(case["kl_estimates"][estimator]["gradient"]))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_penalty_and_adaptive_controller_equal_verl(estimator, case, inputs):
    expected = case["kl_penalties"][estimator]
    config = KLConfig(
        where="reward", estimator=estimator, controller="adaptive",
        coef=S["kl_coef"], target=S["target"], horizon=S["horizon"],
    )  # fmt: skip
    controller = kl_controller(config)
    metrics = apply_kl_penalty(inputs, controller, config)
    close(inputs["token_level_rewards"], torch.tensor(expected["token_level_rewards"]))
    assert metrics == pytest.approx({"actor/reward_kl": expected["kl"], "actor/reward_kl_coef": S["kl_coef"]}, rel=1e-5)
    assert controller.value == pytest.approx(expected["coef_after"], rel=1e-6)
    assert controller.value != S["kl_coef"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", ["vanilla", "gspo", "cispo"])
def test_policy_losses_equal_verl(objective, mode, case, inputs):
    expected = case["policy_losses"][objective]
    mask, over = inputs["response_mask"], denominators(inputs)
    clips = {"clip_low": S["clip_low"], "clip_high": S["clip_high"], "dual_clip": S["dual_clip"]}
    log_probs = inputs["new_log_probs"].clone().requires_grad_()
    outputs = {"log_probs": log_probs, "entropy": inputs["new_entropy"]}
    output = PolicyLoss(objective=objective, **clips)(outputs, inputs)
    loss = aggregate(output.per_token, mask, mode, over)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"][mode], rel=1e-5, abs=1e-5)
    close(log_probs.grad, torch.tensor(expected["gradient"][mode]))
    metrics = {name: (total / weight).item() for name, (total, weight) in output.metrics.items()}
    assert metrics["clip_fraction"] == pytest.approx(expected["metrics"]["actor/pg_clipfrac"])
    assert metrics["clip_fraction_high"] + metrics["clip_fraction_low"] == pytest.approx(metrics["clip_fraction"])
    assert metrics["clip_fraction_dual"] == pytest.approx(expected["metrics"]["actor/pg_clipfrac_lower"])
    if mode == "token-mean":
        assert metrics["pg_loss"] == pytest.approx(loss.item(), rel=1e-5)

    whole = PolicyLoss(objective=objective, **clips, entropy_coef=S["entropy_coef"], kl_coef=S["kl_coef"])
    loss = aggregate(whole(outputs, inputs).per_token, mask, mode, over)
    assert loss.item() == pytest.approx(expected["loss_with_entropy_and_kl"][mode], rel=1e-5, abs=1e-5)


def test_ppo_kl_equals_verl():
    """Near policies only: far ones verl clamps in some objectives and not in others."""
    case = ORACLE["cases"]["near"]
    x = {name: torch.tensor(value) for name, value in case["inputs"].items()}
    outputs = {"log_probs": x["new_log_probs"], "entropy": x["new_entropy"]}
    total, weight = PolicyLoss()(outputs, TensorDict(x, batch_size=[6])).metrics["ppo_kl"]
    assert (total / weight).item() == pytest.approx(
        case["policy_losses"]["vanilla"]["metrics"]["actor/ppo_kl"], abs=1e-6
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("lower", [None, 0.5])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction_equals_verl(level, lower, normalize, case, inputs):
    expected = case["corrections"][f"{level} {'2.0' if lower is None else '0.5_2.0'} {normalize}"]
    config = RolloutCorrectionConfig(level=level, upper=2.0, lower=lower, normalize=normalize)
    metrics = correct_rollout(inputs, config)
    close(inputs["rollout_is_weights"], torch.tensor(expected["weights"]))
    assert metrics["mismatch/is_ess"] == pytest.approx(expected["ess"], rel=1e-4)
    assert 0 < metrics["mismatch/is_outside"] < 1
    outputs = {"log_probs": inputs["new_log_probs"], "entropy": inputs["new_entropy"]}
    loss = aggregate(
        PolicyLoss()(outputs, inputs).per_token, inputs["response_mask"], "token-mean", denominators(inputs)
    )
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)


@law
@given(batches(), st.sampled_from(["token", "sequence"]))
def test_what_the_policy_itself_sampled_has_weight_one(batch, level):
    batch["rollout_log_probs"] = batch["old_log_probs"]
    plain = {"log_probs": batch["new_log_probs"], "entropy": batch["new_entropy"]}
    before = PolicyLoss()(plain, batch).per_token
    correct_rollout(batch, RolloutCorrectionConfig(level=level, lower=0.5, normalize=True))
    close(batch["rollout_is_weights"], batch["response_mask"])
    close(PolicyLoss()(plain, batch).per_token, before)


@pytest.mark.parametrize("mode", MODES)
def test_value_loss_equals_verl(mode, case, inputs):
    values = inputs["new_values"].clone().requires_grad_()
    output = ValueLoss(clip=S["value_clip"])({"values": values}, inputs)
    loss = aggregate(output.per_token, inputs["response_mask"], mode, denominators(inputs))
    loss.backward()
    assert loss.item() == pytest.approx(case["value_losses"]["loss"][mode], rel=1e-5)
    close(values.grad, torch.tensor(case["value_losses"]["gradient"][mode]))
    total, weight = output.metrics["value_clip_fraction"]
    assert (total / weight).item() == pytest.approx(case["value_losses"]["clip_fraction"])


def test_aggregation_equals_verl_where_a_row_has_no_token(case, inputs):
    expected = case["aggregations"]
    inputs["response_mask"][expected["empty_row"]] = 0
    arguments = inputs["advantages"], inputs["response_mask"]
    for mode, value in expected["by_mode"].items():
        assert aggregate(*arguments, mode, denominators(inputs)).item() == pytest.approx(value, rel=1e-5)
    scaled = aggregate(*arguments, "seq-mean-token-sum-norm", denominators(inputs), S["scale"])
    assert scaled.item() == pytest.approx(expected["scaled"], rel=1e-5)


# -- laws of advantages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), extra=st.integers(0, 3))
@law
def test_padding_changes_no_advantage(name, batch, extra):
    """C05, C19, C35: garbage outside the mask, in whatever columns, is neither earned, nor whitened, nor returned."""
    columns = batch["response_mask"].shape[1]
    before = batch.clone()
    for got, expected in zip(ESTIMATORS[name](spoiled(batch, extra)), ESTIMATORS[name](batch), strict=True):
        close(got[:, :columns], expected)
        assert not got[:, columns:].any()
        assert not got[:, :columns][batch["response_mask"] == 0].any()
    assert (before == batch).all(), "an estimator changed its input"


def test_c27_the_missing_eos_penalty_looks_at_how_the_response_ended():
    """An EOS within the prompt, or an early one that the task ignored, is no end of the response."""
    eos = 2
    shared = {"prompt_ids": (5, eos, 6), "response_mask": (1, 1), "rollout_log_probs": (-1.0, -1.0)}
    cut_off = Trajectory(**shared, response_ids=(eos, 7), finish_reason="length")
    stopped = Trajectory(**shared, response_ids=(7, eos), finish_reason="stop")
    batch = collate([cut_off, stopped], pad_token_id=eos)
    batch["token_level_scores"] = torch.zeros(2, 2)
    punish_truncated(batch, [cut_off, stopped], -0.5)
    assert batch["token_level_scores"].tolist() == [[0.0, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), seed=st.integers(0, 2**31))
@law
def test_advantages_follow_their_rows(name, batch, seed):
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    for got, expected in zip(ESTIMATORS[name](batch[order]), ESTIMATORS[name](batch), strict=True):
        close(got, expected[order])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
@given(batch=batches())
@law
def test_c26_observations_are_stepped_over(name, batch):
    """Take the observation columns out of every row: the sampled tokens keep their advantages and returns."""
    mask = batch["response_mask"]
    sampled_first = (1 - mask).argsort(dim=-1, stable=True)
    compact = batch.clone()
    for key, value in batch.items():
        if value.dim() == 2:
            compact[key] = value.gather(1, sampled_first)
    for got, expected in zip(ESTIMATORS[name](compact), ESTIMATORS[name](batch), strict=True):
        close(got[compact["response_mask"] > 0], expected.gather(1, sampled_first)[compact["response_mask"] > 0])


EOS = 2


def rollouts() -> TensorDict:
    """Two turns; cut off without EOS after a prompt that holds one; EOS as pad and as last token; one token."""
    made = [
        ((5, 6), (7, 8, 40, 41, 9, EOS), (1, 1, 0, 0, 1, 1), "stop"),
        ((EOS, 5, 6, 7), (8, 9, 10), (1, 1, 1), "length"),
        ((5,), (EOS, EOS, EOS), (1, 1, 1), "stop"),
        ((5, 6), (EOS,), (1,), "stop"),
    ]
    trajectories = [
        Trajectory(prompt_ids=p, response_ids=r, response_mask=m, rollout_log_probs=(0.0,) * len(r), finish_reason=f)
        for p, r, m, f in made
    ]
    return collate(trajectories, pad_token_id=EOS)


@pytest.mark.parametrize("advantage", ["gae", "reinforce_plus_plus", "remax"])
def test_c05_c19_c26_c27_a_terminal_reward_reaches_every_sampled_token_and_no_other(advantage):
    """At gamma = lam = 1 whole, past a tool's answer; whether a row stopped on EOS, had one in its prompt, or none."""
    batch = rollouts()
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    batch["token_level_scores"] = spread_rewards(rewards.tolist(), batch["response_mask"])
    batch["values"] = torch.zeros_like(batch["response_mask"])
    batch["reward_baselines"] = torch.zeros(4)
    apply_kl_penalty(batch, FixedKLController(0.1), KLConfig(where="none"))
    compute_advantages(batch, PPOConfig(advantage=advantage, gamma=1.0, lam=1.0))
    close(batch["returns"], rewards[:, None] * batch["response_mask"])
    assert batch["response_mask"].sum(-1).tolist() == [4, 3, 3, 1]


def test_gamma_discounts_sampled_tokens_only():
    returns = reinforce_plus_plus(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 1.0]]), 0.5)[1]
    close(returns, torch.tensor([[0.25, 0.0, 0.5, 1.0]]))


@given(batch=batches())
@law
def test_c35_whitening_is_over_the_mask(batch):
    mask = batch["response_mask"] > 0
    white = masked_whiten(spoiled(batch, 0)["values"], mask)
    assert not white[~mask].any()
    if mask.sum() > 1:
        close(white[mask].mean(), torch.tensor(0.0), 1e-4)
        close(white[mask].std(), torch.tensor(1.0), 1e-3)
    else:
        assert not white.any()


@given(batch=batches(rows=8))
@law
def test_groups_are_compared_with_themselves(batch):
    """GRPO and RLOO sum to 0 in a group; RLOO's baseline is the mean of the others; a group of one keeps its score."""
    mask = batch["response_mask"]
    scored = mask.any(-1)
    scores = (batch["token_level_rewards"] * mask).sum(-1)
    of_row = {name: ESTIMATORS[name](batch)[0].sum(-1) / mask.sum(-1).clamp(min=1) for name in ("grpo", "rloo")}
    for group in batch["group_ids"].unique():
        rows = ((batch["group_ids"] == group) & scored).nonzero().flatten()
        if len(rows) == 1:
            close(of_row["grpo"][rows], scores[rows])
            close(of_row["rloo"][rows], scores[rows])
        elif len(rows):
            close(of_row["grpo"][rows].sum(), torch.tensor(0.0), 1e-4)
            others = torch.stack([scores[rows[rows != row]].mean() for row in rows])
            close(of_row["rloo"][rows], scores[rows] - others)


@given(score=st.floats(-10, 10, width=32), size=st.integers(2, 9))
@law
def test_equal_scores_have_no_advantage(score, size):
    """In float32 the mean of three 0.1 is not 0.1, and the division by a std of that size would make it 0.01."""
    rewards, mask = torch.full((size, 1), score), torch.ones(size, 1)
    close(grpo(rewards, mask, torch.zeros(size, dtype=torch.long))[0], torch.zeros(size, 1), 1e-6)


def test_advantages_name_the_column_they_lack():
    batch = rollouts()
    batch["token_level_rewards"] = torch.zeros_like(batch["response_mask"])
    with pytest.raises(BatchError, match="lacks values"):
        compute_advantages(batch, PPOConfig(advantage="gae"))
    batch["reward_baselines"] = torch.zeros(4, 1)  # would broadcast to [4, 4, R]
    with pytest.raises(BatchError, match=r"reward_baselines has shape \(4, 1\); expected \(4,\)"):
        compute_advantages(batch, PPOConfig(advantage="remax"))


# -- laws of the KL --------------------------------------------------------------------------------------------------


def test_mean_gradients_of_the_kl_estimators():
    """Over a whole vocabulary: k1 none, k2 that of KL(policy || reference), k3 that of KL(reference || policy)."""
    random = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 8, generator=random, dtype=torch.float64)
    reference = reference.log_softmax(-1)

    def gradient(of) -> Tensor:
        leaf = logits.clone().requires_grad_()
        of(leaf.log_softmax(-1)).backward()
        return leaf.grad

    def mean_gradient(estimator: str) -> Tensor:
        return gradient(lambda new: (new.detach().exp() * estimate_kl(new, reference, estimator)).sum())

    close(mean_gradient("k1"), torch.zeros_like(logits), 1e-12)
    close(mean_gradient("k2"), gradient(lambda new: (new.exp() * (new - reference)).sum()), 1e-12)
    close(mean_gradient("k3"), gradient(lambda new: (reference.exp() * (reference - new)).sum()), 1e-12)


@given(batch=batches(), extra=st.integers(0, 3))
@law
def test_padding_changes_no_kl_penalty(batch, extra):
    config = KLConfig(where="reward", controller="adaptive", coef=0.1, horizon=10)
    columns = batch["response_mask"].shape[1]
    wide = spoiled(batch, extra)
    controllers = kl_controller(config), kl_controller(config)
    assert apply_kl_penalty(wide, controllers[0], config) == pytest.approx(
        apply_kl_penalty(batch, controllers[1], config), abs=1e-5
    )
    close(wide["token_level_rewards"][:, :columns], batch["token_level_rewards"])
    assert not wide["token_level_rewards"][:, columns:].any()
    assert controllers[0].value == pytest.approx(controllers[1].value)


def test_a_row_without_tokens_is_no_sample_of_the_controller():
    config = KLConfig(where="reward", controller="adaptive", coef=0.1, horizon=10)
    batch = make_batch(torch.ones(3, 2), seed=0)
    with_empty_row = torch.cat([batch, make_batch(torch.zeros(1, 2), seed=1)])
    controllers = kl_controller(config), kl_controller(config)
    assert apply_kl_penalty(batch, controllers[0], config) == apply_kl_penalty(with_empty_row, controllers[1], config)
    assert controllers[0] == controllers[1]


@given(kl=st.floats(0, 10), rows=st.integers(1, 64))
@law
def test_adaptive_controller_steers_towards_its_target(kl, rows):
    controller = AdaptiveKLController(value=0.1, target=0.5, horizon=100)
    controller.update(kl, rows)
    assert (controller.value > 0.1) == (kl > 0.5) or controller.value == pytest.approx(0.1)
    assert abs(controller.value / 0.1 - 1) <= 0.2 * rows / 100 + 1e-9


def test_controllers_resume_where_they_were_and_refuse_each_other():
    used, fresh, fixed = (
        AdaptiveKLController(0.1, 0.5, 100),
        AdaptiveKLController(0.1, 0.5, 100),
        FixedKLController(0.3),
    )
    used.update(5.0, 64)
    fresh.load_state_dict(json.loads(json.dumps(used.state_dict())))
    assert fresh == used
    fixed.load_state_dict(fixed.state_dict())
    assert fixed.value == 0.3
    for loader, state in ((fixed, used.state_dict()), (fresh, fixed.state_dict())):
        with pytest.raises(CheckpointError, match=r"kl\.controller"):
            loader.load_state_dict(state)


# -- laws of losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(batch=batches(), extra=st.integers(0, 3), mode=st.sampled_from(MODES))
@law
def test_c16_padding_changes_no_loss_gradient_or_metric(name, batch, extra, mode):
    columns = batch["response_mask"].shape[1]
    wide = spoiled(batch, extra)
    total, gradients = total_and_gradients(name, batch, mode)
    wide_total, wide_gradients = total_and_gradients(name, wide, mode)
    close(wide_total, total)
    for got, expected in zip(wide_gradients, gradients, strict=True):
        close(got[:, :columns], expected)
        assert not got[:, columns:].any()
        assert not expected[batch["response_mask"] == 0].any()
    output, wide_output = run_loss(name, batch)[0], run_loss(name, wide)[0]
    assert not wide_output.per_token[wide["response_mask"] == 0].any()
    assert output.metrics.keys() == wide_output.metrics.keys()
    for key, pair in output.metrics.items():
        close(torch.stack(wide_output.metrics[key]), torch.stack(pair))


@pytest.mark.parametrize("name", LOSSES)
@given(batch=batches(), size=st.integers(1, 3), mode=st.sampled_from(MODES))
@law
def test_c06_c17_micro_batches_add_up(name, batch, size, mode):
    """Loss, gradient and metrics of the parts sum to the whole's: no row sees another, no part its own mean."""
    over = denominators(batch)

    def parts_of(rows: list[TensorDict]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, gradients, metrics = torch.tensor(0.0), [], {}
        for part in rows:
            output, outputs = run_loss(name, part)
            share = aggregate(output.per_token, part["response_mask"], mode, over)
            share.backward()
            loss = loss + share.detach()
            gradients.append(next(iter(outputs.values())).grad)
            for key, pair in output.metrics.items():
                assert not any(number.requires_grad for number in pair)
                metrics[key] = metrics.get(key, 0.0) + torch.stack(pair)
        return loss, torch.cat(gradients), metrics

    whole, parts = parts_of([batch]), parts_of(list(batch.split(size)))
    close(parts[0], whole[0])
    close(parts[1], whole[1])
    for key, value in whole[2].items():
        close(parts[2][key], value)


@pytest.mark.parametrize("objective", ["vanilla", "gspo", "cispo"])
@given(batch=batches())
@law
def test_c16_on_policy_nothing_is_clipped_and_the_gradient_is_the_policy_gradient(objective, batch):
    """At ratio 1 every objective has the gradient -A at each sampled token, and the clipped ones the value -A."""
    batch = spoiled(batch, 1)
    mask = batch["response_mask"]
    log_probs = batch["old_log_probs"].clone().requires_grad_()
    output = PolicyLoss(objective=objective)({"log_probs": log_probs, "entropy": batch["new_entropy"]}, batch)
    aggregate(output.per_token, mask, "token-sum", denominators(batch)).backward()
    expected = torch.where(mask > 0, -batch["advantages"], 0.0)
    close(log_probs.grad, expected)
    if objective != "cispo":
        close(output.per_token.detach(), expected)
    for name in ("clip_fraction", "clip_fraction_high", "clip_fraction_low", "clip_fraction_dual", "ppo_kl"):
        assert output.metrics[name][0] == 0


@given(ratio=st.floats(0.1, 6.0), advantage=st.floats(-2.0, 2.0).filter(lambda a: abs(a) > 0.01))
@law
def test_vanilla_gradient_is_live_exactly_where_it_may_be(ratio, advantage):
    """-A ratio inside the clip range and on the pessimistic side of it, up to the dual clip; 0 beyond."""
    if min(abs(ratio - edge) for edge in (0.8, 1.28, 3.0)) < 1e-3:
        return
    batch = TensorDict(
        {
            "response_mask": torch.ones(1, 1),
            "old_log_probs": torch.zeros(1, 1),
            "advantages": torch.full((1, 1), advantage),
        },
        batch_size=[1],
    )
    log_probs = torch.tensor([[ratio]]).log().requires_grad_()
    output = PolicyLoss(clip_high=0.28)({"log_probs": log_probs, "entropy": torch.zeros(1, 1)}, batch)
    output.per_token.sum().backward()
    high, low = advantage > 0 and ratio > 1.28, advantage < 0 and ratio < 0.8
    dual = advantage < 0 and ratio > 3
    live = not (high or low or dual)
    close(log_probs.grad, torch.tensor([[-advantage * ratio * live]]), 1e-4)
    fractions = [output.metrics[f"clip_fraction_{part}"][0].item() for part in ("high", "low", "dual")]
    assert fractions == [high, low, dual]


@pytest.mark.parametrize(
    ("loss", "at_plus_1000", "at_minus_1000"),
    [
        (PolicyLoss(dual_clip=None), [math.exp(20), -1.2], [0.8, -math.exp(-20)]),
        (PolicyLoss(), [3.0, -1.2], [0.8, -math.exp(-20)]),
        (PolicyLoss(objective="gspo"), [math.exp(10), -1.2], [0.8, 0.0]),
        (PolicyLoss(objective="cispo"), [1.2 * 1000, -1.2 * 1000], [0.8 * -1000, -0.8 * -1000]),
        (PolicyLoss(kl_coef=1.0), [3.0 + 10, -1.2 + 10], [0.8 + 10, -math.exp(-20) + 10]),
    ],
)
def test_far_off_policy_losses_are_bounded_and_gradients_finite(loss, at_plus_1000, at_minus_1000):
    """Losses of advantages -1 and 1 at a log-ratio of ±1000, where exp without a clamp is inf and its gradient NaN."""
    for log_ratio, expected in ((1000.0, at_plus_1000), (-1000.0, at_minus_1000)):
        columns = {"old_log_probs": torch.zeros(2, 1), "ref_log_prob": torch.zeros(2, 1)}
        advantages = torch.tensor([[-1.0], [1.0]])
        batch = TensorDict({"response_mask": torch.ones(2, 1), "advantages": advantages, **columns}, batch_size=[2])
        log_probs = torch.full((2, 1), log_ratio, requires_grad=True)
        output = loss({"log_probs": log_probs, "entropy": torch.zeros(2, 1)}, batch)
        output.per_token.sum().backward()
        close(output.per_token.detach(), torch.tensor(expected)[:, None])
        assert log_probs.grad.isfinite().all()


def test_entropy_is_a_bonus():
    batch = make_batch(torch.ones(2, 3), seed=0)
    entropy = batch["new_entropy"].clone().requires_grad_()
    loss = PolicyLoss(entropy_coef=0.5)({"log_probs": batch["new_log_probs"], "entropy": entropy}, batch)
    loss.per_token.sum().backward()
    close(entropy.grad, torch.full((2, 3), -0.5))


def test_losses_are_built_from_the_config_picklable_and_pure():
    config = PPOConfig(
        policy_loss="gspo", clip_ratio_low=0.1, clip_ratio_high=0.3, dual_clip=None, entropy_coef=0.02, value_clip=0.7,
        kl=KLConfig(where="loss", estimator="k2", coef=0.4),
    )  # fmt: skip
    policy, value = PolicyLoss.from_config(config), ValueLoss.from_config(config)
    assert policy == PolicyLoss(
        objective="gspo", clip_low=0.1, clip_high=0.3, dual_clip=None, entropy_coef=0.02, kl_coef=0.4, kl_estimator="k2"
    )
    assert value == ValueLoss(clip=0.7)
    assert PolicyLoss.from_config(PPOConfig(kl=KLConfig(where="reward"))).kl_coef is None

    batch = make_batch(torch.ones(2, 3), seed=0)
    before = batch.clone()
    for loss, outputs in (
        (policy, {"log_probs": batch["new_log_probs"], "entropy": batch["new_entropy"]}),
        (value, {"values": batch["new_values"]}),
    ):
        copy = pickle.loads(pickle.dumps(loss))
        assert torch.equal(copy(outputs, batch).per_token, loss(outputs, batch).per_token)
    assert (before == batch).all()


def test_losses_name_the_column_they_lack():
    batch = make_batch(torch.ones(2, 3), seed=0).exclude("ref_log_prob")
    outputs = {"log_probs": batch["new_log_probs"], "entropy": batch["new_entropy"]}
    PolicyLoss()(outputs, batch)
    with pytest.raises(BatchError, match="lacks ref_log_prob"):
        PolicyLoss(kl_coef=0.1)(outputs, batch)
    with pytest.raises(BatchError, match=r"response_mask has shape \(2, 3\); expected \(2, 2\)"):
        PolicyLoss()({name: value[:, :2] for name, value in outputs.items()}, batch)


def test_nothing_to_train_on_is_a_loss_of_zero():
    batch = make_batch(torch.zeros(2, 3), seed=0)
    assert denominators(batch) == Denominators(tokens=0, sequences=0, response_length=3)
    for name in LOSSES:
        total, gradients = total_and_gradients(name, batch)
        assert total == 0
        assert not any(gradient.any() for gradient in gradients)
