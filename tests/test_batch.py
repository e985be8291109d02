"""Batches: nothing of a trajectory is lost or moved, and no split changes a loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from verl_adaptor.batch import aggregate, collate, denominators, require, split_rows, spread_rewards
from verl_adaptor.errors import BatchError
from verl_adaptor.samples import Trajectory

EOS = 2
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Rows of any length; EOS (which is the pad too) anywhere, at the end or missing; observations inside."""
    rows = []
    for number in range(draw(st.integers(1, 6))):
        response = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
        ends = draw(st.booleans())
        response = [*response, EOS] if ends else response
        rows.append(
            Trajectory(
                prompt_ids=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))),
                response_ids=tuple(response),
                response_mask=tuple(draw(st.integers(0, 1)) for _ in response),
                rollout_log_probs=tuple(-float(number) - i / 8 for i in range(len(response))),
                finish_reason="stop" if ends else "length",
                group_id=draw(st.sampled_from(["", "a", "b"])),
                temperature=draw(st.sampled_from([0.5, 1.0])),
            )
        )
    return rows


@given(trajectories())
def test_collate_keeps_every_token_where_pad_is_eos(rows: list[Trajectory]) -> None:
    batch = collate(rows, pad_token_id=EOS)
    width = batch["responses"].shape[1]
    assert torch.equal(batch["responses"], batch["input_ids"][:, -width:])
    for row, t in enumerate(rows):
        real = batch["attention_mask"][row].bool()
        length = len(t.response_ids)
        assert tuple(batch["input_ids"][row][real].tolist()) == t.prompt_ids + t.response_ids  # C05, C16, C19
        assert batch["position_ids"][row][real].tolist() == list(range(int(real.sum())))  # C07
        assert batch["response_mask"][row].tolist() == [*t.response_mask, *[0] * (width - length)]
        assert batch["rollout_log_probs"][row, :length].tolist() == list(t.rollout_log_probs)
        assert batch["temperature"][row] == t.temperature
    groups = batch["group_ids"].tolist()
    for one, a in zip(rows, groups, strict=True):
        for other, b in zip(rows, groups, strict=True):
            assert (a == b) == (one is other or (one.group_id == other.group_id != ""))


@given(trajectories(), st.data())
def test_rewards_land_on_sampled_tokens_and_none_is_lost(rows: list[Trajectory], data: st.DataObject) -> None:
    mask = collate(rows, pad_token_id=EOS)["response_mask"]
    rewards: list[float | list[float]] = [
        [float(i + 1) for i in range(sum(t.response_mask))] if data.draw(st.booleans()) else 3.0 for t in rows
    ]
    spread = spread_rewards(rewards, mask)
    assert (spread[mask == 0] == 0).all()  # C05, C26: neither padding nor observation
    for row, reward in enumerate(rewards):
        sampled = mask[row].nonzero().flatten()
        if isinstance(reward, list):
            assert spread[row, sampled].tolist() == reward
        elif len(sampled):
            assert spread[row].sum() == 3.0 == spread[row, sampled[-1]]


def test_rewards_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(BatchError, match="row 0 has 2 sampled tokens but 1"):
        spread_rewards([[1.0]], torch.ones(1, 2))
    with pytest.raises(BatchError, match="1 rewards for 2 rows"):
        spread_rewards([1.0], torch.ones(2, 2))


def with_lengths(lengths: list[int]) -> TensorDict:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask}, batch_size=[len(lengths)])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    size=st.integers(1, 25) | st.none(),
    budget=st.integers(1, 120) | st.none(),
)
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], size: int | None, budget: int | None) -> None:
    bins = split_rows(with_lengths(lengths), micro_batch_size=size if budget is None else None, max_tokens=budget)
    assert sorted(int(row) for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(len(rows) for rows in bins)
    if budget is not None:
        assert all(len(rows) == 1 or sum(lengths[row] for row in rows) <= budget for rows in bins)
    elif size is not None:
        assert all(len(rows) <= size for rows in bins)


def test_a_token_budget_balances_lengths() -> None:
    bins = split_rows(with_lengths([9, 1, 1, 1, 8, 2, 2, 8]), max_tokens=11)
    assert sorted(int(sum([9, 1, 1, 1, 8, 2, 2, 8][row] for row in rows)) for rows in bins) == [10, 11, 11]


def whole_batch(loss: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """verl's five aggregations, written down for one whole batch (law T3)."""
    kept = [row[m.bool()] for row, m in zip(loss, mask, strict=True) if m.any()]
    sums = torch.stack([row.sum() for row in kept])
    return {
        "token-mean": torch.cat(kept).mean(),
        "token-sum": torch.cat(kept).sum(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": sums.mean() / loss.shape[1],
        "seq-mean-token-mean": torch.stack([row.mean() for row in kept]).mean(),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 999), rows=st.integers(1, 7), size=st.integers(1, 7))
def test_micro_batches_add_up_to_the_whole_batch(mode: str, seed: int, rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, 6, generator=generator) < 0.6).double()
    mask[0, 0] = 1
    batch = TensorDict({"response_mask": mask}, batch_size=[rows])
    poisoned = torch.where(mask > 0, loss, torch.inf)  # C16: what is masked must not matter, whatever it is
    shares = [
        aggregate(poisoned[part], mask[part], mode, denominators(batch)) for part in torch.arange(rows).split(size)
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), whole_batch(loss, mask, mode))


def test_aggregation_scale_and_unknown_mode() -> None:
    loss = mask = torch.ones(2, 4)
    over = denominators(TensorDict({"response_mask": mask}, batch_size=[2]))
    assert aggregate(loss, mask, "seq-mean-token-sum-norm", over, scale=8.0) == 0.5
    with pytest.raises(BatchError, match="'mean' is unknown"):
        aggregate(loss, mask, "mean", over)


def test_a_wrong_batch_is_refused_by_name() -> None:
    row = Trajectory(
        prompt_ids=(1,), response_ids=(3, 2), response_mask=(1, 1), rollout_log_probs=(0.0, 0.0), finish_reason="stop"
    )
    batch = collate([row], pad_token_id=0)
    with pytest.raises(BatchError, match="lacks advantages; it has"):
        require(batch, ["input_ids", "responses", "advantages"])
    batch["advantages"] = torch.zeros(1, 3)
    with pytest.raises(BatchError, match=r"advantages has shape \(1, 3\); expected \(1, 2\)"):
        require(batch, ["input_ids", "responses", "advantages"])
    with pytest.raises(BatchError, match="no rows"):
        require(batch[:0], ["input_ids"])
    with pytest.raises(BatchError, match="no trajectories"):
        collate([], pad_token_id=0)
