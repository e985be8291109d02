"""The megatron trainer, beyond the laws: names, slices of the vocabulary, layouts, checkpoints, and what must be refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from verl_adaptor import create_trainer_backend
from verl_adaptor.backends import causal_lm
from verl_adaptor.backends.megatron import layout, model, names, rules, weights
from verl_adaptor.backends.megatron.layout import Layout
from verl_adaptor.backends.vocab_parallel import token_log_probs_and_entropy
from verl_adaptor.batch import denominators
from verl_adaptor.errors import CheckpointError, ConfigError, TrainerError
from verl_adaptor.factory import resolve_trainer
from verl_adaptor.protocols import LossOutput
from verl_adaptor.registry import get_spec
from verl_adaptor.testing import laws_training as laws
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.testing.ranks import Ranks, own_axis

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
RANKS = 2
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-5}


@contextmanager
def a_bench(family: str = "llama", **model: Any) -> Iterator[Bench]:
    bench = Bench(get_spec("megatron", "training"), family=family, model=model)
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with a_bench() as made:
        yield made


def test_the_cpu_is_refused_where_there_is_a_gpu(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"device='cpu'.*CUDA_VISIBLE_DEVICES=''"):
        bench.trainer(device="cpu")


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_in_and_comes_out(family: str) -> None:
    with a_bench(family) as bench:
        laws.exported_is_what_was_loaded(bench)
        batch = bench.batch()
        with bench.trainer() as trainer:
            got = trainer.compute_log_probs(batch).log_probs
        gap = (got - laws.oracle_log_probs(bench, batch, 1.0))[laws.response_tokens(batch)].abs().max()
        assert float(gap) <= laws.LOG_PROB


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_holds_whole_query_groups(ranks: int) -> None:
    head_dim, groups, heads_a_group = 3, 4, 2
    q = torch.arange(groups * heads_a_group * head_dim)
    k, v = 100 + torch.arange(groups * head_dim), 200 + torch.arange(groups * head_dim)
    cuts = [names.pack([part.chunk(ranks)[rank] for part in (q, k, v)], "qkv", head_dim) for rank in range(ranks)]
    assert torch.equal(torch.cat(cuts), names.pack([q, k, v], "qkv", head_dim))
    assert cuts[0][: 4 * head_dim].tolist() == [*range(6), 100, 101, 102, 200, 201, 202]
    rows = [len(part) // ranks for part in (q, k, v)]
    back = zip(*(names.unpack(cut, "qkv", rows, head_dim) for cut in cuts), strict=True)
    assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(back, (q, k, v), strict=True))


def test_q_k_and_v_laid_end_to_end_are_caught(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = names.pack
    monkeypatch.setattr(
        weights, "pack", lambda parts, packing, width: real(parts, packing.replace("qkv", "end to end"), width)
    )
    with pytest.raises(AssertionError, match="log-probs differ"):
        laws.log_probs_are_the_oracles(bench)
    with pytest.raises(AssertionError, match="is not what was loaded"):
        laws.exported_is_what_was_loaded(bench)


def test_the_rules_know_the_families_that_are_mapped() -> None:
    assert set(rules.MODEL_TYPES) == set(names.FAMILIES)


def test_transformer_engine_names_are_the_same_parameters() -> None:
    local = {"decoder.layers.0.input_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"}
    engine = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    assert {names.whole_model_name(f"decoder.layers.0.{name}", [0], 0) for name in engine} == local
    expert = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    known = names.parameters(names.FAMILIES["mixtral"], layers=4, experts=4, head="policy", tied=False)
    assert known[names.whole_model_name(expert, [2, 3], 2)].names == (
        "model.layers.3.block_sparse_moe.experts.3.w2.weight",
    )


# -- one layout at a time ----------------------------------------------------------------------------------------


def test_trainers_share_one_layout_and_another_is_refused_until_the_last_is_closed(bench: Bench) -> None:
    with bench.trainer() as actor, bench.trainer(head="value"):
        with pytest.raises(ConfigError, match=r"open in this process \(one rank; asked for: tensor 2\)"):
            layout.acquire(Layout(tensor=2), 60)
        reference = actor.reference()
        assert reference.compute_log_probs(bench.batch()).log_probs.shape == bench.batch()["responses"].shape
        reference.close()
        assert parallel_state.model_parallel_is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    with bench.trainer() as again:
        again.compute_log_probs(bench.batch())


def test_a_model_that_cannot_be_built_gives_the_layout_back(bench: Bench, tmp_path: Path) -> None:
    broken = make_tiny_model("llama", tmp_path / "model")
    (broken / "model.safetensors").rename(broken / "other.safetensors")
    with pytest.raises(Exception, match=r"no model\.safetensors"):
        create_trainer_backend(broken, backend="megatron")
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("gpt2", {}, "no name mapping for model_type='gpt2', only for llama"),
        ("llama", {"tensor_parallel_size": 4}, "does not divide num_key_value_heads=2"),
        (
            "llama",
            {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
            "does not divide num_hidden_layers=2",
        ),
        ("llama", {"virtual_pipeline_parallel_size": 2}, "needs pipeline_parallel_size > 1"),
        ("llama", {"data_parallel_size": 2, "expert_parallel_size": 2}, "the model has no experts"),
        (
            "mixtral",
            {"data_parallel_size": 3, "expert_parallel_size": 2},
            "the ranks that share the experts; allowed: 1, 3",
        ),
        ("mixtral", {"tensor_parallel_size": 2}, "needs sequence_parallel=true"),
        ("llama", {"zero_stage": 1, "trainable": False}, "no optimizer to share"),
    ],
)
def test_what_megatron_cannot_do_is_refused_before_it_loads(
    family: str, settings: Mapping[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_trainer(make_tiny_model(family, tmp_path), "megatron", **settings)


# -- checkpoints -------------------------------------------------------------------------------------------------


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("kind", ["call", "bytes"])
def test_a_pickle_that_is_no_description_of_tensors_is_never_read(bench: Bench, tmp_path: Path, kind: str) -> None:
    folder, evil = tmp_path / "checkpoint", tmp_path / "evil"
    content = Touch(evil) if kind == "call" else Metadata(state_dict_metadata={"0.x": BytesStorageMetadata()})
    with bench.trainer() as trainer:
        trainer.save_checkpoint(folder)
        trainer.load_checkpoint(folder)  # whole, it loads
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][".metadata"] = (folder / ".metadata").stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="no description of tensors"):
            trainer.load_checkpoint(folder)
    assert not evil.exists()


def test_hyperparameters_stay_those_of_the_config(bench: Bench, tmp_path: Path) -> None:
    with bench.trainer(weight_decay=0.5) as trainer:
        trainer.save_checkpoint(tmp_path / "checkpoint")
        expected = laws.run(trainer, bench, steps=2)
    with bench.trainer(weight_decay=0.0) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        got = laws.run(other, bench, steps=2)
    assert any(not torch.equal(tensor, expected.weights[name]) for name, tensor in got.weights.items())


def test_a_checkpoint_goes_on_at_other_layouts(bench: Bench, tmp_path: Path) -> None:
    """TP2 -> PP2 -> one rank."""
    expected = laws.run(bench.reference_trainer(**SETTINGS), bench, steps=3)
    with bench.trainer(tensor_parallel_size=2, **SETTINGS) as trainer:
        losses = laws.run(trainer, bench, steps=1).losses
        trainer.save_checkpoint(tmp_path / "tensor")
    with bench.trainer(pipeline_parallel_size=2, micro_batch_size=2, **SETTINGS) as trainer:
        trainer.load_checkpoint(tmp_path / "tensor")
        losses += laws.run(trainer, bench, steps=1).losses
        trainer.save_checkpoint(tmp_path / "pipeline")
    with bench.trainer(**SETTINGS) as trainer:
        trainer.load_checkpoint(tmp_path / "pipeline")
        last = laws.run(trainer, bench, steps=1)
    last.losses, last.grad_norms = losses + last.losses, expected.grad_norms
    laws.assert_same_run(last, expected, "three layouts")


# -- two ranks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    both = Ranks(tmp_path_factory.mktemp("ranks"))
    yield both
    both.close()


def slices(vocab_size: int, columns: int, dtype: torch.dtype) -> float:
    """Largest difference between a slice of the vocabulary and all of it: log-probs, entropies, gradients."""
    axis = own_axis()
    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(3, 5, columns, generator=generator)).to(dtype)
    whole[0, 0, 7] = -torch.inf
    ids = torch.randint(0, vocab_size, (3, 5), generator=generator)
    to_log_probs, to_entropy = torch.randn(2, 3, 5, generator=generator)
    temperature = 0.3 + torch.rand(3, 1, generator=generator)
    gradients, values = [], []
    for logits, sliced in ((whole[..., :vocab_size].clone(), False), (whole.chunk(RANKS, -1)[axis.rank].clone(), True)):
        before = logits.clone()
        leaf = logits.requires_grad_()
        if sliced:
            found = token_log_probs_and_entropy(leaf, ids, temperature, axis=axis, vocab_size=vocab_size)
        else:
            found = causal_lm.token_log_probs_and_entropy(leaf, ids, temperature)
        (found[0] * to_log_probs + found[1] * to_entropy).sum().backward()
        assert torch.equal(leaf.detach(), before), "the logits were overwritten"
        gradients.append(leaf.grad.float())
        values.append(torch.stack(found).detach())
    wanted = torch.zeros(whole.shape)
    wanted[..., :vocab_size] = gradients[0]
    apart = (wanted.chunk(RANKS, -1)[axis.rank] - gradients[1], values[0] - values[1])
    return max(float(difference.abs().max()) for difference in apart)


@pytest.mark.parametrize(
    ("vocab_size", "columns", "dtype"),
    [
        (264, 264, torch.float32),
        (261, 264, torch.float32),  # padded
        (131, 264, torch.float32),  # the second rank holds padding alone
        (264, 264, torch.bfloat16),
    ],
)
def test_a_slice_of_the_vocabulary_is_enough(ranks: Ranks, vocab_size: int, columns: int, dtype: torch.dtype) -> None:
    assert max(ranks(slices, vocab_size, columns, dtype)) <= (1e-5 if dtype == torch.float32 else 2e-2)


def run_on_ranks(
    path: str, batch: Any, steps: int, settings: Mapping[str, Any], *, parts: int = 1, marked: bool = True
) -> Any:
    """Losses and grad norms of a few updates, each in as many calls of forward_backward as `parts`."""
    if not marked:
        real = model._Norm.__init__

        def forget(self: Any, *args: Any, **kwargs: Any) -> None:
            real(self, *args, **kwargs)
            self.weight.sequence_parallel = False

        model._Norm.__init__ = forget  # type: ignore[method-assign]
    results = []
    try:
        with create_trainer_backend(path, backend="megatron", executor="inline", **{**SETTINGS, **settings}) as trainer:
            for _ in range(steps):
                over = denominators(batch)
                shares = [trainer.forward_backward(part, policy_gradient, over)["loss"] for part in batch.chunk(parts)]
                results.append((sum(shares), trainer.optimizer_step()["grad_norm"]))
    finally:
        if not marked:
            model._Norm.__init__ = real  # type: ignore[method-assign]
    return results


def gap(got: Any, expected: laws.Run) -> float:
    pairs = zip(got, zip(expected.losses, expected.grad_norms, strict=True), strict=True)
    return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "zero_stage": 1},
        {"tensor_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["dp", "zero1", "sp"],
)
def test_a_step_over_several_calls_reduces_once(ranks: Ranks, bench: Bench, settings: Mapping[str, Any]) -> None:
    expected = laws.run(bench.reference_trainer(**SETTINGS), bench, steps=3)
    for got in ranks(run_with_parts, bench.path, bench.batch(), 3, settings):
        assert gap(got, expected) <= laws.LOSS


def does_not_like_it(outputs: Mapping[str, torch.Tensor], batch: Any) -> LossOutput:
    raise ValueError("this loss does not like the row")


def run_after_a_failure(path: str, batch: Any) -> list[float]:
    """Losses of two updates after one whose loss raised, on the last stage only."""
    settings = {"pipeline_parallel_size": 2, "micro_batch_size": 2, **SETTINGS}
    with create_trainer_backend(path, backend="megatron", executor="inline", **settings) as trainer:
        with pytest.raises((ValueError, TrainerError), match="this loss does not like the row"):
            trainer.update(batch, does_not_like_it)
        return [trainer.update(batch, policy_gradient)["loss"] for _ in range(2)]


def test_a_loss_that_raises_raises_on_every_stage_and_leaves_no_trace(ranks: Ranks, bench: Bench) -> None:
    expected = laws.run(bench.reference_trainer(**SETTINGS), bench, steps=2).losses
    for got in ranks(run_after_a_failure, bench.path, bench.batch()):
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= laws.LOSS


def run_with_parts(*args: Any) -> Any:
    return run_on_ranks(*args, parts=2)


def run_unmarked(*args: Any) -> Any:
    return run_on_ranks(*args, marked=False)


def test_unmarked_norms_are_caught(ranks: Ranks, bench: Bench) -> None:
    expected = laws.run(bench.reference_trainer(**SETTINGS), bench, steps=3)
    settings = {"tensor_parallel_size": 2, "sequence_parallel": True}
    assert all(
        gap(got, expected) > 10 * laws.LOSS for got in ranks(run_unmarked, bench.path, bench.batch(), 3, settings)
    )


@pytest.mark.parametrize("splitting", [{}, {"micro_batch_size": 1}, {"max_tokens_per_micro_batch": 24}], ids=str)
def test_interleaved_is_the_same_update(ranks: Ranks, bench: Bench, splitting: Mapping[str, Any]) -> None:
    path = bench.variant("four-layers", num_hidden_layers=4)
    expected = laws.run(bench.reference_trainer(path, **SETTINGS), bench, steps=3)
    settings = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2, **splitting}
    for got in ranks(run_on_ranks, path, bench.batch(), 3, settings):
        assert gap(got, expected) <= laws.LOSS


def test_shared_experts_are_the_same_update(ranks: Ranks) -> None:
    with a_bench("mixtral") as bench:
        expected = laws.run(bench.reference_trainer(**SETTINGS), bench, steps=3)
        for settings in (
            {"data_parallel_size": 2, "expert_parallel_size": 2},
            {"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
        ):
            for got in ranks(run_on_ranks, bench.path, bench.batch(), 3, settings):
                assert gap(got, expected) <= laws.LOSS
