"""What both sides train: the model, the mini-batch, its micro-batches and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MODEL = {
    "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
"""A Llama of 19.2 M parameters."""
ROWS, MICRO_ROWS = 8, 2
"""Sequences in the mini-batch, and in one forward and backward."""
LONGEST_PROMPT, LONGEST_RESPONSE = 64, 128
TEMPERATURE = 0.7
LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.01, 1.0

Step = Callable[[], tuple[float, float]]
"""One optimizer step: (loss, grad norm before clipping)."""


@dataclass(frozen=True)
class Micro:
    """One micro-batch of b rows, as narrow as its longest prompt and longest response allow."""

    inputs: dict[str, Tensor]
    """input_ids, attention_mask, position_ids [b, p + r]."""
    targets: Tensor
    """[b, r] the response tokens; column i is predicted by input column p + i - 1."""
    weights: Tensor
    """[b, r] advantage at response tokens, 0 elsewhere."""
    tokens: Tensor
    """How many response tokens there are."""

    @property
    def predictors(self) -> Tensor:
        """[r] the input columns that predict the response."""
        width, after = self.inputs["input_ids"].shape[1], self.targets.shape[1]
        return torch.arange(width - after - 1, width - 1)


def lengths() -> tuple[list[int], list[int]]:
    """Prompt and response tokens of each row: unequal, and the same in every run."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(longest // 4, longest + 1, (ROWS,), generator=generator) for longest in _LONGEST]
    return draw[0].tolist(), draw[1].tolist()


_LONGEST = (LONGEST_PROMPT, LONGEST_RESPONSE)


def micro_batches(data: Mapping[str, Tensor], *, rank: int = 0, ranks: int = 1) -> Iterator[Micro]:
    """This rank's rows, cut into micro-batches without the columns of padding that none of their rows needs."""
    prompt_columns = data["input_ids"].shape[1] - data["responses"].shape[1]
    for rows in torch.arange(ROWS).tensor_split(ranks)[rank].split(MICRO_ROWS):
        real = data["attention_mask"][rows]
        prompt = int(real[:, :prompt_columns].sum(-1).max())
        response = int(real[:, prompt_columns:].sum(-1).max())
        columns = slice(prompt_columns - prompt, prompt_columns + response)
        keys = ("input_ids", "attention_mask", "position_ids")
        yield Micro(
            inputs={key: data[key][rows, columns] for key in keys},
            targets=data["responses"][rows, :response],
            weights=(data["advantages"] * data["response_mask"])[rows, :response],
            tokens=data["response_mask"][rows].sum().int(),
        )


def policy_loss(logits: Tensor, micro: Micro, tokens: Tensor) -> Tensor:
    """This micro-batch's share of the mean of -log p * advantage over the tokens of the whole mini-batch.

    Args:
        logits: [b, r, V] of the columns that predict the response; divided by the temperature in place.
        micro: the micro-batch.
        tokens: response tokens of the mini-batch.
    """
    negative_log_probs = F.cross_entropy(
        logits.div_(TEMPERATURE).flatten(0, 1), micro.targets.flatten(), reduction="none"
    )
    return (negative_log_probs * micro.weights.flatten()).sum() / tokens
