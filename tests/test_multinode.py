"""Whole runs on several ranks, several hosts, and two environments side by side."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from tensordict import TensorDict

from verl_adaptor import create_trainer_backend
from verl_adaptor.execution import torchrun
from verl_adaptor.protocols import LossOutput
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_training import run
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking import is_timing

PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
TWO = ("trainer.data_parallel_size=2", "trainer.cpus_per_worker=0.5")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("hf"))
    yield bench
    bench.close()


# -- the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of PPO with critic and reference, a checkpoint each."""
    folder = tmp_path_factory.mktemp("recipe")
    make_tiny_model("llama", folder / "model")
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"question {i}"}) for i in range(24)))
    (folder / "my_reward.py").write_text("def score(ts):\n    return [sum(t.response_ids) % 7 / 7 for t in ts]\n")
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "chat_template": False},
        "rollout": {"max_tokens": 6, "n": 2},
        "trainer": {"learning_rate": 1e-3},
        "critic": {},
        "reward": {"function": "my_reward:score"},
        "ppo": {"total_steps": 2, "train_batch_size": 4, "mini_batch_size": 2, "kl": {"where": "loss"}},
        "evaluation": {"prompts": 4},
        "checkpoint": {"every": 1},
        "tracking": {"sinks": [], "report": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return folder / "recipe.yaml"


def start(how: list[str], recipe: Path, output: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [*how, "verl_adaptor.cli", "train", str(recipe), *overrides, "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=recipe.parent, stdout=pipe, stderr=pipe, text=True)


def metrics(output: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not is_timing(name)} for row in rows]


@pytest.mark.slow
def test_a_recipe_gives_the_same_run_here_through_ray_and_under_torchrun(recipe: Path, tmp_path: Path) -> None:
    """Actor, critic and reference share two ranks; who starts the ranks changes no bit, their number next to nothing."""
    for name, how, overrides in (("here", PYTHON, ()), ("ray", PYTHON, TWO), ("torchrun", TORCHRUN, TWO)):
        process = start(how, recipe, tmp_path / name, *overrides)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, f"{name}: {errors}"
    here, through_ray, under_torchrun = (metrics(tmp_path / name) for name in ("here", "ray", "torchrun"))
    assert through_ray == under_torchrun
    assert len(here) == len(through_ray) == 2
    for one, two in zip(here, through_ray, strict=True):
        assert two == pytest.approx(one, abs=1e-4)


def test_torchrun_ranks_that_do_not_fit_the_recipe_are_refused_in_a_sentence(recipe: Path, tmp_path: Path) -> None:
    process = start(TORCHRUN, recipe, tmp_path / "run")
    _, errors = process.communicate(timeout=200)
    assert errors.count("verl-adaptor: the parallel sizes multiply to 1 ranks, and 2 are running") == 1, errors
    assert "exitcode  : 2" in errors and not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_a_peer_that_is_killed_under_torchrun_ends_the_run_which_is_resumed(recipe: Path, tmp_path: Path) -> None:
    settings = (*TWO, "trainer.call_timeout_s=20", "ppo.total_steps=6")
    straight = start(TORCHRUN, recipe, tmp_path / "straight", *settings)
    assert straight.communicate(timeout=200) and straight.returncode == 0
    process = start(TORCHRUN, recipe, tmp_path / "run", *settings)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/checkpoints/step-000001").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=200)
    assert process.returncode != 0 and "verl-adaptor: rank 1 died in" in errors, errors
    resumed = start(TORCHRUN, recipe, tmp_path / "run", *settings, "--resume")
    _, errors = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, errors
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


def test_large_requests_reach_the_peers_and_a_missing_one_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one entry of the store holds; the reply that does not come is that of rank 2."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torchrun, "_rendezvous", lambda: store)
    first, peer = torchrun.Channel(), torchrun.Channel()
    request = ("call", b"x" * (2 * torchrun.PIECE + 1))
    first.send(request)
    assert peer.receive(1.0) == request
    peer.reply(1, ("answer", None))
    assert first.replies([1, 2], 0.5) == {1: ("answer", None)}


# -- several hosts -----------------------------------------------------------------------------------------------


def telling(folder: Path) -> Any:
    """`policy_gradient`; each rank also writes down where it is."""

    def loss(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
        known = {name: os.environ.get(name) for name in ("LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")}
        known["address"] = ray.util.get_node_ip_address()
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(known))
        return policy_gradient(outputs, batch)

    return loss


def one_update_across(bench: Bench, ray_address: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each rank said of its place, after updates that equal those of one process."""
    two = {"learning_rate": 1e-3, "data_parallel_size": 2, **settings}
    with create_trainer_backend(bench.path, ray_address=ray_address, **two) as trainer:
        assert run(trainer, bench).losses == pytest.approx(run(bench.reference_trainer(), bench).losses, abs=1e-5)
        trainer.update(bench.batch(), telling(bench.folder))
    first, second = (json.loads((bench.folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return first, second


ACROSS = """
import sys
from ray.cluster_utils import Cluster
from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import Bench
sys.path.insert(0, sys.argv[1])
from test_multinode import one_update_across

if __name__ == "__main__":
    address = sys.argv[2] if len(sys.argv) > 2 else None
    if address is None:
        head = {"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.3")
    for backend in ("hf", "fsdp"):
        bench = Bench(get_spec("hf"))
        for rank in one_update_across(bench, address or cluster.address, backend=backend):
            print("rank", rank["address"], rank["MASTER_ADDR"], rank["LOCAL_RANK"], rank["GLOO_SOCKET_IFNAME"])
        bench.close()
    if address is None:
        cluster.shutdown()
"""


def ranks_across(folder: Path, *address: str, within: Sequence[str] = ()) -> list[list[str]]:
    """What the ranks of hf, then those of fsdp, say of their places: in a process of its own, which is in one Ray only."""
    (folder / "script.py").write_text(ACROSS)
    command = [*within, sys.executable, str(folder / "script.py"), str(Path(__file__).parent), *address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("rank ")]


@pytest.mark.slow
def test_one_update_over_two_ray_nodes(tmp_path: Path) -> None:
    """Neither node has room for both ranks; the first rank's node is where they meet."""
    told = ranks_across(tmp_path)
    assert len(told) == 4
    for (first, master, *rest), (second, other_master, *other_rest) in (told[:2], told[2:]):
        assert {first, second} == {"127.0.0.2", "127.0.0.3"} and rest[0] == other_rest[0] == "0"
        assert master == other_master == first


@pytest.mark.slow
def test_one_update_over_two_network_namespaces(tmp_path: Path) -> None:
    """Two hosts as far as the network goes: separate interfaces, addresses and routes, joined by one cable."""
    with namespaces() as (head, worker), contextlib.ExitStack() as stack:
        for name, place in ((head, ("--head", "--port=26379")), (worker, ("--address=10.77.0.1:26379",))):
            address = f"--node-ip-address=10.77.0.{1 if name == head else 2}"
            node = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", address, *place]
            process = subprocess.Popen(
                ["ip", "netns", "exec", name, *node],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            assert any("Ray runtime started" in line for line in process.stdout or ()), "it ended at once"
        told = ranks_across(tmp_path, "10.77.0.1:26379", within=("ip", "netns", "exec", head))
        ranks = [["10.77.0.1", "10.77.0.1", "0", "cable0"], ["10.77.0.2", "10.77.0.1", "0", "cable1"]]
        assert told == ranks * 2


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2."""
    names = (f"va-head-{os.getpid()}", f"va-worker-{os.getpid()}")
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add cable0 netns {names[0]} type veth peer name cable1 netns {names[1]}")
    for place, name in enumerate(names):
        commands.append(f"ip -n {name} addr add 10.77.0.{place + 1}/24 dev cable{place}")
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", f"cable{place}")]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"network namespaces are not permitted here: `{command}` said {done.stderr.strip()}")
        yield names
    except FileNotFoundError:
        pytest.skip("network namespaces need the program `ip` (package iproute2)")
    finally:
        if shutil.which("ip"):
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# -- two environments --------------------------------------------------------------------------------------------

OTHER = "5.10.4"
"""A transformers that cannot be installed beside the one that is here."""


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second virtual environment: the same torch and Ray, another transformers (a minute or two to install).

    VERL_ADAPTOR_SECOND_PYTHON names one that is there.
    """
    if there := os.environ.get("VERL_ADAPTOR_SECOND_PYTHON"):
        return there
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python, root = str(folder / "bin" / "python"), str(Path(__file__).parent.parent)
    torch_version = torch.__version__.partition("+")[0]
    wanted = [f"torch=={torch_version}", f"transformers=={OTHER}", f"ray=={ray.__version__}", "-e", root]
    done = subprocess.run([python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the second environment cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def telling_version() -> Any:
    """`policy_gradient`, with the rank's version of transformers as metrics."""

    def loss(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
        import transformers

        parts = enumerate(map(float, transformers.__version__.split(".")[:3]))
        told = {f"v{place}": (torch.tensor(part), torch.tensor(1.0)) for place, part in parts}
        return LossOutput(-outputs["log_probs"] * batch["advantages"], told)

    return loss


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_and_an_engine_with_conflicting_pins_side_by_side(bench: Bench, other_python: str) -> None:
    import transformers

    assert transformers.__version__ != OTHER
    with create_trainer_backend(
        bench.path, learning_rate=1e-2, python_executable=other_python, cpus_per_worker=0.25
    ) as trainer:
        for _ in range(3):
            told = trainer.update(bench.batch(), telling_version())
        assert [told["v0"], told["v1"], told["v2"]] == [float(part) for part in OTHER.split(".")]
        engine = bench.engine()
        before = engine.score([(3, 4, 5)])
        engine.update_weights(trainer.export_weights())
        assert engine.score([(3, 4, 5)]) != before
        batch = bench.batch()
        log_probs = trainer.compute_log_probs(batch).log_probs
    for row, mask in enumerate(batch["attention_mask"].bool()):
        count = int(mask[-log_probs.shape[1] :].sum())
        [scores] = engine.score([tuple(batch["input_ids"][row][mask].tolist())])
        assert list(scores)[-count:] == pytest.approx(log_probs[row, :count].tolist(), abs=1e-4)
