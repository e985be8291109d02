"""Adapters, reference policies and offload of the hf trainer: what is its own beside the laws."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from verl_adaptor import factory, memory
from verl_adaptor.backends import adapters
from verl_adaptor.backends.hf import verl_adaptor_backends
from verl_adaptor.backends.hf.trainer import HFTrainer
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import (
    BackendNotInstalled,
    CheckpointError,
    ConfigError,
    MissingGradient,
    TrainerClosed,
    TrainerError,
    UnsupportedCapability,
)
from verl_adaptor.registry import get_spec
from verl_adaptor.testing import suite  # noqa: F401 - importing it registers the laws
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws import LAWS, Law
from verl_adaptor.testing.models import make_tiny_model

[SPEC] = verl_adaptor_backends()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            made[family] = str(make_tiny_model(family, tmp_path_factory.mktemp("models") / family))
        return made[family]

    return folder


@pytest.fixture
def bench() -> Any:
    bench = Bench(get_spec("hf"))
    yield bench
    bench.close()


def trainer(folder: str, **settings: Any) -> HFTrainer:
    return HFTrainer(folder, TrainerConfig(**{"lora_rank": 4, "device": "cpu", **settings}), None, SPEC)


def law(name: str) -> Law:
    [found] = [law for law in LAWS if law.name == name]
    return found


# -- which layers ------------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained_every_linear_layer_but_the_head(model) -> None:
    made = trainer(model("llama"))
    assert made.optimizer is not None
    names = list(made.optimizer.parameters)
    assert all(adapters.is_adapter(name) for name in names)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 2 * 2 * 7
    made = trainer(model("llama"), lora_target_modules=("self_attn.q_proj", "lm_head"))
    assert made.optimizer is not None
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in made.optimizer.parameters} == {"q_proj", "lm_head"}


@pytest.mark.parametrize(
    ("family", "targets", "sentence"),
    [
        ("llama", ("q_prj",), r"'q_prj' is no layer of this model; did you mean 'q_proj'"),
        ("llama", ("q_proj", "mlp"), r"'mlp' is no linear layer \(model.layers.0.mlp\)"),
        ("llama", ("embed_tokens",), r"'embed_tokens' is no linear layer"),
        ("qwen2", ("lm_head",), r"lm_head shares its weight with the embedding"),
        ("gpt2", ("c_attn", "lm_head"), r"lm_head shares its weight"),
        ("llama", (), r"has no linear layers to adapt|names no layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(model, family, targets, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trainer(model(family), lora_target_modules=targets)


def test_the_start_is_the_same_on_every_rank_and_leaves_the_generator_alone(model) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = trainer(model("llama"), seed=3).head.adapters
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    second, third = (trainer(model("llama"), seed=seed).head.adapters for seed in (3, 4))
    assert first and second and third
    assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in first.tensors().items())
    assert not all(torch.equal(tensor, third.tensors()[name]) for name, tensor in first.tensors().items())


def test_without_peft_the_error_says_what_to_install(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BackendNotInstalled, match=r"lora_rank needs peft.*pip install peft"):
        trainer(model("llama"))
    trainer(model("llama"), lora_rank=None)


def test_gradients_lost_to_activation_checkpointing_are_noticed(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def cuts_the_graph(self: Any, **_: Any) -> None:
        self.model.layers[0].register_forward_hook(lambda module, args, output: output.detach())

    assert trainer(model("llama"), activation_checkpointing=True).head.model.is_gradient_checkpointing
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", cuts_the_graph)
    with pytest.raises(MissingGradient, match=r"7 of 28 parameters lose their gradient .*layers\.0\..*lora_B"):
        trainer(model("llama"), activation_checkpointing=True)


# -- laws on other families, and with engines --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
@pytest.mark.parametrize(
    "name",
    ["adapters_alone_are_trained", "adapters_are_exported_merged", "adapters_open_in_peft_and_merged_in_transformers"],
)
def test_transposed_tied_and_fused_weights(family: str, name: str) -> None:
    bench = Bench(get_spec("hf"), family=family)
    try:
        law(name).check(bench)
    finally:
        bench.close()


@pytest.mark.parametrize(
    "name", ["a_sync_reaches_the_reference_engine", "a_closed_trainer_refuses", "packing_leaks_nothing"]
)
def test_other_laws_hold_with_adapters(name: str) -> None:
    bench = Bench(get_spec("hf"), trainer_settings={"lora_rank": 16, "lora_alpha": 64.0})
    try:
        law(name).check(bench)
    finally:
        bench.close()


# -- folders -----------------------------------------------------------------------------------------------------


def test_save_adapter_needs_adapters_and_spares_other_folders(model, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="has no adapters; set lora_rank"):
        trainer(model("llama"), lora_rank=None).save_adapter(tmp_path / "new")
    made = trainer(model("llama"))
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something else"):
        made.save_adapter(tmp_path)
    for _ in range(2):  # its own it overwrites
        made.save_adapter(tmp_path / "new")
    assert sorted(f.name for f in (tmp_path / "new").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


# -- reference and offload ---------------------------------------------------------------------------------------


def test_a_reference_lives_as_long_as_its_trainer(bench: Bench) -> None:
    batch = bench.batch()
    made = trainer(bench.path)
    reference = made.reference()
    made.offload("disk")
    with pytest.raises(TrainerError, match=r"offloaded to disk; call onload\(\) first"):
        reference.compute_log_probs(batch)
    made.onload()
    for refused in (reference.export_weights, lambda: reference.save_pretrained(bench.folder / "x")):
        with pytest.raises(TrainerError, match="only computes log-probs"):
            refused()
    made.close()
    with pytest.raises(TrainerClosed):
        reference.compute_log_probs(batch)
    with pytest.raises(UnsupportedCapability, match="a critic has no reference policy"):
        trainer(bench.path, head="value").reference()


def test_an_error_in_the_reference_turns_the_adapters_on_again(bench: Bench) -> None:
    made = trainer(bench.path, learning_rate=1e-2)
    made.update(bench.batch(), policy_gradient)
    trained = made.compute_log_probs(bench.batch()).log_probs
    assert made.head.adapters is not None
    with pytest.raises(RuntimeError, match="midway"), made.head.adapters.off():
        raise RuntimeError("midway")
    assert torch.equal(made.compute_log_probs(bench.batch()).log_probs, trained)


def test_closing_while_offloaded_drops_the_file(bench: Bench) -> None:
    made = trainer(bench.path)
    made.offload("disk")
    away = made._away
    made.close()
    assert away is not None and away._file is not None and away._file.closed


# -- saboteurs ---------------------------------------------------------------------------------------------------


class SwallowedAlpha(HFTrainer):
    def __init__(self, path, config, options, spec):
        super().__init__(path, config.replace(lora_alpha=None), options, spec)


class TrainsTheBaseToo(HFTrainer):
    def _make_optimizer(self):
        self.head.model.get_input_embeddings().weight.requires_grad_()
        return super()._make_optimizer()


class ExportsTheBase(HFTrainer):
    def _exported(self, tensors):
        return dict(tensors)


class ReferenceWithAdapters(HFTrainer):
    def reference(self):
        view = super().reference()
        view._compute_log_probs = self.compute_log_probs
        return view


class MovingReference(HFTrainer):
    """Without adapters, the trainer itself."""

    def reference(self):
        view = super().reference()
        view._compute_log_probs = self.compute_log_probs
        return view


class SavesTheBase(HFTrainer):
    def _own_tensors(self):
        return {name: p.detach() for name, p in self.head.named_parameters()}


class AnyBase(HFTrainer):
    def _kind(self):
        return {**super()._kind(), "adapters": "any"}


class FrozenValueHead(HFTrainer):
    def _make_optimizer(self):
        self.head.value_head.requires_grad_(False)
        return super()._make_optimizer()


class KeepsItsMemory(HFTrainer):
    def _offload(self, tier):
        self._away = memory.Offloaded((), tier)


class ForgetsAnAverage(HFTrainer):
    def _onload(self):
        super()._onload()
        next(iter(self.optimizer.state_dict()["state"].values()))["exp_avg"].mul_(1.01)


class ForgetsGradients(HFTrainer):
    def _offload(self, tier):
        self._zero_grad()
        super()._offload(tier)


class AnswersWhileAway(HFTrainer):
    def _offload(self, tier):
        super()._offload("host")

    def _check_open(self):
        self._check_alive()


@pytest.mark.parametrize(
    ("saboteur", "name"),
    [
        (SwallowedAlpha, "adapters_alone_are_trained"),
        (TrainsTheBaseToo, "adapters_alone_are_trained"),
        (ExportsTheBase, "adapters_are_exported_merged"),
        (SwallowedAlpha, "adapters_are_exported_merged"),
        (ReferenceWithAdapters, "the_reference_is_the_base"),
        (MovingReference, "a_reference_stays_where_it_was"),
        (SavesTheBase, "adapters_resume_exactly"),
        (AnyBase, "adapters_resume_exactly"),
        (FrozenValueHead, "a_critic_trains_adapters_and_its_head"),
        (KeepsItsMemory, "offload_gives_the_memory_back"),
        (ForgetsAnAverage, "offload_is_exact"),
        (ForgetsGradients, "offload_is_exact"),
        (AnswersWhileAway, "offload_is_exact"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_law_catches_it(saboteur: type[Any], name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "load_class", lambda spec, role: saboteur)
    with pytest.raises(AssertionError):
        law(name).check(bench)
