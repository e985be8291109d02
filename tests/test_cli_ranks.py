"""`verl-adaptor train` with trainers of several ranks, and with adapters; test_multinode.py has longer runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_adaptor.cli import main
from verl_adaptor.cli.plan import plan
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.errors import ConfigError
from verl_adaptor.tracking import is_timing

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TWO = ["trainer.data_parallel_size=2", "trainer.cpus_per_worker=0.5"]
SMALL = ["ppo.total_steps=2", "evaluation.prompts=8", "ppo.train_batch_size=16", "ppo.mini_batch_size=8"]
LORA = ["trainer.lora_rank=4", "trainer.learning_rate=0.01", "ppo.kl.where=loss"]
TINY = ["model.build_args.layers=2", "model.build_args.hidden_size=64", "model.build_args.warm_start_steps=20"]
RECIPE = ["train", str(ROOT / "recipes" / "digits.yaml"), "tracking.report=false", "tracking.sinks=[]", *TINY, *SMALL]


def start(output: Path, *arguments: str, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    """The command, in a process group of its own."""
    command = [sys.executable, *(launcher or []), "-m", "verl_adaptor.cli", *RECIPE, *TWO, *arguments]
    return subprocess.Popen(
        [*command, "--output", str(output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=output.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=200)
    return process.returncode, said


def train_here(output: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([*RECIPE, *arguments, "--output", str(output)])
    return int(stopped.value.code or 0)


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not is_timing(k)} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The metrics of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        assert train_here(output) == 0
    yield metrics(output)


def assert_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The first step to rounding; what was sampled after an update may differ by a token."""
    assert len(got) == len(expected)
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "reward/mean"):
        if name in expected[0]:
            assert got[0][name] == pytest.approx(expected[0][name], rel=1e-3, abs=1e-5), name


def test_a_recipe_on_rays_workers(alone: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert train_here(tmp_path / "run", *TWO) == 0
    assert_same(metrics(tmp_path / "run"), alone)
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


def test_adapters_are_their_own_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second model is loaded, unless the reference has settings of its own."""
    recipe = Path(RECIPE[1])
    plans = plan(load_recipe(recipe, LORA))
    assert plans.reference_is_view and plans.reference is None
    plans = plan(load_recipe(recipe, [*LORA, "reference.micro_batch_size=4"]))
    assert not plans.reference_is_view and plans.reference is not None and plans.reference.config.lora_rank is None
    plans = plan(load_recipe(recipe, LORA[:2]))
    assert not plans.reference_is_view and plans.reference is None
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert train_here(tmp_path / "run", *LORA) == 0
    rows = metrics(tmp_path / "run")
    assert abs(rows[0]["kl/reference"]) < 1e-6 < abs(rows[1]["kl/reference"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.data_parallel_size=3"], r"trainer.data_parallel_size=3 .* 8 rows .*allowed: 1, 2, 4, 8"),
        (["critic.data_parallel_size=5"], r"critic.data_parallel_size=5 .*allowed: 1, 2, 4, 8"),
    ],
)
def test_a_batch_that_does_not_spread_evenly_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(load_recipe(Path(RECIPE[1]), [*SMALL, *overrides]))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["ray", "torchrun"])
def test_an_interrupted_run_resumes_to_the_same_numbers(launcher: list[str] | None, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the group. With adapters, a reference beneath them, and a critic."""
    more = [*LORA, "ppo.total_steps=12", "checkpoint.every=1"]
    code, said = finish(start(tmp_path / "straight", *more, launcher=launcher))
    assert code == 0, said
    process = start(tmp_path / "run", *more, launcher=launcher)
    deadline = time.monotonic() + 200
    while not list((tmp_path / "run" / "checkpoints").glob("step-??????")):
        assert process.poll() is None and time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    code, said = finish(process)
    assert code == 130 or (launcher and code != 0), said  # torchrun ends with a code of its own
    assert len(metrics(tmp_path / "run")) < 12, "it had finished"
    code, said = finish(start(tmp_path / "run", *more, "--resume", launcher=launcher))
    assert code == 0, said
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
