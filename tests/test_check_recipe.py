"""``verl-adaptor check RECIPE``: everything that is wrong, at once, before anything loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_adaptor import cli
from verl_adaptor.cli.check_recipe import examine_recipe
from verl_adaptor.cli.plan import plan
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.errors import ConfigError
from verl_adaptor.findings import Finding

DIGITS = Path("digits.yaml")


def errors(*overrides: str, recipe: Path = DIGITS) -> list[Finding]:
    return [finding for finding in examine_recipe(recipe, overrides) if finding.severity == "error"]


def test_what_is_wrong_in_every_section_is_told_at_once() -> None:
    """C09, C31 and C32 beside each other: one run of the command, not three."""
    found = errors("engine.backend=vlm", "trainer.gradient_sync=zero", "critic.packin=true")
    assert [(f.id, f.fact.split(":")[0], *f.reports) for f in found] == [
        ("unsupported-capability", "trainer", "C31"),
        ("unknown-backend", "engine", "C32"),
        ("unknown-key", "critic", "C09"),
    ]
    assert all(f.cure for f in found)


def test_train_refuses_with_the_same_sentences() -> None:
    overrides = ("engine.backend=vlm", "trainer.packin=true")
    with pytest.raises(ConfigError) as refused:
        plan(load_recipe(DIGITS, overrides))
    assert {str(refused.value)} >= {"\n".join(str(f) for f in errors(*overrides))}


@pytest.mark.parametrize(
    ("overrides", "id", "reports"),
    [
        (["ppo.epochs=0"], "config-error", ()),
        (["trainer.data_parallel_size=3", "critic.data_parallel_size=3"], "batch-divides", ("C29",)),
        (["trainer.backend=zero", "trainer.zero_stage=0", "trainer.offload_optimizer=cpu"], "offload-has-a-stage", ()),
        (["trainer.backend=fsdp", "trainer.fsdp_version=1"], "fsdp-version", ()),
        (["trainer.backend=fsdp", "trainer.data_parallel_size=64"], "enough-cpus", ("C14",)),
        (["engine.backend=vllm", "trainer.backend=vllm"], "unknown-backend", ("C32",)),
        (["model.build=null", "model.path=/nowhere"], "model-error", ()),
    ],
)
def test_a_finding_names_its_rule_and_the_report_it_comes_from(
    overrides: list[str], id: str, reports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_adaptor.execution.pool._in_ray", lambda: False)  # whatever another test has started
    found = {f.id: f for f in errors(*overrides)}
    assert id in found
    assert found[id].reports == reports
    assert found[id].cure


def test_a_recipe_that_is_well_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "digits.yaml", "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"] == "digits.yaml"
    assert [f["fact"] for f in told["findings"] if f["id"] == "recipe"] == [
        "digits.yaml: engine, trainer, critic fit together"
    ]


def test_prompts_that_cannot_be_read_are_found_before_the_model_loads(tmp_path: Path) -> None:
    from verl_adaptor.testing.models import make_tiny_model

    make_tiny_model("llama", tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"question": "no column is called prompt"}\n')
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "prompts.jsonl")},
        "reward": {"function": "math:fsum"},
        "ppo": {"advantage": "grpo"},
        "rollout": {"n": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    [found] = errors(recipe=tmp_path / "recipe.yaml")
    assert (found.id, found.fact.split(":")[0]) == ("data-error", "data")
