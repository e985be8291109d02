"""The fsdp trainer: what is its own beside the laws."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_adaptor import create_trainer_backend, resolve_trainer
from verl_adaptor.errors import CheckpointError, ConfigError, UnsupportedCapability
from verl_adaptor.protocols import TrainerBackend
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_training import assert_same_run, run


@pytest.fixture(scope="module")
def bench() -> Any:
    bench = Bench(get_spec("fsdp"))
    yield bench
    bench.close()


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.file}",))


def saved(bench: Bench, name: str, **settings: Any) -> Path:
    folder = bench.folder / name
    with bench.trainer(**settings) as trainer:
        trainer.update(bench.batch(), policy_gradient)
        trainer.save_checkpoint(folder)
    return folder


def replace(folder: Path, file: str, content: bytes) -> None:
    """As somebody would who can write into the folder: with a manifest that fits."""
    (folder / file).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file] = len(content)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_no_file_of_a_checkpoint_can_run_code(bench: Bench, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    folder = saved(bench, "hostile")
    originals = {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "manifest.json"}
    assert {".metadata", "__0_0.distcp"} <= originals.keys()
    with bench.trainer() as trainer:
        before = trainer.compute_log_probs(bench.batch()).log_probs
        for name, original in originals.items():
            replace(folder, name, pickle.dumps(Payload(witness)))
            with pytest.raises(CheckpointError, match="cannot be read"):
                trainer.load_checkpoint(folder)
            replace(folder, name, original)
        assert not witness.exists()
        assert torch.equal(trainer.compute_log_probs(bench.batch()).log_probs, before)
        trainer.load_checkpoint(folder)  # as it was, it still loads


def test_checkpoints_of_another_kind_change_nothing(bench: Bench) -> None:
    frozen, critic = saved_frozen(bench), saved_critic(bench)
    with bench.trainer() as trainer:
        for folder, sentence in ((frozen, "trainable=false"), (critic, "head='value'")):
            with pytest.raises(CheckpointError, match=sentence):
                trainer.load_checkpoint(folder)
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), "after refused checkpoints")


def saved_frozen(bench: Bench) -> Path:
    with bench.trainer(trainable=False) as trainer:
        trainer.save_checkpoint(bench.folder / "frozen")
    return bench.folder / "frozen"


def saved_critic(bench: Bench) -> Path:
    with bench.trainer(head="value") as trainer:
        trainer.save_checkpoint(bench.folder / "critic")
    return bench.folder / "critic"


@pytest.mark.parametrize("settings", [{"reshard_after_forward": False}, {"zero_stage": 2}, {"cpu_offload": True}])
def test_options_change_no_number(bench: Bench, settings: dict[str, Any]) -> None:
    with bench.trainer(micro_batch_size=2, **settings) as trainer:
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), str(settings))


def test_half_a_mini_batch_leaves_no_gradient(bench: Bench) -> None:
    def breaks(outputs: Any, batch: Any) -> Any:
        if batch["attention_mask"].sum() == shortest:
            raise RuntimeError("in the middle")
        return policy_gradient(outputs, batch)

    batch = bench.batch()
    shortest = int(batch["attention_mask"].sum(-1)[3])
    with bench.trainer(micro_batch_size=1) as trainer:
        with pytest.raises(RuntimeError, match="in the middle"):
            trainer.update(batch, breaks)
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), "after a failed update")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fsdp_version": 1}, "FSDP1 .*deprecated.*leave it at 2"),
        (
            {"data_parallel_size": 4, "shard_size": 3},
            "shard_size=3 does not divide data_parallel_size=4; allowed: 1, 2, 4",
        ),
        ({"zero_stage": 3, "reshard_after_forward": False}, "zero_stage=3 contradicts reshard_after_forward=False"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide num_attention_heads=4.*allowed: 1, 2, 4"),
        ({"tensor_parallel_size": 4}, "does not divide num_key_value_heads=2"),
    ],
)
def test_bad_layouts_are_refused_before_anything_loads(bench: Bench, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve_trainer(bench.path, "fsdp", **settings)


def test_what_it_lacks_names_who_has_it(bench: Bench) -> None:
    for settings, other in (({"pipeline_parallel_size": 2}, "megatron"), ({"zero_stage": 1}, "zero")):
        with pytest.raises(UnsupportedCapability, match=f"backends that have it: .*{other}"):
            resolve_trainer(bench.path, "fsdp", **settings)


def test_a_world_that_torchrun_made_too_small_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made: TrainerBackend | None = None
    with pytest.raises(ConfigError, match="multiply to 2 ranks, and 1 are running"):
        made = create_trainer_backend(bench.path, "fsdp", data_parallel_size=2, executor="inline")
    assert made is None
