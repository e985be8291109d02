"""The memory of a run, told before anything loads: exact where it can be, and near what was measured where not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptor.cli import check_recipe, memory
from verl_adaptor.cli.plan import plan
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.config import EngineConfig, ParallelConfig, TrainerConfig
from verl_adaptor.errors import ConfigError, ModelError
from verl_adaptor.preflight.memory import (
    TOLERANCE,
    ModelSize,
    ProcessMemory,
    Step,
    engine_part,
    enough_memory,
    little_memory,
    model_size,
    trainer_part,
)
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.models import FAMILIES, make_tiny_model

ROOT = Path(__file__).parent.parent
SIZE = ModelSize(
    parameters=10_000_000, layers=4, hidden=256, intermediate=1024, query=256, key_value=128, vocabulary=4096
)
STEP = Step(samples=64, group=4, prompt=32, response=16, decoding=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_size_is_read_from_its_files(family: str, tmp_path: Path) -> None:
    from verl_adaptor.backends.causal_lm import skeleton

    folder = make_tiny_model(family, tmp_path)
    model, found = skeleton(str(folder)), model_size(folder)
    assert found is not None
    assert found.parameters == sum(p.numel() for p in model.parameters())  # tied ones once
    text = model.config.get_text_config()
    assert (found.layers, found.hidden, found.vocabulary) == (
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
    )


def test_a_file_that_is_cut_off_is_a_model_error(tmp_path: Path) -> None:
    [file] = make_tiny_model("llama", tmp_path).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        model_size(tmp_path)


def lasting(backend: str, **changes: Any) -> int:
    config = TrainerConfig(parallel=ParallelConfig(**changes))
    return sum(trainer_part(SIZE, get_spec(backend), config, STEP).lasting.values())


def test_what_lasts_is_counted_as_zero_counts_it() -> None:
    """arXiv 1910.02054, section 3, in float32: 4 + 8 bytes a parameter, shared as the stage says."""
    one = SIZE.parameters
    assert lasting("hf", data_parallel_size=2) == 12 * one
    assert [lasting("zero", data_parallel_size=2, zero_stage=stage) for stage in range(4)] == [
        12 * one,
        8 * one,
        8 * one,
        6 * one,
    ]
    assert lasting("fsdp", data_parallel_size=2) == lasting("fsdp", tensor_parallel_size=2) == 6 * one
    assert lasting("megatron", tensor_parallel_size=2, pipeline_parallel_size=2) == 3 * one


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 64),
    more=st.integers(1, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    packing=st.booleans(),
    lora=st.sampled_from([None, 8]),
)
def test_more_work_takes_no_less(rows: int, more: int, dtype: Any, packing: bool, lora: int | None) -> None:
    def working(**changes: Any) -> int:
        config = TrainerConfig(dtype=dtype, packing=packing, lora_rank=lora, **{"micro_batch_size": rows, **changes})
        return trainer_part(SIZE, get_spec("hf"), config, STEP).working

    assert working() <= working(micro_batch_size=rows + more)
    assert working(activation_checkpointing=True) <= working()
    assert working(trainable=False) <= working()
    few, many = (
        engine_part(SIZE, EngineConfig(max_batch_size=count, dtype=dtype), STEP).working
        for count in (rows, rows + more)
    )
    assert few <= many


def test_rules_leave_room_for_the_estimate_being_off() -> None:
    its = [ProcessMemory("a rank", 2, {"weights": 50, "working": 50})]
    assert [bool(list(enough_memory(its, free))) for free in (149, 150, 200)] == [True, False, False]
    assert [bool(list(little_memory(its, free))) for free in (149, 150, 200)] == [False, True, False]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    make_tiny_model("llama", tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("\n".join(f'{{"prompt": "question {i}"}}' for i in range(20)))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tmp_path}/model}}\n"
        f"data: {{path: {tmp_path}/prompts.jsonl, chat_template: false}}\n"
        "reward: {function: 'math:fsum'}\nrollout: {n: 2}\n"
        "ppo: {advantage: grpo, train_batch_size: 4}\nevaluation: {prompts: 4}\n"
    )
    return tmp_path / "recipe.yaml"


def test_a_run_that_does_not_fit_is_refused_before_it_loads(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {finding.id: finding for finding in check_recipe.examine_recipe(recipe)}
    assert "this process: about" in found["memory-of-process"].fact
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 << 20)
    [refused] = [finding for finding in check_recipe.examine_recipe(recipe) if finding.severity == "error"]
    assert (refused.id, refused.reports) == ("enough-memory", ("C25",))
    from verl_adaptor.cli.run import prepared
    from verl_adaptor.execution import WorkerPool

    refuses = pytest.raises(ConfigError, match=r"about .* GiB are needed and 0\.1 GiB are free")
    with (
        WorkerPool() as workers,
        refuses,
        prepared(load_recipe(recipe, ()), tmp_path / "run", resume=False, workers=workers),
    ):
        raise AssertionError("it began")


def test_parts_that_share_a_process_are_one(recipe: Path) -> None:
    ranks = ("trainer.data_parallel_size=2", "trainer.cpus_per_worker=0.5", "trainer.backend=fsdp", "ppo.kl.where=loss")
    for overrides, expected in (((), [("this process", 1)]), (ranks, [("this process", 1), ("a rank of trainer", 2)])):
        checked = load_recipe(recipe, overrides)
        processes = memory.estimate(checked, plan(checked), str(recipe.parent / "model"))
        assert [(its.name, its.count) for its in processes] == expected
        held = {part for its in processes for part in its.parts}
        assert held >= {"process", "trainer weights", "trainer optimizer", "engine weights", "working"}
        assert ("reference weights" in held) == (overrides == ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["digits", "digits, fsdp on 2 ranks", "smollm2"])
def test_the_estimate_is_near_the_measured_peak(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks/memory.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for its in benchmark.measure(case, tmp_path)["processes"]:
        assert abs(its["ratio"] - 1) <= TOLERANCE, its
