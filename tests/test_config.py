"""Configs: unknown keys, frozen values, documented fields, and settings that exclude each other."""

import inspect
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import verl_adaptor
from verl_adaptor import config as config_module
from verl_adaptor.config import Config, PPOConfig, Recipe, TrainerConfig
from verl_adaptor.errors import ConfigError, UnknownKey

CONFIGS = [
    c for _, c in inspect.getmembers(config_module, inspect.isclass) if issubclass(c, Config) and c is not Config
]
SECTIONS = {"model": {"path": "m"}, "data": {"task": "digits"}, "critic": {}}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_every_field_is_explained_and_every_unknown_key_is_refused(config: type[Config]) -> None:
    """C09."""
    for name, field in config.model_fields.items():
        section = inspect.isclass(field.annotation) and issubclass(field.annotation, Config)  # it explains itself
        assert field.description or section or config is Recipe, f"{name} is not explained"
        wrong = name[:-1] + "_"
        with pytest.raises(UnknownKey, match=f"{wrong}: unknown key; .*{name}"):
            config(**{wrong: 1})


def test_every_setting_is_read_by_somebody() -> None:
    """C09: a setting that outlives what read it would be swallowed."""
    package = Path(verl_adaptor.__file__).parent
    code = "\n".join(file.read_text() for file in package.rglob("*.py"))
    for config in CONFIGS:
        for name in config.model_fields:
            assert re.search(rf"\.{name}\b|getattr\(.*\b{name}\b", code), f"nobody reads {config.__name__}.{name}"


def test_a_config_cannot_be_changed_and_a_copy_is_checked() -> None:
    made = PPOConfig(train_batch_size=8)
    with pytest.raises(ValidationError, match="frozen"):
        made.epochs = 2  # type: ignore[misc]
    assert made.replace(mini_batch_size=4).train_batch_size == 8
    with pytest.raises(
        ConfigError, match=r"mini_batch_size=3 does not divide train_batch_size=8; allowed: \[1, 2, 4, 8\]"
    ):
        made.replace(mini_batch_size=3)


def test_all_problems_are_told_at_once_with_their_path() -> None:
    with pytest.raises(UnknownKey) as caught:
        Recipe(**SECTIONS, ppo={"epoch": 1, "clip_ratio_low": -1}, rollout={"n": 0}, sed=1)
    for part in (
        "ppo.epoch: unknown key; did you mean 'epochs'",
        "ppo.clip_ratio_low=-1",
        "rollout.n=0",
        "sed: unknown",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"critic": None}, "'gae' needs a critic section"),
        ({"ppo": {"advantage": "grpo"}, "rollout": {"n": 4}}, "uses no critic; delete the section"),
        ({"ppo": {"advantage": "rloo"}, "critic": None}, r"rollout\.n=1: rloo compares samples"),
        ({"model": {}}, "exactly one of path .* and build"),
        ({"model": {"path": "m", "build": "a:b"}}, "exactly one of path .* and build"),
        ({"model": {"build": "no_colon"}}, "write 'package.module:name'"),
        (
            {"data": {"task": "digits", "path": "x.jsonl"}},
            "exactly one of path, task, generator and url; given: path, task",
        ),
        ({"reward": {"function": "a:b", "model": "m"}}, "function and model exclude each other"),
        ({"ppo": {"kl": {"where": "loss", "controller": "adaptive"}}}, "use controller='fixed'"),
    ],
)
def test_settings_that_do_not_fit_together(sections: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Recipe(**{**SECTIONS, **sections})


def test_c15_micro_batches_are_set_in_one_way_and_are_never_empty() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        TrainerConfig(micro_batch_size=2, max_tokens_per_micro_batch=64)
    with pytest.raises(ConfigError, match="micro_batch_size=0"):
        TrainerConfig(micro_batch_size=0)
    with pytest.raises(ConfigError, match="needs total_steps"):
        TrainerConfig(lr_schedule="cosine")
