"""The tensors of a training batch: verl's keys, as a TensorDict of B rows.

=================== ======= ============================================================================
key                 shape   meaning (T = prompt + response columns, R = response columns, float32 unless said)
=================== ======= ============================================================================
input_ids           [B, T]  int64; prompts padded on the left, responses on the right
attention_mask      [B, T]  int64; 1 at real tokens, observation tokens included
position_ids        [B, T]  int64; 0, 1, 2, ... along the real tokens of a row
responses           [B, R]  int64; the last R columns of input_ids
response_mask       [B, R]  1 at tokens the policy sampled; 0 at observations and padding
rollout_log_probs   [B, R]  the engine's log-probs
old_log_probs       [B, R]  the trainer's, before the first update of the step
ref_log_prob        [B, R]  the reference policy's
values              [B, R]  the critic's, of the state before each token
token_level_scores  [B, R]  what the reward function gave each token
token_level_rewards [B, R]  the same less a KL penalty, where there is one
reward_baselines    [B]     reward of the greedy response (ReMax)
advantages, returns [B, R]
temperature         [B]     sampling temperature of the row
group_ids           [B]     int64; equal for samples of one prompt
=================== ======= ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.errors import BatchError
from verl_adaptor.protocols.trainer import Denominators
from verl_adaptor.samples import Trajectory


def collate(trajectories: Sequence[Trajectory], *, pad_token_id: int) -> TensorDict:
    """Trajectories -> the rollout keys of a batch, rows in input order.

    The attention mask comes from lengths, never from token ids or the response mask: so an EOS that doubles as pad is
    kept, and observation tokens are attended to (C05, C16).
    """
    if not trajectories:
        raise BatchError("cannot make a batch of no trajectories.")
    width_p = max(len(t.prompt_ids) for t in trajectories)
    width_r = max(len(t.response_ids) for t in trajectories)
    rows = len(trajectories)
    input_ids = torch.full((rows, width_p + width_r), pad_token_id)
    attention_mask = torch.zeros(rows, width_p + width_r, dtype=torch.long)
    response_mask = torch.zeros(rows, width_r)
    rollout_log_probs = torch.zeros(rows, width_r)
    groups: dict[str, int] = {}
    for row, t in enumerate(trajectories):
        start, stop = width_p - len(t.prompt_ids), width_p + len(t.response_ids)
        input_ids[row, start:stop] = torch.tensor((*t.prompt_ids, *t.response_ids))
        attention_mask[row, start:stop] = 1
        response_mask[row, : len(t.response_ids)] = torch.tensor(t.response_mask, dtype=torch.float32)
        rollout_log_probs[row, : len(t.response_ids)] = torch.tensor(t.rollout_log_probs, dtype=torch.float32)
    return TensorDict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "responses": input_ids[:, width_p:].clone(),
            "response_mask": response_mask,
            "rollout_log_probs": rollout_log_probs,
            "temperature": torch.tensor([t.temperature for t in trajectories], dtype=torch.float32),
            # an ungrouped trajectory is a group of its own
            "group_ids": torch.tensor(
                [groups.setdefault(t.group_id or f"\0{row}", len(groups)) for row, t in enumerate(trajectories)]
            ),
        },
        batch_size=[rows],
    )


def spread_rewards(rewards: Sequence[float | Sequence[float]], response_mask: Tensor) -> Tensor:
    """[B, R] token rewards: a scalar lands on the row's last sampled token, a list on the sampled tokens in order.

    The last *sampled* token, not the last column and not an observation: there GAE would lose it (C05, C26).

    >>> spread_rewards([1.0, [0.5, 0.25]], torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]]))
    tensor([[0.0000, 0.0000, 1.0000, 0.0000],
            [0.5000, 0.0000, 0.2500, 0.0000]])
    """
    if len(rewards) != len(response_mask):
        raise BatchError(f"{len(rewards)} rewards for {len(response_mask)} rows; give one a row.")
    spread = torch.zeros_like(response_mask)
    for row, reward in enumerate(rewards):
        sampled = response_mask[row].nonzero().flatten()
        if isinstance(reward, Sequence):
            if len(reward) != len(sampled):
                raise BatchError(
                    f"row {row} has {len(sampled)} sampled tokens but {len(reward)} token rewards; give one a sampled token."
                )
            spread[row, sampled] = torch.tensor(reward, dtype=spread.dtype)
        elif len(sampled):
            spread[row, sampled[-1]] = reward
    return spread


def require(batch: TensorDict, keys: Iterable[str]) -> None:
    """Raise `BatchError` unless these keys are there, with B > 0 rows and one T and one R."""
    if not len(batch):
        raise BatchError("the batch has no rows; give at least one.")
    have = set(batch.keys())
    missing = [key for key in keys if key not in have]
    if missing:
        raise BatchError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(map(str, have)))}.")
    shape_t, shape_r = batch["input_ids"].shape, batch["responses"].shape
    for key in keys:
        value = batch[key]
        shape = value.shape
        expected = shape_t[:1] if key == "temperature" else shape_r if key in _PER_RESPONSE else shape_t
        if shape != expected:
            raise BatchError(f"{key} has shape {tuple(shape)}; expected {tuple(expected)}.")
    if shape_r[1] >= shape_t[1]:
        raise BatchError(
            f"responses have {shape_r[1]} columns and input_ids {shape_t[1]}: no column is left for a prompt."
        )


def require_prompts(batch: TensorDict) -> None:
    """Raise `BatchError` where a response follows no prompt token: nothing would predict its first token."""
    real = batch["attention_mask"].bool()
    prompt_columns = real.shape[1] - batch["responses"].shape[1]
    orphans = real[:, prompt_columns:].any(-1) & ~real[:, :prompt_columns].any(-1)
    if orphans.any():
        raise BatchError(
            f"row {int(orphans.nonzero()[0])} has a response and no prompt token: nothing predicts its first token; "
            "begin prompts with at least one token (BOS)."
        )


_PER_RESPONSE = {
    "responses", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values",
    "token_level_rewards", "advantages", "returns",
}  # fmt: skip


def denominators(batch: TensorDict) -> Denominators:
    """Counts over a whole mini-batch: what its loss is divided by, however it is then split."""
    mask = batch["response_mask"]
    return Denominators(
        tokens=float(mask.sum()), sequences=float((mask.sum(-1) > 0).sum()), response_length=mask.shape[-1]
    )


def aggregate(per_token: Tensor, mask: Tensor, mode: str, over: Denominators, scale: float | None = None) -> Tensor:
    """This micro-batch's share of the global loss, a scalar: the shares of all micro-batches add up to it.

    Args:
        per_token: [b, R] losses.
        mask: [b, R]; 1 counts.
        mode: one of verl's five: ``token-mean``, ``token-sum``, ``seq-mean-token-sum``, ``seq-mean-token-sum-norm``,
            ``seq-mean-token-mean``.
        over: counts of the global mini-batch.
        scale: the divisor of seq-mean-token-sum-norm; None takes R.
    """
    masked = torch.where(mask > 0, per_token, 0.0)  # not a product: 0 * inf would be NaN
    tokens, sequences = max(over.tokens, 1.0), max(over.sequences, 1.0)
    match mode:
        case "token-mean":
            return masked.sum() / tokens
        case "token-sum":
            return masked.sum()
        case "seq-mean-token-sum":
            return masked.sum() / sequences
        case "seq-mean-token-sum-norm":
            return masked.sum() / sequences / (scale or over.response_length)
        case "seq-mean-token-mean":
            return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences
    raise BatchError(f"loss aggregation {mode!r} is unknown.")


def split_rows(
    batch: TensorDict, *, micro_batch_size: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """Row indices of each micro-batch. Every row is in exactly one; no micro-batch is empty.

    Args:
        micro_batch_size: rows in each (the last may be smaller).
        max_tokens: real tokens in each; rows are dealt out longest first to the emptiest micro-batch, so that all are
            about equally long (a row longer than the budget is a micro-batch of its own).

    With neither, one micro-batch holds all rows.
    """
    lengths = batch["attention_mask"].sum(-1)
    order = torch.arange(len(lengths))
    if max_tokens is None:
        return list(order.split(micro_batch_size or len(lengths)))
    sizes: list[int] = lengths.tolist()
    count = max(1, min(len(sizes), -(-sum(sizes) // max_tokens)))
    while not _fits(bins := _balance(sizes, count), sizes, max_tokens):
        count += 1  # at one row each it fits by definition
    return [torch.tensor(sorted(rows)) for rows in bins if rows]


def deal(count: int, ranks: int) -> list[Tensor]:
    """Row indices of each data-parallel rank: contiguous, as even as can be, so that samples of one prompt stay together.

    >>> [rows.tolist() for rows in deal(5, 2)]
    [[0, 1, 2], [3, 4]]
    """
    return list(torch.arange(count).tensor_split(ranks))


def micro_batches(
    batch: TensorDict,
    *,
    rank: int = 0,
    ranks: int = 1,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Row indices of each micro-batch of one data-parallel rank; all ranks get equally many.

    Collectives run in every forward of a sharded model, so a rank that has fewer gets empty ones at the end: run them on
    `idle` rows. Every rank can see the whole batch, so that they agree without asking each other.
    """
    splits = []
    for rows in deal(len(batch), ranks):
        parts = split_rows(batch[rows], micro_batch_size=micro_batch_size, max_tokens=max_tokens) if len(rows) else []
        splits.append([rows[part] for part in parts])
    most = max(map(len, splits))
    return splits[rank] + [torch.arange(0)] * (most - len(splits[rank]))


def idle(batch: TensorDict) -> TensorDict:
    """One row of which nothing counts: what a rank computes while others have rows left."""
    row = batch[:1].clone()
    if "response_mask" in row:
        row["response_mask"] = torch.zeros_like(row["response_mask"])
    return row


def _fits(bins: list[list[int]], lengths: list[int], max_tokens: int) -> bool:
    return all(len(rows) <= 1 or sum(lengths[row] for row in rows) <= max_tokens for rows in bins)


def _balance(lengths: list[int], count: int) -> list[list[int]]:
    """Longest first, each to the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        target = min(range(count), key=filled.__getitem__)
        bins[target].append(row)
        filled[target] += lengths[row]
    return bins
