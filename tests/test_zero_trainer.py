"""The zero trainer: what is its own. The laws it shares, on one rank and on several, are in the suites."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_adaptor import create_trainer_backend
from verl_adaptor.batch import denominators
from verl_adaptor.errors import CheckpointError, ConfigError, TrainerError
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_training import OPTIONS, assert_same_run, run, weights

STAGES: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
OFFLOADS: list[dict[str, Any]] = [
    {"zero_stage": 1, "offload_optimizer": "cpu"},
    {"zero_stage": 2, "offload_optimizer": "cpu"},
    {"zero_stage": 3, "offload_optimizer": "cpu"},
    {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
]
SMALL_BUCKETS: list[dict[str, Any]] = [
    {"zero_stage": 2, "reduce_bucket_size": 4000, "gather_bucket_size": 1000},
    {"zero_stage": 3, "reduce_bucket_size": 4000, "prefetch_bucket_size": 1, "persistence_threshold": 1},
]
"""Smaller than the tiny model, so that it takes several."""


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(get_spec("zero"), trainer_settings={"device": "cpu", "executor": "inline"})
    yield made
    made.close()


@pytest.mark.parametrize("settings", [*OFFLOADS, *SMALL_BUCKETS], ids=str)
def test_offload_and_buckets_are_the_same_update(bench: Bench, settings: dict[str, Any]) -> None:
    expected = run(bench.reference_trainer(**OPTIONS), bench)
    with bench.trainer(**settings, **OPTIONS, micro_batch_size=2) as trainer:
        assert_same_run(run(trainer, bench), expected, str(settings))


@pytest.mark.parametrize("settings", [*STAGES, *OFFLOADS[1:3]], ids=str)
def test_a_broken_mini_batch_leaves_nothing_behind(bench: Bench, settings: dict[str, Any]) -> None:
    batch, calls = bench.batch(), []

    def breaks(outputs: Any, micro: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise InterruptedError
        return policy_gradient(outputs, micro)

    with bench.trainer(**settings, micro_batch_size=1) as clean, bench.trainer(**settings, micro_batch_size=1) as hit:
        for trainer in (clean, hit):
            trainer.update(batch, policy_gradient)
        with pytest.raises(TrainerError, match="InterruptedError"):
            hit.forward_backward(batch, breaks, denominators(batch))
        after = [trainer.update(batch, policy_gradient) for trainer in (clean, hit)]
        assert after[0] == after[1]


@pytest.mark.parametrize("settings", [*STAGES, OFFLOADS[1], OFFLOADS[3]], ids=str)
def test_a_trainer_goes_back_to_its_own_checkpoint(bench: Bench, settings: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed says that stage 3 cannot, "it is because ``load_checkpoint()`` wants a pristine model"."""
    with bench.trainer(**settings, **OPTIONS) as trainer:
        run(trainer, bench, steps=1)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        first = run(trainer, bench, steps=2)
        trainer.forward_backward(bench.batch(), policy_gradient, denominators(bench.batch()))
        trainer.load_checkpoint(tmp_path / "checkpoint")
        second = run(trainer, bench, steps=2)
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)
    assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())


def test_hyperparameters_are_the_configs_after_loading(bench: Bench, tmp_path: Path) -> None:
    with bench.trainer(weight_decay=0.0) as trainer:
        run(trainer, bench, steps=1)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        decayed_by_old = run(trainer, bench, steps=1).weights
    with bench.trainer(weight_decay=0.5) as trainer:
        trainer.load_checkpoint(tmp_path / "checkpoint")
        decayed = run(trainer, bench, steps=1).weights
    name = "model.embed_tokens.weight"
    moved = (decayed[name] - decayed_by_old[name]).abs().max()
    assert float(moved) > 1e-4, "the checkpoint's weight decay is in force"


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("pattern", ["*model_states.pt", "*optim_states.pt"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_foreign_pickle_is_refused_and_does_not_run(bench: Bench, tmp_path: Path, stage: int, pattern: str) -> None:
    folder, mark = tmp_path / "checkpoint", tmp_path / "ran"
    with bench.trainer(zero_stage=stage) as trainer:
        trainer.save_checkpoint(folder)
        files = [path for path in folder.rglob(pattern) if "optim" in pattern or "optim" not in path.name]
        state = torch.load(files[0], weights_only=False)
        torch.save(state | {"lr_scheduler": Payload(mark)}, files[0])
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"][files[0].relative_to(folder).as_posix()] = files[0].stat().st_size
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        before = weights(trainer)
        with pytest.raises(CheckpointError, match="cannot be read"):
            trainer.load_checkpoint(folder)
        assert not mark.exists(), "code of the checkpoint was run"
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
        torch.load(files[0], weights_only=False)
        assert mark.exists(), "the payload is harmless: the test proves nothing"


@pytest.mark.parametrize("asked", [{"zero_stage": 2}, {"trainable": False}], ids=str)
def test_another_stage_or_role_is_refused_by_name(bench: Bench, tmp_path: Path, asked: dict[str, Any]) -> None:
    with bench.trainer(zero_stage=3) as trainer:
        trainer.save_checkpoint(tmp_path / "checkpoint")
    with bench.trainer(**asked) as trainer, pytest.raises(CheckpointError, match=next(iter(asked))):
        trainer.load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize(("stage", "trainable"), [(0, True), (1, True), (2, True), (3, True), (3, False)])
def test_close_frees_the_model(bench: Bench, stage: int, trainable: bool) -> None:
    trainer = create_trainer_backend(bench.path, "zero", zero_stage=stage, trainable=trainable, device="cpu")
    for _ in range(2):  # DeepSpeed records the first pass, and plays it back from the second on
        trainer.compute_log_probs(bench.batch())
        if trainable:
            trainer.update(bench.batch(), policy_gradient)
    alive = [weakref.ref(parameter) for parameter in trainer.head.parameters()]  # type: ignore[attr-defined]
    trainer.close()
    del trainer
    gc.collect()
    assert not any(reference() is not None for reference in alive), "DeepSpeed still holds the model"


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 0, "offload_optimizer": "cpu"},
        {"zero_stage": 2, "offload_parameters": "cpu"},
    ],
    ids=str,
)
def test_an_offload_without_its_stage_is_refused(bench: Bench, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"with zero_stage=\d; it needs zero_stage"):
        bench.trainer(**settings)


QUIET = """
import os, sys
from verl_adaptor import create_trainer_backend
before = dict(os.environ)
with create_trainer_backend(sys.argv[1], "zero", device="cpu", offload_optimizer="cpu") as trainer:
    assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
"""


def test_nothing_is_compiled_printed_or_left_in_the_environment(bench: Bench, tmp_path: Path) -> None:
    """A machine without a compiler trains, offload included, and standard output is the program's own."""
    hidden = {"DS_ACCELERATOR", "LOCAL_RANK", "RANK", "WORLD_SIZE"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", QUIET, bench.path], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "DeepSpeed" not in done.stderr and "accelerator" not in done.stderr
    assert not (tmp_path / "compiled").exists()
