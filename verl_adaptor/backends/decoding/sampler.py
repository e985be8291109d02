"""From logits to tokens: what is sampled from, and what is reported.

Reported is always the policy's own tempered log-prob (law I2; C02, C03). Sampled is from that distribution, cut by top-k and
top-p, changed by penalties, bias and min_tokens, and never a padded vocabulary id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_adaptor.backends.sampling import cut, inverse_cdf
from verl_adaptor.protocols import SampleRequest


class Sampler:
    """Samples one token for each row of a batch. Rows that ask for nothing special cost nothing special."""

    def __init__(self, samples: Sequence[SampleRequest], vocabulary: int, device: torch.device) -> None:
        """Sort out which rows need what.

        Args:
            samples: one a row.
            vocabulary: ids from here on are padding of the embedding and never sampled (C18).
            device: where the logits will be.
        """
        self._vocabulary = vocabulary
        params = [s.params for s in samples]
        greedy = [p.temperature == 0 for p in params]
        temperature = [p.temperature or 1.0 for p in params]
        cut = [row for row, p in enumerate(params) if (p.top_k or p.top_p < 1) and p.temperature]
        self._temperature = None if set(temperature) == {1.0} else torch.tensor(temperature, device=device)[:, None]
        self._all_greedy = all(greedy)
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        self._cut = torch.tensor(cut, device=device) if cut else None
        self._top_k = torch.tensor([params[row].top_k or vocabulary for row in cut], device=device)[:, None]
        self._top_p = torch.tensor([params[row].top_p for row in cut], dtype=torch.float64, device=device)[:, None]
        self._edited = [(row, s) for row, s in enumerate(samples) if s.params.changes_distribution]

    def __call__(self, logits: Tensor, numbers: Sequence[float]) -> tuple[Tensor, Tensor]:
        """[B, V] logits and a uniform number a row -> [B] tokens, [B] float32 log-probs."""
        logits = logits.float()
        policy = logits if self._temperature is None else logits / self._temperature
        log_probs = policy.log_softmax(-1)
        choice = self._edit(logits, log_probs) if self._edited else log_probs
        tokens = self._draw(choice[:, : self._vocabulary], numbers)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _draw(self, choice: Tensor, numbers: Sequence[float]) -> Tensor:
        if self._all_greedy:
            return choice.argmax(-1)
        probs = choice.softmax(-1)
        if self._cut is not None:
            probs[self._cut] = cut(probs[self._cut], self._top_k, self._top_p)
        tokens = inverse_cdf(probs, torch.tensor(numbers, dtype=torch.float64, device=probs.device))
        return tokens if self._greedy is None else torch.where(self._greedy, choice.argmax(-1), tokens)

    def _edit(self, logits: Tensor, log_probs: Tensor) -> Tensor:
        """`log_probs`, where the rows with penalties, bias or min_tokens are replaced by what they sample from."""
        choice = log_probs.clone()
        for row, sample in self._edited:
            choice[row] = edited(logits[row].clone(), sample) / (sample.params.temperature or 1.0)
        return choice


def edited(logits: Tensor, sample: SampleRequest) -> Tensor:
    """[V] logits of one row, changed in place by bias, min_tokens and penalties, in this order (vLLM's)."""
    params, device = sample.params, logits.device
    if params.logit_bias:
        logits[torch.tensor(list(params.logit_bias), device=device)] += torch.tensor(
            list(params.logit_bias.values()), device=device
        )
    if len(sample.token_ids) < params.min_tokens and sample.stop_token_ids:
        logits[torch.tensor(sorted(sample.stop_token_ids), device=device)] = -torch.inf
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*sample.prompt_token_ids, *sample.token_ids}), device=device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if sample.token_ids and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(sample.token_ids, device=device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return logits
