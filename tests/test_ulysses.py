"""Context parallelism: two real ranks that share each sequence compute what one computes alone, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from verl_adaptor.backends.heads import Head, load_head
from verl_adaptor.backends.probe import share_sequences, switch_checkpointing
from verl_adaptor.backends.sequences import packed, padded
from verl_adaptor.backends.ulysses import SlicedSequences, exchange, sliced, use_ulysses
from verl_adaptor.backends.world import Axis
from verl_adaptor.batch import collate
from verl_adaptor.config import ParallelConfig, TrainerConfig
from verl_adaptor.errors import ConfigError, UnsupportedCapability
from verl_adaptor.preflight.parallel import divisible
from verl_adaptor.samples import Trajectory
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.testing.ranks import Ranks, own_axis

RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    both = Ranks(tmp_path_factory.mktemp("ranks"))
    yield both
    both.close()


LENGTHS = ((6, 7), (3, 9), (2, 2), (5, 3))
"""Tokens of prompts and responses: 15 wide if padded, 37 if packed, neither a multiple of two."""


def batch(lengths: Any = LENGTHS) -> Any:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(8, 264, (count,), generator=generator).tolist())

    rows = [
        Trajectory(
            prompt_ids=tokens(prompt),
            response_ids=tokens(response),
            response_mask=(1,) * response,
            rollout_log_probs=(0.0,) * response,
            finish_reason="stop",
            temperature=0.7,
        )
        for prompt, response in lengths
    ]
    return collate(rows, pad_token_id=0)


def forward_backward(head: Head, rows: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of a mean that weighs every token differently."""
    head.train()
    outputs = head(rows)
    weight = torch.linspace(-1, 1, rows["responses"].numel()).view(rows["responses"].shape)
    sum((weight * value + 0.1 * value**2).mean() for value in outputs.values()).backward()
    gradients = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()
    return {name: value.detach() for name, value in outputs.items()}, gradients


def compare(path: str, config: TrainerConfig, lengths: Any = LENGTHS) -> dict[str, float]:
    """Largest difference between one rank and all, of each output and each parameter's gradient, to the largest value."""
    axis = own_axis()
    head = load_head(path, config, torch.device("cpu"))
    alone, alone_gradients = forward_backward(head, batch(lengths))
    switch_checkpointing(head, config.activation_checkpointing)
    share_sequences(head, axis)
    together, gradients = forward_backward(head, batch(lengths))
    assert gradients.keys() == alone_gradients.keys()
    summed = {name: axis.sum(gradient) for name, gradient in gradients.items()}
    pairs = [(alone, together), (alone_gradients, summed)]
    return {name: off(one[name], both[name]) for one, both in pairs for name in one}


def off(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"packing": True}),
        ("mistral", {"packing": True, "activation_checkpointing": True}),  # a sliding window across the cut
        ("gemma2", {"head": "value", "activation_checkpointing": True}),  # two kinds of layer, a soft cap on the scores
        ("gemma2", {"packing": True}),
        ("gpt2", {}),  # learned positions
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "padded",
)
def test_two_ranks_compute_what_one_does(ranks: Ranks, tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    make_tiny_model(family, tmp_path)
    for differences in ranks(compare, str(tmp_path), TrainerConfig(**config)):
        assert {name: value for name, value in differences.items() if not value <= 1e-6} == {}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (12, 3)])
def test_key_value_heads_that_ranks_do_not_divide(ranks: Ranks, tmp_path: Path, heads: int, kv_heads: int) -> None:
    make_tiny_model("llama", tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=48)
    for differences in ranks(compare, str(tmp_path), TrainerConfig()):
        assert max(differences.values()) <= 1e-6


def test_a_rank_that_holds_no_response_token(ranks: Ranks, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    for differences in ranks(compare, str(tmp_path), TrainerConfig(), ((9, 2), (11, 3))):
        assert max(differences.values()) <= 1e-6


def exchanged() -> tuple[Any, Any]:
    """What arrives, and the gradient that comes back, where neither lies in memory in order."""
    axis = own_axis()
    sent = (torch.arange(8.0).view(2, 2, 2) + 100 * axis.rank).requires_grad_()
    received = exchange(sent.transpose(0, 1), axis)
    received.backward((torch.arange(8.0).view(2, 2, 2) + 10 * axis.rank).transpose(0, 2))
    assert sent.grad is not None
    return received.detach().numpy(), sent.grad.numpy()


def test_the_gradient_of_an_exchange_takes_the_way_back(ranks: Ranks) -> None:
    received, gradients = (
        torch.stack([torch.from_numpy(r) for r in part]) for part in zip(*ranks(exchanged), strict=True)
    )
    sent = torch.stack([torch.arange(8.0).view(2, 2, 2).transpose(0, 1) + 100 * rank for rank in range(RANKS)])
    given = torch.stack([(torch.arange(8.0).view(2, 2, 2) + 10 * rank).transpose(0, 2) for rank in range(RANKS)])
    assert torch.equal(received, sent.transpose(0, 1))
    assert torch.equal(gradients.transpose(1, 2), given.transpose(0, 1))


@pytest.mark.parametrize("count", [2, 4, 40])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_slices_make_up_the_whole(layout: str, count: int) -> None:
    config = AutoConfig.for_model("llama")
    config._attn_implementation = "sdpa"
    whole = padded(batch()) if layout == "padded" else packed(batch(), config)
    slices = [sliced(whole.widened(count), Axis(rank, count)) for rank in range(count)]
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in slices], dim=1)
        assert torch.equal(joined[:, : whole.input_ids.shape[1]], getattr(whole, name)), name
    found = []
    for rank, part in enumerate(slices):
        assert isinstance(part, SlicedSequences) and len(part.predictors) >= 1  # else there is nothing to run on
        if len(part.columns):
            assert torch.equal(part.predictors + rank * part.input_ids.shape[1], whole.predictors[part.columns])
            assert torch.equal(part.targets, whole.targets[:, part.columns])
            assert torch.equal(part.temperature, whole.temperature[:, part.columns])
        found += part.columns.tolist()
    assert sorted(found) == list(range(whole.targets.shape[1]))


def refusal(family: str, settings: dict[str, Any]) -> None:
    axis = own_axis()
    config = AutoConfig.for_model(family, vocab_size=264, hidden_size=24, num_hidden_layers=2, **settings)
    use_ulysses(AutoModelForCausalLM.from_config(config), axis)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "settings", "error", "why"),
    [
        ("llama", {**HEADS, "num_attention_heads": 3, "num_key_value_heads": 3}, ConfigError, "num_attention_heads=3"),
        ("bloom", {"n_head": 4}, UnsupportedCapability, "attention interface"),
        ("lfm2", {**HEADS, "layer_types": ["conv", "full_attention"]}, UnsupportedCapability, "carry state"),
        (
            "llama",
            {**HEADS, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            UnsupportedCapability,
            "dynamic",
        ),
    ],
    ids=["heads", "no interface", "convolution", "dynamic rope"],
)
def test_what_cannot_be_cut_is_refused(
    ranks: Ranks, family: str, settings: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        ranks(refusal, family, settings)


def test_heads_must_divide_among_the_ranks_before_anything_loads() -> None:
    """C29."""
    [problem] = divisible({"num_attention_heads": 6}, ParallelConfig(context_parallel_size=4))
    fact = "context_parallel_size=4 does not divide num_attention_heads=6 of the model"
    assert problem == (fact, "allowed: 1, 2, 3, 6")
    both = ParallelConfig(tensor_parallel_size=2, context_parallel_size=2)
    [problem] = divisible({"num_attention_heads": 6}, both)
    assert "context_parallel_size=2 does not divide num_attention_heads / tensor_parallel_size=3" in problem[0]
    assert not list(divisible({"num_attention_heads": 4, "num_key_value_heads": 1}, both))
