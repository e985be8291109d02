"""The fsdp trainer: what is its own beside the laws."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from verl_adaptor import create_trainer_backend, resolve_trainer
from verl_adaptor.batch import denominators
from verl_adaptor.errors import CheckpointError, ConfigError, TrainerError, UnsupportedCapability
from verl_adaptor.protocols import TrainerBackend
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_training import assert_same_run, run, weights


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


@pytest.mark.parametrize(
    "settings",
    [{"reshard_after_forward": False}, {"zero_stage": 2}, {"cpu_offload": True}, {"sync_every_micro_batch": True}],
)
def test_options_change_no_number(bench: Bench, settings: dict[str, Any]) -> None:
    with bench.trainer(micro_batch_size=2, **settings) as trainer:
        assert_same_run(run(trainer, bench), run(bench.reference_trainer(), bench), str(settings))


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


def test_two_ranks(tmp_path: Path) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, __file__, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


# -- what each of two ranks checks -------------------------------------------------------------------------------


def gradients_are_reduced_once(bench: Bench) -> None:
    """Two layers and the root: one reduction each, unless asked for after each of three micro-batches."""
    for every, expected in ((False, 3), (True, 9)):
        counted = mock.patch.object(groups, "foreach_reduce", wraps=vars(groups)["foreach_reduce"])
        settings: dict[str, Any] = {"data_parallel_size": 2, "micro_batch_size": 1, "sync_every_micro_batch": every}
        with counted as reduce, bench.trainer(**settings) as trainer:
            trainer.update(bench.batch(), policy_gradient)
        assert reduce.call_count == expected, f"{reduce.call_count} with sync_every_micro_batch={every}"


def parts_of_a_mini_batch_add_up(bench: Bench) -> None:
    batch = bench.batch()
    with bench.trainer(data_parallel_size=2, micro_batch_size=1) as trainer:
        parts = [
            trainer.forward_backward(batch[r], policy_gradient, denominators(batch)) for r in (slice(4), slice(4, 6))
        ]
        got = trainer.optimizer_step() | {"loss": sum(part["loss"] for part in parts)}
    with bench.reference_trainer() as reference:
        expected = reference.update(batch, policy_gradient)
    assert all(abs(got[key] - expected[key]) <= 1e-5 for key in ("loss", "grad_norm")), (got, expected)


def a_broken_backward_leaves_no_trace(bench: Bench) -> None:
    """As where memory runs out: FSDP is left in the middle, with a layer's gradients reduced and another's not."""

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    batch = bench.batch()
    settings: dict[str, Any] = {"data_parallel_size": 2, "micro_batch_size": 2}
    clean: Any
    hit: Any
    with bench.trainer(**settings) as clean, bench.trainer(**settings) as hit:
        first = next(module for name, module in hit.head.named_modules() if name.endswith("layers.0"))
        hook = first.register_full_backward_hook(out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            hit.update(batch, policy_gradient)
        hook.remove()
        results = [[trainer.update(batch, policy_gradient) for _ in range(2)] for trainer in (clean, hit)]
    assert results[0] == results[1], results


def a_loss_that_fails_on_one_slice_leaves_no_trace(bench: Bench) -> None:
    """On one of two ranks that share every row, as where one GPU is full: the other must not wait for it."""

    def fails(outputs: Any, batch: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise MemoryError("this GPU is full")
        return policy_gradient(outputs, batch)

    batch = bench.batch()
    for settings in ({"tensor_parallel_size": 2}, {"context_parallel_size": 2}):
        with bench.trainer(**settings) as clean, bench.trainer(**settings) as hit:
            with pytest.raises(TrainerError, match="MemoryError: this GPU is full"):
                hit.update(batch, fails)
            assert hit.update(batch, policy_gradient) == clean.update(batch, policy_gradient), settings


def each_rank_holds_its_half(bench: Bench) -> None:
    """Of the weights and of AdamW's two averages, between two updates."""
    with bench.trainer(data_parallel_size=2) as trainer:
        trainer.update(bench.batch(), policy_gradient)
        whole = sum(tensor.numel() for tensor in weights(trainer).values())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local_tensors(trainer)}
    share = sum(storages.values()) / (3 * 4 * whole)
    assert 0.5 <= share < 0.51, f"a rank holds {share:.1%}"


def local_tensors(trainer: Any) -> list[torch.Tensor]:
    shards = (t.to_local() if hasattr(t, "to_local") else t for t in trainer._state_tensors())
    return [tensor for tensor in shards if tensor.ndim]


def another_layout_goes_on(bench: Bench, folder: Path) -> None:
    with bench.trainer(data_parallel_size=2) as trainer:
        trainer.update(bench.batch(), policy_gradient)
        trainer.save_checkpoint(folder / "checkpoint")
        before, straight = weights(trainer), run(trainer, bench, steps=2)
    with bench.trainer(tensor_parallel_size=2, sequence_parallel=True) as trainer:
        trainer.load_checkpoint(folder / "checkpoint")
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
        assert_same_run(run(trainer, bench, steps=2), straight, "from data to tensor parallel")


def no_collective_is_left_waiting(bench: Bench) -> None:
    """Under activation checkpointing with adapters a sum over ranks may be recomputed for nobody (see ``_wait``)."""
    with bench.trainer(tensor_parallel_size=2, activation_checkpointing=True, lora_rank=2) as trainer:
        trainer.update(bench.batch(), policy_gradient)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


if __name__ == "__main__":
    own = Bench(get_spec("fsdp"))
    gradients_are_reduced_once(own)
    parts_of_a_mini_batch_add_up(own)
    a_broken_backward_leaves_no_trace(own)
    a_loss_that_fails_on_one_slice_leaves_no_trace(own)
    each_rank_holds_its_half(own)
    another_layout_goes_on(own, Path(sys.argv[1]))
    no_collective_is_left_waiting(own)
    own.close()
