"""How weights reach vLLM's workers in other processes: the transports, and tensor-parallel workers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_adaptor.backends.causal_lm import load_causal_lm
from verl_adaptor.backends.vllm import transfer
from verl_adaptor.errors import ConfigError, EngineError, WeightUpdateError
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.bench import Bench
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer
from verl_adaptor.weights import digests

MIB = 1 << 20
LAYERS = [f"layers.{i}.{name}_proj.weight" for i in range(3) for name in ("q", "k", "v", "o", "gate", "up")]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("vllm"), model={"head_dim": 32})
    yield bench
    bench.close()


class FakeCore:
    """One worker that keeps what it is told to load, as late as it may."""

    workers_are_here = False

    def __init__(self, folder: Path) -> None:
        from verl_adaptor.backends.vllm.worker import WorkerExtension

        self.worker: Any = WorkerExtension()
        self.worker.adaptor_loader = SimpleNamespace(load=self._load)
        self.folder = folder
        self.pieces: list[dict[str, Tensor]] = []
        self.most_files = 0
        self._late: list[Callable[[], None]] = []

    def _load(self, bucket: dict[str, Tensor]) -> None:
        self.pieces.append({name: tensor.clone() for name, tensor in bucket.items()})
        self.most_files = max(self.most_files, len(list(self.folder.rglob("*.safetensors"))))

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.call_soon(method, *arguments)()

    def call_soon(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        answers: list[Any] = []
        self._late.append(lambda: answers.append(getattr(self.worker, method)(*arguments)))

        def wait() -> list[Any]:
            while not answers:
                self._late.pop(0)()
            return answers

        return wait


def bucket() -> dict[str, Tensor]:
    """6 MiB in fused groups of 1, 1/3 and 2/3 MiB."""
    return {name: torch.randn(MIB // 12, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(LAYERS)}


@pytest.mark.parametrize("wish", ["shared_memory", "disk"])
def test_pieces_take_turns_and_arrive_whole(wish: Any, tmp_path: Path) -> None:
    core, sent, segments = FakeCore(tmp_path), bucket(), set(Path("/dev/shm").iterdir())
    route = transfer.Route(core, wish, str(tmp_path))
    for _ in range(2):
        core.pieces.clear()
        route.prepare(6 * MIB)
        told: dict[str, int] = {}
        route.transport.load(sent, told.update)
        route.transport.load({"head.weight": torch.ones(MIB)}, None)  # 4 MiB: over half the room
        route.transport.finish()
        arrived = {name: tensor for piece in core.pieces for name, tensor in piece.items()}
        assert arrived.keys() == {*sent, "head.weight"} and all(arrived[name].equal(sent[name]) for name in sent)
        assert told == digests(sent)
        assert len(core.pieces) == 4
        for piece in core.pieces:
            assert ("layers.1.q_proj.weight" in piece) == ("layers.1.v_proj.weight" in piece)
    assert core.most_files == (2 if wish == "disk" else 0)
    route.end()
    assert not list(tmp_path.iterdir()) and set(Path("/dev/shm").iterdir()) <= segments


def test_files_are_the_way_where_shared_memory_is_full_and_the_log_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C24."""
    caplog.set_level(logging.INFO, logger="verl_adaptor")

    def full(size: int) -> None:
        raise WeightUpdateError("no shared memory for a bucket of 6 MiB")

    route = transfer.Route(FakeCore(tmp_path), "auto", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "SharedBucket", full)
        for _ in range(3):
            route.prepare(6 * MIB)
        with pytest.raises(WeightUpdateError, match="no shared memory"):
            transfer.Route(FakeCore(tmp_path), "shared_memory", None).prepare(6 * MIB)
    for _ in range(3):
        route.prepare(6 * MIB)
    route.end()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "files: no shared memory" in said[0] and "shared memory: its workers" in said[1]


def test_workers_elsewhere_need_a_folder_that_they_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore(tmp_path)
    monkeypatch.setattr(core.worker, "adaptor_sees", lambda path: path.startswith(str(tmp_path)), raising=False)
    for wish, cure in (("shared_memory", "set it to 'disk'"), ("disk", "weight_folder")):
        with pytest.raises(WeightUpdateError, match=cure):
            transfer.Route(core, wish, None).prepare(MIB)  # type: ignore[arg-type]
    route = transfer.Route(core, "auto", str(tmp_path))
    route.prepare(MIB)
    assert isinstance(route.transport, transfer.Disk)
    route.end()


# -- engines -----------------------------------------------------------------------------------------------------


def test_vllm_can_choose_our_shared_memory_by_itself(bench: Bench) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from verl_adaptor.backends.vllm.plugin import NAME, register
    from verl_adaptor.backends.vllm.weight_transfer import SharedMemoryTrainerInitInfo

    register()
    register()
    model = load_causal_lm(bench.path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    with bench.engine(engine_args={"weight_transfer_config": WeightTransferConfig(backend=NAME)}) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]

        class Client:
            def __getattr__(self, method: str) -> Callable[..., Any]:
                return lambda *arguments: core.call(method, *arguments)

        info = SharedMemoryTrainerInitInfo(rank=0, bucket_bytes=1 << 16)
        sender: Any = WeightTransferTrainerFactory.trainer_init(info, client=Client(), source=ModuleSource(model))
        for _ in range(2):
            sender.send_weights()
        core.go_on()
        ids = list(bench.prompts(1, seed=3, longest=30)[0])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(engine.score([ids])[0]), expected, atol=1e-4)


def test_an_engine_takes_its_weights_by_one_of_vllms_transfers(bench: Bench) -> None:
    """As nccl and ipc, which need GPUs, by the one that needs none: laws P1 and I6."""
    from verl_adaptor.backends.vllm.plugin import NAME, register
    from verl_adaptor.backends.vllm.registered import Registered, transfer_arguments
    from verl_adaptor.backends.vllm.weight_transfer import SharedMemoryTrainerInitInfo

    register()
    trainer = bench.reference_trainer(learning_rate=0.05)
    with bench.engine(engine_args=transfer_arguments(NAME), mode="async") as engine:
        vllm: Any = engine
        way = Registered(vllm._core, NAME, lambda room: SharedMemoryTrainerInitInfo(rank=0, bucket_bytes=room))
        vllm._route = transfer.Route(vllm._core, "auto", None, way)
        assert vllm._core.call("adaptor_sees", "/") == [True], "one worker, in a process of its own"
        engine_scores_as_trainer(trainer, engine, bench)
        assert engine.policy_version > 0 and way._sender is not None, "it went another way"
        fails_half_way(engine, trainer)


def test_vllms_own_transfers_are_set_up_for_gpus_only() -> None:
    from verl_adaptor.backends.vllm.registered import VLLMS_OWN, settings_for

    for wish in VLLMS_OWN:
        with pytest.raises(ConfigError, match=f"'{wish}' goes between GPUs, and device='cpu'"):
            settings_for(wish, 1, torch.device("cpu"))
    cuda = torch.device("cuda")
    assert (settings_for("nccl", 2, cuda)(MIB).world_size, settings_for("ipc", 1, cuda)(MIB).packed) == (3, True)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="use 'nccl'"):
        settings_for("ipc", 2, torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "async", "weight_transport": "disk"},
        {"mode": "sync", "tensor_parallel_size": 2},
        {"mode": "async", "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_workers_in_processes_of_their_own(bench: Bench, settings: dict[str, Any]) -> None:
    """Laws I2, I3, P1 and I9, and an update that fails half-way."""
    segments = set(Path("/dev/shm").iterdir())
    trainer = bench.reference_trainer(learning_rate=0.05)
    with bench.engine(**settings) as engine:
        agrees_with_hf(engine, bench)
        engine_scores_as_trainer(trainer, engine, bench)
        fails_half_way(engine, trainer)
        engine.close()
        engine.close()
    assert set(Path("/dev/shm").iterdir()) <= segments


def agrees_with_hf(engine: InferenceEngine, bench: Bench) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    ours, theirs = engine.generate(bench.prompts(4), params), bench.engine("hf").generate(bench.prompts(4), params)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def fails_half_way(engine: InferenceEngine, trainer: Any) -> None:
    """The trainer's buckets are closed, the engine refuses, and says what happened."""
    closed = []

    def breaking() -> Iterator[dict[str, Tensor]]:
        try:
            for sent in trainer.export_weights().buckets():
                yield {name: tensor + 1 for name, tensor in sent.items()}
        finally:
            closed.append(True)

    good = trainer.export_weights(digests=True)
    with pytest.raises(WeightUpdateError, match="other bytes"):
        engine.update_weights(dataclasses.replace(good, buckets=breaking, version=engine.policy_version + 1))
    assert closed
    with pytest.raises(EngineError, match="failed half-way"):
        engine.score([[5, 6, 7]])
