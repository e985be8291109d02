"""How the rows of a micro-batch are laid out for one forward pass: padded, or packed end to end.

Only real tokens are taken from the batch, so neither layout depends on where the batch was padded (law T1, C07):

    batch (P = 3 prompt columns)    padded                      packed
    . . a | x y .                   . . a x y                   a x y b c d z w
    b c d | z . .                   b c d z .                   one row; a token sees the earlier tokens of its own
    . . a | w . .                   . . a w .                   sequence and no other, because the 4-D mask says so and
                                    prompt flush right,         not because position ids are guessed from (C17). The
                                    response flush left         prompt a is shared: w is laid down without it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from verl_adaptor.errors import UnsupportedCapability

AttentionMask = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Sequences:
    """What goes into a model, and how what comes out finds its way back to [b, R]."""

    input_ids: Tensor
    """[rows, length]; padded: rows = b, packed: rows = 1."""
    position_ids: Tensor
    """[rows, length]; the batch's own at real tokens."""
    attention_mask: AttentionMask
    """Padded: [rows, length]. Packed: [1, 1, length, length], or one of those for each kind of layer."""
    predictors: Tensor
    """[M] columns whose output predicts a response token (the column before it), the same for all rows."""
    targets: Tensor
    """[rows, M] the tokens predicted there."""
    temperature: Tensor
    """[rows, M]."""
    is_real: Tensor
    """[rows, M] whether a response token stands there."""
    places: Tensor
    """[b, R] where the real ones belong, in the same order."""

    def restore(self, values: Tensor) -> Tensor:
        """[rows, M] -> [b, R]; 0 where there is no response token."""
        empty = values.new_zeros(self.places.shape)
        return empty.masked_scatter(self.places, values[self.is_real])

    def widened(self, multiple: int) -> Sequences:
        """The same, `length` padded at the right to a multiple of `multiple`, where no real token looks."""
        missing = -self.input_ids.shape[1] % multiple
        if not missing:
            return self
        return replace(
            self,
            input_ids=pad(self.input_ids, (0, missing)),
            position_ids=pad(self.position_ids, (0, missing)),
            attention_mask=_widened_mask(self.attention_mask, missing),
        )

    @property
    def inputs(self) -> dict[str, Tensor | AttentionMask]:
        """Keyword arguments of a transformers model."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
        }


def _widened_mask(mask: AttentionMask, missing: int) -> AttentionMask:
    if isinstance(mask, dict):
        return {kind: _widened_4d(part, missing) for kind, part in mask.items()}
    return pad(mask, (0, missing)) if mask.ndim == 2 else _widened_4d(mask, missing)


def _widened_4d(mask: Tensor, missing: int) -> Tensor:
    """A padding token sees itself: one that sees nothing at all could be NaN, which 0 times does not take away."""
    seen, unseen = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
    wide = pad(mask, (0, missing, 0, missing), value=unseen)
    own = torch.arange(mask.shape[-1], wide.shape[-1], device=mask.device)
    wide[..., own, own] = seen
    return wide


def padded(batch: Mapping[str, Tensor] | TensorDict) -> Sequences:
    """One row a sequence, as narrow as the longest prompt and the longest response allow."""
    real, prompt_columns = _real_tokens(batch)
    prompt_lengths = real[:, :prompt_columns].sum(-1)
    response_lengths = real[:, prompt_columns:].sum(-1)
    before = max(1, int(prompt_lengths.max()))  # a micro-batch of empty rows still needs a column to run on
    after = max(1, int(response_lengths.max()))
    column = (real.cumsum(-1) - 1 + (before - prompt_lengths)[:, None])[real]
    row = real.nonzero()[:, 0]

    def place(values: Tensor) -> Tensor:
        laid = values.new_zeros(len(values), before + after)
        laid[row, column] = values[real]
        return laid

    input_ids = place(batch["input_ids"])
    ahead = torch.arange(after, device=real.device)
    return Sequences(
        input_ids=input_ids,
        position_ids=place(batch["position_ids"]),
        attention_mask=place(real.long()),
        predictors=ahead + before - 1,
        targets=input_ids[:, before:],
        temperature=batch["temperature"][:, None].expand(-1, after),
        is_real=ahead < response_lengths[:, None],
        places=real[:, prompt_columns:],
    )


def packed(batch: Mapping[str, Tensor] | TensorDict, config: PreTrainedConfig) -> Sequences:
    """All sequences end to end in one row; a prompt that several of them share is laid down, and computed, once.

    With n samples a prompt that is most of the work saved: 8 samples of 10 tokens to a prompt of 100 are 180 tokens and
    not 880. Without a real token there is nothing to pack: that is laid out padded.
    """
    real, prompt_columns = _real_tokens(batch)
    if not real.any():
        return padded(batch)
    owner = _prompt_owners(batch, real, prompt_columns)
    is_response = real.clone()
    is_response[:, :prompt_columns] = False
    own_prompt = owner == torch.arange(len(owner), device=real.device)
    kept = is_response | (real & own_prompt[:, None])
    row, of_response = kept.nonzero()[:, 0], is_response[kept]
    found = of_response.nonzero()[:, 0]
    last_of_prompt = _last_prompt_column(row, of_response, len(owner))
    first = is_response & (is_response.cumsum(-1) == 1)
    return Sequences(
        input_ids=batch["input_ids"][kept][None],
        position_ids=batch["position_ids"][kept][None],
        attention_mask=_packed_mask(row, owner[row], of_response, (real.cumsum(-1) - 1)[kept], config),
        predictors=torch.where(first[is_response], last_of_prompt[owner[row[found]]], found - 1),
        targets=batch["input_ids"][is_response][None],
        temperature=batch["temperature"][row[found]][None],
        is_real=torch.ones(1, len(found), dtype=torch.bool, device=real.device),
        places=real[:, prompt_columns:],
    )


def _prompt_owners(batch: Mapping[str, Tensor] | TensorDict, real: Tensor, prompt_columns: int) -> Tensor:
    """[b] the first row with the same prompt, at the same positions."""
    first: dict[bytes, int] = {}
    owners = []
    for row, there in enumerate(real[:, :prompt_columns]):
        prompt = [batch[key][row, :prompt_columns][there] for key in ("input_ids", "position_ids")]
        owners.append(first.setdefault(torch.cat(prompt).cpu().numpy().tobytes(), row))
    return torch.tensor(owners, device=real.device)


def _last_prompt_column(row: Tensor, of_response: Tensor, rows: int) -> Tensor:
    """[rows] where each laid-down prompt ends in the packed row; 0 for rows without one of their own."""
    ends = torch.zeros(rows, dtype=torch.long, device=row.device)
    columns = (~of_response).nonzero()[:, 0]
    return ends.scatter_reduce(0, row[columns], columns, "amax")


def _real_tokens(batch: Mapping[str, Tensor] | TensorDict) -> tuple[Tensor, int]:
    """[b, T] bool, and the number of prompt columns."""
    real = batch["attention_mask"].bool()
    prompt_columns = real.shape[1] - batch["responses"].shape[1]
    return real, prompt_columns


def _packed_mask(
    row: Tensor, owner: Tensor, of_response: Tensor, place: Tensor, config: PreTrainedConfig
) -> AttentionMask:
    """Causal masks, for the kinds of attention that the layers of this model use.

    A token sees its own sequence and nothing of any other: the tokens of its row, and the prompt that its row shares.

    Args:
        row: [N] the batch row of each packed token.
        owner: [N] the row whose prompt is that row's.
        of_response: [N] bool.
        place: [N] how many tokens of its sequence come before it.
        config: of the model.
    """
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise UnsupportedCapability(
            f"packing: a {config.model_type} has layers of kind {', '.join(sorted(kinds))}, which carry state from one "
            "sequence into the next; set packing=false."
        )
    behind = place[:, None] - place
    together = (row[:, None] == row) | ((owner[:, None] == row) & ~of_response)
    full = together & (behind >= 0)
    masks = {"full_attention": full, "sliding_attention": full & (behind < (window or len(row)))}
    ready = {kind: _as_attention_wants(masks[kind], config) for kind in kinds}
    return ready if len(kinds) > 1 else ready.popitem()[1]


def _as_attention_wants(allowed: Tensor, config: PreTrainedConfig) -> Tensor:
    """[1, 1, N, N]: boolean for scaled_dot_product_attention, else what is added to the scores."""
    if config._attn_implementation.startswith("sdpa"):
        return allowed[None, None]
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, lowest)[None, None]
