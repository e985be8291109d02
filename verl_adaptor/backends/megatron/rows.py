"""A micro-batch as Megatron's layers take it."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedConfig

from verl_adaptor.backends import sequences as layouts
from verl_adaptor.backends.sequences import Sequences


@dataclass(frozen=True)
class Rows:
    """What goes into the model, and where its output belongs."""

    sequences: Sequences
    """How the batch was laid out; its ids and positions may be narrower than the ones here."""
    input_ids: Tensor
    """[rows, length]."""
    position_ids: Tensor
    """[rows, length]."""
    hidden: Tensor
    """[rows, 1, length, length], True where a token (third dimension) must not see another (fourth)."""

    def widened(self, rows: int, length: int) -> Rows:
        """The same with empty rows and columns behind, whose output nobody reads."""
        behind = (0, length - self.input_ids.shape[1], 0, rows - self.input_ids.shape[0])
        hidden = F.pad(self.hidden, (0, behind[1], 0, behind[1]), value=True)
        return Rows(
            self.sequences,
            F.pad(self.input_ids, behind),
            F.pad(self.position_ids, behind),
            F.pad(hidden, (0, 0, 0, 0, 0, 0, 0, behind[3]), value=True),
        )


def lay_out(batch: TensorDict, model: PreTrainedConfig, *, packing: bool, multiple_of: int) -> Rows:
    """Real tokens only, padded or packed; `multiple_of` divides the length (sequence parallelism shares it out)."""
    if packing:
        boolean = copy.copy(model)
        boolean._attn_implementation = "sdpa"  # a mask of booleans, please
        sequences = layouts.packed(batch, boolean)
    else:
        sequences = layouts.padded(batch)
    ids = sequences.input_ids
    rows = Rows(sequences, ids, sequences.position_ids, ~_visible(sequences, model))
    return rows.widened(len(ids), -(-ids.shape[1] // multiple_of) * multiple_of)


def _visible(sequences: Sequences, model: PreTrainedConfig) -> Tensor:
    """[rows, 1, length, length] True where a token sees another."""
    mask = sequences.attention_mask
    if not isinstance(mask, Tensor):
        raise TypeError("layers of one kind have one mask")  # models with several are refused when they are built
    if mask.ndim == 4:
        return mask
    column = torch.arange(mask.shape[-1], device=mask.device)
    behind = column[:, None] - column
    window = getattr(model, "sliding_window", None) or len(column)
    return ((behind >= 0) & (behind < window))[None, None] & mask.bool()[:, None, None, :]
