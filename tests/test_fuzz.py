"""Recipes at random: what preflight passes trains a step, or fails with an error of ours; what it refuses fails when forced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from verl_adaptor.cli.check_recipe import examine_recipe
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.errors import VerlAdaptorError
from verl_adaptor.testing.models import make_tiny_model

COUNT = int(os.environ.get("VERL_ADAPTOR_FUZZ", "300"))
STEP_S = 120
"""Longest that one step may take, its start included."""
FAMILIES = ("llama", "qwen2", "gpt2", "mixtral")
BASE: dict[str, Any] = {
    "data": {"chat_template": False},
    "rollout": {"max_tokens": 4, "n": 2},
    "engine": {"backend": "hf"},
    "trainer": {"backend": "hf", "learning_rate": 1e-3},
    "reward": {"function": "fuzz_reward:score"},
    "ppo": {"advantage": "grpo", "total_steps": 1, "train_batch_size": 4},
    "evaluation": {"prompts": 2},
    "checkpoint": {"every": 0},
    "tracking": {"sinks": [], "report": False},
}
_SIZES = st.sampled_from([1, 2, 2, 2, 3, 4])
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "trainer.backend": st.sampled_from(["hf", "fsdp", "zero", "megatron", "accelerate", "vllm"]),
    "trainer.data_parallel_size": _SIZES,
    "trainer.tensor_parallel_size": _SIZES,
    "trainer.pipeline_parallel_size": _SIZES,
    "trainer.context_parallel_size": _SIZES,
    "trainer.expert_parallel_size": _SIZES,
    "trainer.sequence_parallel": st.booleans(),
    "trainer.zero_stage": st.sampled_from([0, 1, 2, 3]),
    "trainer.gradient_sync": st.sampled_from(["ddp", "manual", "zero", "fsdp"]),
    "trainer.shard_size": _SIZES,
    "trainer.packing": st.booleans(),
    "trainer.micro_batch_size": st.sampled_from([1, 2, 3, 7]),
    "trainer.max_tokens_per_micro_batch": st.sampled_from([1, 8, 64]),
    "trainer.activation_checkpointing": st.booleans(),
    "trainer.dtype": st.sampled_from(["float32", "bfloat16"]),
    "trainer.lora_rank": st.sampled_from([1, 4]),
    "trainer.lr_schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "trainer.loss_aggregation": st.sampled_from(["token-mean", "seq-mean-token-sum-norm", "seq-mean-token-mean"]),
    "trainer.max_grad_norm": st.sampled_from([None, 0.1]),
    "engine.backend": st.sampled_from(["hf", "vllm", "megatron", "trainer", "ctranslate2", "fsdp"]),
    "engine.dtype": st.sampled_from(["float32", "bfloat16"]),
    "engine.tensor_parallel_size": _SIZES,
    "engine.replicas": st.sampled_from([1, 2]),
    "engine.max_batch_size": st.sampled_from([1, 3, 16]),
    "engine.max_model_len": st.sampled_from([4, 40, 512, 4096]),
    "engine.max_prefill_tokens": st.sampled_from([1, 64]),
    "engine.lora_rank": st.sampled_from([1, 4]),
    "engine.kv_cache_gib": st.sampled_from([0.000001, 0.1]),
    "critic": st.sampled_from([{}, {"micro_batch_size": 1}, {"backend": "hf"}]),
    "ppo.advantage": st.sampled_from(["gae", "grpo", "rloo", "reinforce_plus_plus", "remax"]),
    "ppo.train_batch_size": st.sampled_from([1, 2, 3, 4]),
    "ppo.mini_batch_size": st.sampled_from([1, 2, 3, 4]),
    "ppo.epochs": st.sampled_from([0, 1, 2]),
    "ppo.policy_loss": st.sampled_from(["vanilla", "gspo", "cispo"]),
    "ppo.dual_clip": st.sampled_from([None, 0.5, 3.0]),
    "ppo.kl": st.sampled_from([{"where": "loss"}, {"where": "reward"}, {"where": "reward", "controller": "adaptive"}]),
    "rollout.n": st.sampled_from([1, 2, 3]),
    "rollout.max_tokens": st.sampled_from([1, 4, 600]),
    "rollout.temperature": st.sampled_from([0.0, 0.5, 1.0]),
    "rollout.top_p": st.sampled_from([0.5, 1.0]),
    "rollout.top_k": st.sampled_from([0, 5]),
    "pipeline": st.sampled_from([{}, {"max_staleness": 0}, {"max_staleness": 1, "buffer_samples": 64}]),
    "pipelin": st.just({}),
    "trainer.pakcing": st.just(True),
    "data.max_prompt_tokens": st.sampled_from([2, 64]),
}
FORCED = """
import sys
import verl_adaptor.factory as factory
import verl_adaptor.cli.plan as plan
import verl_adaptor.cli.run as run
from verl_adaptor.cli import main
from verl_adaptor.execution.pool import WorkerPool

factory.check = lambda *_: None
factory._check_capabilities = lambda *_: None
plan.refuse = lambda _: None
run.memory_findings = lambda _: []
WorkerPool.check = lambda *_: None
main(sys.argv[1:])
"""
RULES = {
    "sequence-parallel-has-ranks", "parallel-size-divides", "batch-divides", "hangs-are-told-apart", "unsupported-capability",
    "fsdp-version", "shard-size", "one-answer-on-resharding", "tensor-parallel", "known-architecture", "heads-divide",
    "layers-divide", "experts-fit", "distributed-optimizer-has-ranks", "converted-architecture", "offload-has-a-stage",
}  # fmt: skip
"""Findings that forcing gets past. What the settings' types refuse cannot even be written down."""


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A small recipe that is well, with one to four settings changed."""
    tree: dict[str, Any] = json.loads(json.dumps(BASE))
    tree["family"] = draw(st.sampled_from(FAMILIES))
    for key in draw(st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=4, unique=True)):
        value = draw(CHANGES[key])
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    if tree["ppo"]["advantage"] == "gae" and draw(st.booleans()):
        tree.setdefault("critic", {})
    return tree


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    its = tmp_path_factory.mktemp("fuzz")
    wide = {"llama": {"head_dim": 32}, "mixtral": {"head_dim": 32}}
    for family in FAMILIES:
        make_tiny_model(family, its / family, **wide.get(family, {"hidden_size": 128}))
    (its / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"question {i}"}) for i in range(40)))
    (its / "fuzz_reward.py").write_text(
        "def score(trajectories):\n    return [sum(t.response_ids) % 7 / 7 for t in trajectories]\n"
    )
    return its


def written(folder: Path, tree: dict[str, Any], number: object) -> Path:
    whole = {key: value for key, value in tree.items() if key != "family"}
    whole["model"] = {"path": str(folder / tree["family"])}
    whole["data"] = {**whole["data"], "path": str(folder / "prompts.jsonl")}
    for section in ("trainer", "engine"):
        if any(name.endswith("_parallel_size") or name == "replicas" for name in whole[section]):
            whole[section].setdefault("cpus_per_worker", 0.1)
    file = folder / f"recipe-{number}.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


def changed(tree: dict[str, Any]) -> dict[str, Any]:
    """What differs from the base, for a message."""
    told: dict[str, Any] = {}
    for key, value in tree.items():
        if value != BASE.get(key):
            base = BASE.get(key)
            same = isinstance(value, dict) and isinstance(base, dict)
            told[key] = {k: v for k, v in value.items() if v != base.get(k)} if same else value
    return told


@pytest.mark.slow
@pytest.mark.timeout(10800)
def test_what_passes_trains_and_what_is_refused_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    from verl_adaptor.cli.run import prepared, run_to_end
    from verl_adaptor.execution import WorkerPool

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    forced: dict[tuple[str, str], str] = {}

    with WorkerPool() as workers:

        @seed(20261204)
        @settings(max_examples=COUNT, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(tree=recipes())
        def examine(tree: dict[str, Any]) -> None:
            number = sum(counts.values())
            file = written(folder, tree, number)
            errors = [finding for finding in examine_recipe(file) if finding.severity == "error"]
            if errors:
                ids = {finding.id for finding in errors}
                if not ids <= RULES:
                    counts["refused: cannot be written down or read"] += 1
                    return
                counts["refused by a rule"] += 1
                first = min(errors, key=lambda finding: finding.id)
                key = first.id, first.fact
                if key not in forced:
                    forced[key] = force(folder, file)
                    if forced[key] == "trained" and swallowed(folder, tree, number, first.fact):
                        forced[key] = "trained as if the setting were not there"
                    if forced[key] == "trained":
                        wrong.append(f"refused and trains: {first} {changed(tree)}")
                return
            output = folder / f"run-{number}"
            try:
                with (
                    bounded(STEP_S),
                    prepared(load_recipe(file, ()), output, resume=False, workers=workers) as (run, facts),
                ):
                    run_to_end(run, load_recipe(file, ()), output, facts)
                counts["trained"] += 1
            except VerlAdaptorError as error:
                counts[f"typed: {type(error).__name__}"] += 1
            except BaseException as error:
                counts["failed otherwise"] += 1
                wrong.append(f"passed and failed with {type(error).__name__}: {str(error)[:300]} {changed(tree)}")
                if isinstance(error, KeyboardInterrupt):
                    raise

        examine()
    told = {**counts, "forced": dict(Counter(forced.values()))}
    record_property("fuzz", json.dumps(told))
    print(json.dumps(told, indent=1))
    assert not wrong, f"{told}\n" + "\n".join(wrong)
    assert sum(counts.values()) >= COUNT


def force(folder: Path, file: Path) -> str:
    """What becomes of a recipe that is run although it was refused."""
    command = [sys.executable, "-c", FORCED, "train", str(file), "--output", str(file.with_suffix(""))]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return "trained" if process.wait(STEP_S) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        with_group(process)


def swallowed(folder: Path, tree: dict[str, Any], number: int, fact: str) -> bool:
    """The run that was forced trained the same weights as one without what it was refused for: a setting without effect,
    which breaks the law that no option is silently ignored."""
    plain = {
        name: {key: value for key, value in part.items() if f"{key}=" not in fact} if isinstance(part, dict) else part
        for name, part in tree.items()
    }
    if plain == tree:
        return False
    without = written(folder, plain, f"{number}-without")
    weights = [
        its.with_suffix("") / "final" / "model.safetensors" for its in (folder / f"recipe-{number}.yaml", without)
    ]
    return force(folder, without) == "trained" and weights[0].read_bytes() == weights[1].read_bytes()


def with_group(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
