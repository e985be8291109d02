"""From a name and flat keywords to an object: every refusal comes before the backend's class is imported."""

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from verl_adaptor import registry as registry_module
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, only, since
from verl_adaptor.config import Config, EngineConfig, ParallelConfig, TrainerConfig
from verl_adaptor.errors import (
    BackendNotInstalled,
    BackendVersionError,
    BrokenPlugin,
    ConfigError,
    ModelError,
    UnknownKey,
    UnsupportedCapability,
)
from verl_adaptor.factory import create_inference_engine, create_trainer_backend, resolve_engine, resolve_trainer
from verl_adaptor.preflight import Facts, rule
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.registry import Registry, register


class Options(Config):
    """A backend's own options."""

    cache_blocks: int = 8
    """Blocks."""


def anything(*_, **__):
    """A method."""


class Engine(InferenceEngine):
    """Keeps what it was given; the primitives do not matter here."""

    _admit = _step = _drop = _score = _load_bucket = _release = anything  # type: ignore[assignment]


class Departed(Engine):
    """Calls itself an engine and cannot be called as one."""

    _step = None  # type: ignore[assignment]

    def generate(self, prompts, sampling, *, return_exceptions=False):
        pass

    def agenerate(self, prompt, params=None):
        pass


class Trainer(TrainerBackend):
    """Likewise."""

    _compute_log_probs = _compute_values = _forward_backward = _optimizer_step = anything  # type: ignore[assignment]
    _export_weights = _save_checkpoint = _load_checkpoint = _release = save_pretrained = anything  # type: ignore[assignment]


@rule()
def no_tuesdays(facts: Facts) -> Iterator[tuple[str, str]]:
    """A backend's own preflight rule."""
    if facts.config.seed == 13:
        yield "seed=13 is unlucky", "take another"


FAKE = BackendSpec(
    name="fake",
    engine="fake_backend:Engine",
    trainer="fake_backend:Trainer",
    engine_options="fake_backend:Options",
    distribution="not-a-distribution|pluggy",
    version_range=">=1.0",
    install="pip install 'pluggy>=1.0'",
    own_processes=True,
    capabilities={
        Capability.TENSOR_PARALLEL: FULL,
        Capability.SEQUENCE_PARALLEL: FULL,
        Capability.PIPELINE_PARALLEL: since("999"),
        Capability.PACKING: since("1.0"),
        Capability.BF16: only("cuda", "no kernels elsewhere"),
    },
    zero_stages=(1, 2),
    preflight=(no_tuesdays,),
)
PLAIN = BackendSpec(name="plain", engine="fake_backend:Engine", trainer="fake_backend:Trainer")


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with two backends, and the module that their specs name."""
    known = Registry([], [])
    monkeypatch.setattr(registry_module, "registry", lambda: known)
    monkeypatch.setattr("verl_adaptor.factory.registry", lambda: known)
    module = ModuleType("fake_backend")
    module.__dict__.update(Engine=Engine, Trainer=Trainer, Options=Options, Departed=Departed, number=3)
    monkeypatch.setitem(sys.modules, "fake_backend", module)
    register(FAKE)
    register(PLAIN)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model folder as is looked at before loading."""
    dimensions = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(dimensions))
    return tmp_path


def test_flat_keywords_reach_the_config_they_belong_to(model: Path) -> None:
    engine = create_inference_engine(model, backend="fake", dtype="bfloat16", tensor_parallel_size=3, cache_blocks=2)
    assert isinstance(engine, Engine)
    assert engine.path == str(model)
    assert engine.config == EngineConfig(dtype="bfloat16", parallel=ParallelConfig(tensor_parallel_size=3))
    assert engine.options == Options(cache_blocks=2)
    trainer = create_trainer_backend(str(model), backend="fake", packing=True, zero_stage=2)
    assert trainer.config == TrainerConfig(packing=True, parallel=ParallelConfig(zero_stage=2))
    assert trainer.options is None


def test_a_plan_is_checked_now_and_built_later(model: Path) -> None:
    plan = resolve_engine(None, "fake", tensor_parallel_size=3)
    with pytest.raises(ModelError, match="without a model"):
        plan.create()
    assert plan.create(model).config is plan.config
    (model / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(ConfigError, match="does not divide num_attention_heads=4"):
        plan.create(model)


def test_r3_unknown_settings_name_the_nearest_and_all_problems_come_at_once() -> None:
    with pytest.raises(UnknownKey) as caught:
        resolve_engine(None, "fake", cache_block=1, tensor_parallel=2, max_batch_size=0, tensor_parallel_size=0)
    message = str(caught.value)
    for part in (
        "cache_block: unknown setting; did you mean 'cache_blocks'",
        "tensor_parallel: unknown setting; did you mean 'tensor_parallel_size'",
        "max_batch_size=0 is not allowed",
        "tensor_parallel_size=0 is not allowed",
    ):
        assert part in message
    with pytest.raises(UnknownKey, match="cache_blocks"):  # another role, or another backend: nobody would read it
        resolve_trainer(None, "fake", cache_blocks=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tensor_parallel_size": 2}, "cannot do tensor_parallel_size=2 .*backends that have it: fake"),
        ({"packing": True}, "cannot do packing=True .*backends that have it: fake"),
        ({"dtype": "bfloat16"}, r"cannot do dtype='bfloat16' .*backends that have it: fake \(only cuda\)"),
        ({"data_parallel_size": 2}, "cannot do data_parallel_size=2 .*no registered backend has it"),
        ({"head": "value"}, "head='value' .value_head is unsupported"),
        ({"activation_checkpointing": True}, "activation_checkpointing=True"),
        ({"max_tokens_per_micro_batch": 64}, "max_tokens_per_micro_batch=64 .token_budget"),
        ({"zero_stage": 1}, "cannot do zero_stage=1 .allowed: leave it out.; backends that have it: fake"),
        ({"gradient_sync": "ddp"}, "cannot do gradient_sync='ddp' .*no registered backend has it"),
    ],
)
def test_what_a_backend_lacks_is_refused_and_those_that_have_it_are_named(settings: dict, sentence: str) -> None:
    with pytest.raises(UnsupportedCapability, match=sentence):
        resolve_trainer(None, "plain", **settings)


def test_declared_values_versions_and_devices_are_respected() -> None:
    with pytest.raises(UnsupportedCapability, match=r"zero_stage=3 .allowed: 1, 2"):
        resolve_trainer(None, "fake", zero_stage=3)
    with pytest.raises(UnsupportedCapability, match=r"zero_stage=1 .*setting of trainers"):
        resolve_engine(None, "fake", zero_stage=1)
    with pytest.raises(UnsupportedCapability, match="pipeline_parallel is since: 999"):
        resolve_trainer(None, "fake", pipeline_parallel_size=2)
    with pytest.raises(UnsupportedCapability, match="no kernels elsewhere"):
        resolve_trainer(None, "fake", dtype="bfloat16", device="cpu")
    assert resolve_trainer(None, "fake", dtype="bfloat16", device="cuda:1").config.dtype == "bfloat16"


def test_c29_sizes_that_do_not_divide_the_model(model: Path) -> None:
    capabilities = {Capability.PIPELINE_PARALLEL: FULL, Capability.EXPERT_PARALLEL: FULL}
    register(BackendSpec(name="staged", trainer="m:T", capabilities=capabilities))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4 does not divide num_attention_heads=6.*1, 2, 3, 6"):
        resolve_engine(model, "fake", tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide num_key_value_heads=3"):
        resolve_engine(model, "fake", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="more than the model's num_hidden_layers=2"):
        resolve_trainer(model, "staged", pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match="expert_parallel_size=3 does not divide number of experts=4"):
        resolve_trainer(model, "staged", expert_parallel_size=3)
    assert resolve_engine(model, "fake", tensor_parallel_size=6).path  # each kv head is copied to two ranks


def test_a_rule_of_the_backend_and_of_everyone() -> None:
    with pytest.raises(ConfigError, match="unlucky"):
        resolve_trainer(None, "fake", seed=13)
    with pytest.raises(ConfigError, match="sequence_parallel=True needs tensor_parallel_size > 1"):
        resolve_trainer(None, "fake", sequence_parallel=True)


def test_c01_the_installed_version_is_checked_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9+cpu")
    with pytest.raises(BackendVersionError, match=r">=1\.0, and 0\.9\+cpu is installed; .*pip install 'pluggy>=1\.0'"):
        resolve_engine(None, "fake")


def test_a_missing_framework_ends_in_its_install_command(model: Path) -> None:
    register(
        BackendSpec(name="gone", engine="x:Y", distribution="no-such-a|no-such-b", install="pip install no-such-a")
    )
    with pytest.raises(BackendNotInstalled, match=r"no-such-a or no-such-b.*pip install no-such-a") as caught:
        resolve_engine(model, "gone")
    assert isinstance(caught.value.__cause__, importlib.metadata.PackageNotFoundError)


def test_a_failing_import_is_chained_and_told_from_a_missing_framework(model: Path, tmp_path: Path) -> None:
    register(BackendSpec(name="lost", engine="no_such_module_at_all:E", install="pip install it"))
    with pytest.raises(BackendNotInstalled, match=r"may be missing.*no_such_module_at_all.*pip install it") as caught:
        create_inference_engine(model, "lost")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    register(
        BackendSpec(name="buggy", engine="no_such_module_at_all:E", distribution="pluggy", install="pip install pluggy")
    )
    with pytest.raises(BackendNotInstalled, match=r"pluggy \S+ is installed, but importing"):
        create_inference_engine(model, "buggy")


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("fake_backend:Trainer", "no subclass of verl_adaptor.InferenceEngine"),
        ("fake_backend:number", "no subclass of verl_adaptor.InferenceEngine"),
        ("fake_backend:Missing", "Missing"),
        (
            "fake_backend:Departed",
            r"_step is no method; agenerate\(\) is no .*: it is not async; generate\(\) is no .*: missing .*'sampling'",
        ),
    ],
)
def test_what_the_spec_names_must_be_an_engine(model: Path, where: str, sentence: str) -> None:
    register(BackendSpec(name="odd", engine=where))
    with pytest.raises(BrokenPlugin, match=sentence):
        create_inference_engine(model, "odd")


def test_options_may_not_shadow_common_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shadow(Config):
        seed: int = 1

    monkeypatch.setattr("fake_backend.Options", Shadow)
    with pytest.raises(BrokenPlugin, match="redefines common settings: seed"):
        resolve_engine(None, "fake")


def test_model_paths(model: Path, tmp_path: Path) -> None:
    assert resolve_engine("owner/name", "plain").path == "owner/name"  # a hub id: the framework's to find
    for wrong in ("./nowhere", "/nowhere/at/all", "a/b/c", Path("owner/name")):
        with pytest.raises(ModelError, match="does not exist"):
            resolve_engine(wrong, "plain")
    with pytest.raises(ModelError, match="is a file"):
        resolve_engine(model / "config.json", "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no config.json"):
        resolve_engine(tmp_path / "empty", "plain")
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve_engine(model, "plain")
