"""Ranks in processes of their own: they start, work, fail by name, go on from a checkpoint, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from verl_adaptor import create_trainer_backend, resolve_trainer
from verl_adaptor.config import ExecutionConfig, ParallelConfig, TrainerConfig
from verl_adaptor.errors import (
    BackendNotInstalled,
    BatchError,
    ConfigError,
    TrainerError,
    UnsupportedCapability,
    VerlAdaptorError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from verl_adaptor.execution import RemoteTrainer, WorkerPool, choose_executor
from verl_adaptor.execution import ray as ray_executor
from verl_adaptor.execution.group import Answer, Died, Outcome, Raised, Silent, judge
from verl_adaptor.execution.wire import decode, encode
from verl_adaptor.ppo.loss import PolicyLoss
from verl_adaptor.protocols import LossOutput, TrainerBackend
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import TensorMeta
from verl_adaptor.testing.bench import SHARE_CPUS, Bench, policy_gradient
from verl_adaptor.testing.laws_training import run

TWO = {"learning_rate": 1e-3, "data_parallel_size": 2, **SHARE_CPUS}


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("hf"))
    yield bench
    bench.close()


# -- without a process -------------------------------------------------------------------------------------------

NO_NUMBER = torch.tensor([float("nan"), float("inf"), -0.0])
VALUES = [
    torch.arange(6.0).reshape(2, 3).T,
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
    torch.zeros(0, 4, dtype=torch.int64),
    torch.tensor(True),
    torch.tensor(2.0, dtype=torch.bfloat16),
    NO_NUMBER,
    NO_NUMBER.to(torch.bfloat16),
    torch.nn.Parameter(torch.ones(2)),
    {"nested": [(None, b"bytes", {"deep": torch.ones(1, dtype=torch.float16)})], 3: "three"},
    TensorDict({"input_ids": torch.ones(2, 3, dtype=torch.long), "advantages": torch.zeros(2, 0)}, batch_size=[2]),
    Denominators(tokens=3.0, sequences=2.0, response_length=4),
    LogProbs(torch.ones(1), torch.zeros(1)),
    TensorMeta(name="w", shape=(2, 0), dtype="bfloat16"),
    LossOutput(torch.ones(2), {"kl": (torch.tensor(1.0), torch.tensor(2.0))}),
    PolicyLoss(),
    ("\0", "no mark of ours"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_what_crosses_arrives_as_it_was(value: Any) -> None:
    assert same(decode(encode(value)), value)


def same(one: Any, other: Any) -> bool:
    """Equal in type, bits and structure."""
    if isinstance(other, torch.Tensor):
        bits = [t.detach().contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(other, TensorDict):
        return one.batch_size == other.batch_size and same(dict(one.items()), dict(other.items()))
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
    fields = getattr(other, "__dict__", None)
    return type(one) is type(other) and (same(vars(one), fields) if fields else one == other)


def test_only_arrays_and_built_ins_cross(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other environment may hold another torch; and it has another working directory."""
    built_in = (str, bytes, int, float, bool, np.ndarray, type(None))

    def leaves(value: Any) -> Iterator[Any]:
        inner = value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        for item in inner or ():
            yield from leaves(item)
        if inner is None:
            yield value

    assert {type(leaf) for value in VALUES for leaf in leaves(encode(value))} <= set(built_in)
    monkeypatch.chdir(tmp_path)
    assert decode(encode({"folder": Path("here")})) == {"folder": tmp_path / "here"}


ONE, FOUR = ParallelConfig(), ParallelConfig(data_parallel_size=2, tensor_parallel_size=2)
CHOICES: list[tuple[ParallelConfig, dict[str, Any], int, str]] = [
    (ONE, {}, 1, "inline"),
    (ONE, {"executor": "ray"}, 1, "ray"),
    (ONE, {"ray_address": "10.0.0.1:6379"}, 1, "ray"),
    (ONE, {"python_executable": "/venv/bin/python"}, 1, "ray"),
    (ONE, {"executor": "inline", "ray_address": "auto"}, 1, "does not read ray_address"),
    (FOUR, {}, 1, "ray"),
    (FOUR, {"executor": "inline"}, 1, "inline"),  # the trainer says that it needs four ranks
    (FOUR, {}, 4, "inline"),
    (FOUR, {"executor": "ray"}, 4, "one of 4 ranks"),
    (FOUR, {"python_executable": "/venv/bin/python"}, 4, "leave out python_executable"),
]


@pytest.mark.parametrize(("parallel", "execution", "running", "expected"), CHOICES)
def test_where_a_trainer_runs(
    parallel: ParallelConfig, execution: dict[str, Any], running: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", str(running))
    if " " not in expected:
        assert choose_executor(parallel.world_size, ExecutionConfig(**execution)) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            choose_executor(parallel.world_size, ExecutionConfig(**execution))


HANGS, FROZEN = Silent("in call update, at wait (x.py:1)"), Silent("")
ECHO, BUG = Raised("", "RuntimeError: [gloo] Connection closed by peer"), Raised("", "ZeroDivisionError: a bug")
REFUSAL, RETOLD = Raised("BatchError", "no advantages"), Raised("TrainerError", "the loss raised on rank 1: a bug")
VERDICTS: list[tuple[list[Outcome], type[VerlAdaptorError], str, bool]] = [
    ([REFUSAL, REFUSAL], BatchError, "^no advantages$", True),
    ([REFUSAL, Answer()], WorkerError, "^rank 0 failed in an update: BatchError: no advantages", False),
    ([ECHO, Died("killed")], WorkerDied, r"^rank 1 died in an update \(killed\)", False),
    ([Died("killed"), HANGS, Died("killed")], WorkerDied, r"^ranks 0, 2 died in an update \(killed\)", False),
    ([HANGS, BUG, ECHO], WorkerError, "^rank 1 failed in an update: ZeroDivisionError: a bug", False),
    ([RETOLD, BUG], WorkerError, "^rank 1 failed in an update: ZeroDivisionError: a bug", False),
    ([HANGS, FROZEN, ECHO], WorkerTimeout, "^rank 1 did not finish an update within 3 s", False),
    ([Answer(), HANGS], WorkerTimeout, r"^rank 1 did not finish .*at wait \(x.py:1\)", False),
    ([BUG, BUG], WorkerError, "^rank 0 failed in an update: ZeroDivisionError", False),
]


@pytest.mark.parametrize(("outcomes", "kind", "sentence", "usable"), VERDICTS)
def test_who_is_blamed(outcomes: list[Outcome], kind: type[VerlAdaptorError], sentence: str, usable: bool) -> None:
    """A death before its echoes, an error before those who wait for it, a frozen process before those who wait."""
    error, goes_on = judge(outcomes, "an update", 3, "")
    assert type(error) is kind and re.search(sentence, str(error)), error
    assert goes_on is usable


def test_every_method_reaches_the_ranks() -> None:
    """What a backend may write, the trainer that stands for it here passes on."""
    hooks = {name for name, found in vars(TrainerBackend).items() if callable(found) and not name.startswith("__")}
    default = {name for name in hooks if not name.startswith("_") and f"_{name}" in hooks}
    checks = {
        "_signed",
        "_check",
        "_check_open",
        "_check_alive",
        "_check_trainable",
        "_unsupported",
        "check_exported",
        "close",
    }
    assert hooks - default - checks <= vars(RemoteTrainer).keys()


def test_the_port_where_ranks_meet_is_theirs() -> None:
    held = ray_executor.held_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", held.getsockname()[1]))
    store = torch.distributed.TCPStore("127.0.0.1", held.getsockname()[1], 1, True)
    store.set("here", "yes")
    assert store.get("here") == b"yes"


def test_without_ray(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendNotInstalled, match=r"pip install 'ray>=.*torchrun --nproc-per-node=2"):
        create_trainer_backend(bench.path, data_parallel_size=2)


def test_trainers_that_do_not_fit_together_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """C14, for a whole run; trainers of one layout share their ranks."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    configs = [TrainerConfig(parallel=ParallelConfig(data_parallel_size=size)) for size in (2, 2, 3)]
    with WorkerPool() as pool:
        pool.check(configs[:2])
        with pytest.raises(ConfigError, match=r"need 5 CPUs, and this machine has 4.*cpus_per_worker=0.8"):
            pool.check(configs)


def test_another_python_is_looked_at_first(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no program here"):
        create_trainer_backend(bench.path, python_executable=str(tmp_path / "python"))
    venv.create(tmp_path, with_pip=False)
    with pytest.raises(BackendNotInstalled, match=rf"-m pip install ray=={ray.__version__} verl-adaptor"):
        create_trainer_backend(bench.path, python_executable=str(tmp_path / "bin" / "python"))


# -- a plain script ----------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

from verl_adaptor import create_trainer_backend, resolve_trainer
from verl_adaptor.errors import BatchError, ConfigError
from verl_adaptor.execution import torchrun
from verl_adaptor.testing.bench import policy_gradient

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole, whatever another rank says meanwhile

def telling(outputs, batch):
    say("hello from the loss", os.environ["RANK"])
    return policy_gradient(outputs, batch)

def refusal(**settings):
    try:
        create_trainer_backend(folder / "llama", **settings)
    except ConfigError as error:
        say("REFUSED", error)

def descendants():
    found = 0
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += f"MARK={os.environ['MARK']}".encode() in file.read_bytes() and int(file.parent.name) != os.getpid()
        except OSError:
            pass
    return found

def refusing(outputs, batch):
    raise BatchError("no advantages")

def driven_by_the_first():
    if torchrun.world()[0] > 0:
        return torchrun.serve(60)
    with torchrun.TorchrunPool() as pool:
        trainer = resolve_trainer(folder / "llama", learning_rate=1e-3, data_parallel_size=2).create(workers=pool)
        say("DRIVEN", *(trainer.update(batch, telling)["loss"] for _ in range(2)))
        try:
            trainer.update(batch, refusing)
        except BatchError as error:
            say("REFUSED", error)
        say("AGAIN", trainer.update(batch, telling)["loss"])

if __name__ == "__main__":
    import torch

    folder, alone = Path(sys.argv[1]), "WORLD_SIZE" not in os.environ
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    refusal(data_parallel_size=os.cpu_count() + 1 if alone else 3)
    refusal(data_parallel_size=2, executor="inline" if alone else "ray")
    say("BEFORE", descendants())
    batch = torch.load(folder / "batch.pt", weights_only=False)
    trainer = create_trainer_backend(folder / "llama", learning_rate=1e-3, data_parallel_size=2, cpus_per_worker=0.25)
    say("LOSSES", *(trainer.update(batch, telling)["loss"] for _ in range(3)))
    say("DURING", descendants())
    if alone:
        time.sleep(1)  # what ranks print takes Ray half a second
    trainer.close()
    deadline = time.monotonic() + 20
    while descendants() and time.monotonic() < deadline and alone:
        time.sleep(0.1)
    say("AFTER", descendants())
    if alone:
        assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before, "the process was not left as found"
    else:
        driven_by_the_first()
"""


def run_script(bench: Bench, *command: str) -> tuple[dict[str, list[str]], str]:
    """What the script said, by first word, and all its output."""
    script = bench.folder / "script.py"
    script.write_text(SCRIPT)
    torch.save(bench.batch(), Path(bench.path).parent / "batch.pt")
    environment = {**os.environ, "MARK": f"{script}{len(command)}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, str(script), str(bench.folder)],
        env=environment, cwd=bench.folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        said.setdefault(word, []).append(rest)
    return said, done.stdout + done.stderr


def test_a_plain_script_gets_its_ranks_and_leaves_nothing(bench: Bench) -> None:
    """C14 too: what does not fit is refused before any process is started."""
    segments = set(Path("/dev/shm").iterdir())
    said, output = run_script(bench)
    assert f"need {os.cpu_count() + 1} CPUs, and there are {os.cpu_count()} CPUs" in said["REFUSED"][0]
    assert "torchrun --nproc-per-node=2" in said["REFUSED"][1]
    assert said["BEFORE"] == said["AFTER"] == ["0"] and int(said["DURING"][0]) > 2
    assert all(f"(hf rank {rank} " in output for rank in (0, 1)), output
    noise = [line for line in output.splitlines() if line.split(" ")[0] not in said or "Loading" in line]
    assert not noise and len(said) == 6, output
    assert set(Path("/dev/shm").iterdir()) <= segments
    expected = run(bench.reference_trainer(), bench, steps=3).losses
    assert list(map(float, said["LOSSES"][0].split())) == pytest.approx(expected, abs=1e-5)


def test_the_same_script_under_torchrun(bench: Bench) -> None:
    said, _ = run_script(bench, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert any("torchrun --nproc-per-node=3" in refused for refused in said["REFUSED"])
    assert any("one of 2 ranks" in refused for refused in said["REFUSED"])
    expected = run(bench.reference_trainer(), bench, steps=3).losses
    assert len(said["LOSSES"]) == 2 and said["LOSSES"][0] == said["LOSSES"][1]
    assert list(map(float, said["LOSSES"][0].split())) == pytest.approx(expected, abs=1e-5)
    driven = [float(loss) for word in ("DRIVEN", "AGAIN") for loss in said[word][0].split()]
    assert driven == pytest.approx(expected, abs=1e-5) and "no advantages" in said["REFUSED"]


# -- on one group of ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Ranks of this module's own, in a Ray that outlives them: so a restart takes no longer than its ranks."""
    ours = not ray.is_initialized()
    if ours:
        ray.init(address="local", num_cpus=2, include_dashboard=False, configure_logging=False, logging_level="ERROR")
    with WorkerPool() as pool:
        yield pool
    assert ray.is_initialized(), "a Ray that was there before was ended"
    if ours:
        ray.shutdown()


@pytest.fixture
def trainer(bench: Bench, pool: WorkerPool) -> Iterator[TrainerBackend]:
    with resolve_trainer(bench.path, call_timeout_s=60, **TWO).create(workers=pool) as trainer:
        yield trainer


def on_rank(rank: int | None, act: Callable[[], Any]) -> Loss:
    """`policy_gradient`, but a rank (None: each) does something else first."""

    def loss(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
        if rank is None or os.environ["RANK"] == str(rank):
            act()
        return policy_gradient(outputs, batch)

    return loss


def on_rank_going_back(rank: int, act: Callable[[], Any]) -> Loss:
    """`policy_gradient`, but in its backward pass a rank does something else first, and the others wait for that rank."""

    def loss(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
        if os.environ["RANK"] == str(rank):
            outputs["log_probs"].register_hook(lambda _: act())
        return policy_gradient(outputs, batch)

    return loss


def raiser(error: Exception) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


FAULTS: dict[str, tuple[Callable[[], Any], float, type[VerlAdaptorError], str]] = {
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        60,
        WorkerDied,
        r"^rank 1 died in update of the hf .*loss=",
    ),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), 2, WorkerTimeout, r"rank 1: its process does not react"),
    "a bug": (
        raiser(ZeroDivisionError("a bug")),
        4,
        WorkerError,
        r"^rank 1 failed in update .*ZeroDivisionError: a bug",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(
    name: str, trainer: RemoteTrainer, bench: Bench, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, timeout_s, kind, sentence = FAULTS[name]
    run(trainer, bench, steps=2)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    straight = run(trainer, bench, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(pool.group(trainer.config, ""), "call_timeout_s", timeout_s)
        with pytest.raises(kind, match=sentence) as failed:
            trainer.update(bench.batch(), on_rank_going_back(1, act))
        assert "update of the hf policy trainer" in str(failed.value)
    with pytest.raises(WorkerError, match=r"were ended, because .*restart\(checkpoint\)"):
        trainer.update(bench.batch(), policy_gradient)
    trainer.restart(tmp_path / "checkpoint")
    resumed = run(trainer, bench, steps=2)
    assert (resumed.losses, resumed.grad_norms) == (straight.losses, straight.grad_norms)
    assert all(torch.equal(tensor, straight.weights[n]) for n, tensor in resumed.weights.items())


def test_what_all_ranks_refuse_arrives_as_it_was_raised(trainer: RemoteTrainer, bench: Bench) -> None:
    with pytest.raises(BatchError, match=r"^no advantages") as refused:
        trainer.update(bench.batch(), on_rank(None, raiser(BatchError("no advantages"))))
    assert any("in loss" in note for note in refused.value.__notes__), "the worker's traceback is lost"
    with pytest.raises(TrainerError, match="nowhere"):
        trainer.load_checkpoint(bench.folder / "nowhere")
    run(trainer, bench, steps=1)


def test_an_export_may_be_left_half_way(trainer: RemoteTrainer, bench: Bench) -> None:
    update = trainer.export_weights()
    buckets = update.buckets()
    next(buckets)
    del buckets
    again = trainer.export_weights()
    assert again.version == update.version
    assert sum(map(len, update.buckets())) == sum(map(len, again.buckets())) == len(update.tensors)
    half_way = again.buckets()
    next(half_way)
    trainer.update(bench.batch(), policy_gradient)
    with pytest.raises(TrainerError, match="gone"):
        list(again.buckets())
    newest = trainer.export_weights()
    assert newest.version == trainer.policy_version == update.version + 1
    with pytest.raises(TrainerError, match="gone"):
        list(update.buckets())
    run(trainer, bench, steps=1)


def test_trainers_share_ranks_and_views_are_of_them(bench: Bench, pool: WorkerPool, tmp_path: Path) -> None:
    """An actor with adapters, its reference beneath them, and a critic: two processes in all."""
    batch = bench.batch()
    with (
        resolve_trainer(bench.path, lora_rank=2, call_timeout_s=60, **TWO).create(workers=pool) as actor,
        resolve_trainer(bench.path, head="value", call_timeout_s=60, **TWO).create(workers=pool) as critic,
    ):
        base = actor.compute_log_probs(batch).log_probs
        one, other = actor.reference(), actor.reference()
        run(actor, bench, steps=2)
        one.close()
        assert torch.equal(other.compute_log_probs(batch).log_probs, base)
        assert not torch.equal(actor.compute_log_probs(batch).log_probs, base)
        with pytest.raises(TrainerError):
            other.update(batch, policy_gradient)
        actor.save_adapter(tmp_path / "adapter")
        assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
        actor.offload("disk")
        assert critic.compute_values(batch).shape == batch["responses"].shape
        actor.onload()
        assert torch.equal(other.compute_log_probs(batch).log_probs, base)
        with actor.rollout_engine() as engine:  # on the same ranks
            assert engine.generate([[5, 6, 7]])[0].policy_version == actor.policy_version
        with pytest.raises(UnsupportedCapability, match="generates nothing"):
            critic.rollout_engine()
        with pytest.raises(UnsupportedCapability):
            critic.reference()
        assert len(ray.util.placement_group_table()) and len(pool._groups) == 1


def test_ranks_that_others_have_are_not_waited_for(
    trainer: RemoteTrainer, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "PLACEMENT_S", 1.0)
    all_cpus = int(ray.cluster_resources()["CPU"])
    with pytest.raises(ConfigError, match=rf"need {all_cpus} CPUs, and [\d.]+ CPUs of {all_cpus} CPUs are free"):
        create_trainer_backend(bench.path, data_parallel_size=all_cpus, executor="ray")
