"""The vllm engine, in this process and beside it: every law for engines, and what is vLLM's own to get wrong.

`make test` starts it in this process for every law, and once beside it for the laws that one start can check.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_adaptor import create_inference_engine
from verl_adaptor.errors import ConfigError, EngineError, InvalidRequest, ModelError, WeightUpdateError
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer

WIDE = {"head_dim": 32}
"""vLLM on a CPU knows no head of less."""
STARTS_ANOTHER = (
    "an_aborted_request",
    "an_update",
    "a_wrong_update",
    "tokens_know",
    "adapters",
    "close_is",
    "the_process_is",
)
"""Laws that take an engine of their own."""

TestHere = conformance_suite("vllm", model=WIDE)
TestBeside = conformance_suite("vllm", model=WIDE, engine_settings={"mode": "async"})
for name in [attribute for attribute in vars(TestBeside) if attribute.startswith("test_")]:
    if any(own in name for own in STARTS_ANOTHER):
        setattr(TestBeside, name, pytest.mark.slow(getattr(TestBeside, name)))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("vllm"), model=WIDE)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def engine(bench: Bench) -> InferenceEngine:
    return bench.engine()


def test_a_mixture_after_a_dense_model(engine: InferenceEngine) -> None:
    """In one process, whose groups vLLM made for the first; experts are packed together."""
    bench = Bench(get_spec("vllm"), family="mixtral", model=WIDE)
    with pytest.raises(ConfigError, match=r"lora_rank=4: .* experts on GPUs only"):
        bench.engine(lora_rank=4)
    with bench.engine() as mixture, bench.reference_trainer(learning_rate=0.05) as trainer:
        engine_scores_as_trainer(trainer, mixture, bench)
    bench.close()


# -- what does not start -----------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_said_with_its_cure(bench: Bench, tmp_path: Path) -> None:
    """And the process can start another engine afterwards."""
    whole = Path(bench.path)
    unknown, bare = tmp_path / "unknown", tmp_path / "bare"
    shutil.copytree(whole, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(
        json.dumps({**config, "model_type": "nonesuch", "architectures": ["Nonesuch"]})
    )
    shutil.copytree(whole, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (tmp_path / "nowhere", {}, ModelError, "nowhere"),
        (unknown, {}, ModelError, "model_type"),
        (bare, {}, ModelError, "no weights"),
        (bench.variant("narrow", head_dim=8), {}, ModelError, "head_dim=8"),
        (whole, {"max_model_len": 513}, ConfigError, "max_position_embeddings=512"),
        (whole, {"kv_cache_gib": 1e-5}, ConfigError, "kv_cache_gib"),
        (whole, {"engine_args": {"seed": 1}}, ConfigError, "engine_args holds seed"),
        (whole, {"engine_args": {"no_such": 1}}, ConfigError, "no_such"),
        (whole, {"tensor_parallel_size": 3}, ConfigError, "allowed: 1, 2, 4"),
        (whole, {"weight_transport": "disk"}, ConfigError, "set mode='async'"),
    ]
    for path, settings, kind, told in wrong:
        with pytest.raises(kind, match=told):
            create_inference_engine(path, backend="vllm", **settings)
    with create_inference_engine(whole, backend="vllm") as engine:
        assert engine.generate([[5, 6]], SamplingParams(max_tokens=2))[0].token_ids


@pytest.mark.parametrize("gone", ["use_beam_search", "best_of", "logits_processors"])
def test_what_engines_have_dropped_is_refused_with_what_to_do_instead(gone: str) -> None:
    """C31."""
    with pytest.raises(InvalidRequest, match=rf"{gone} is no sampling parameter: engines"):
        SamplingParams(**{gone: True})


SCRIPT = """
import sys
from verl_adaptor import create_inference_engine
from verl_adaptor.samples import SamplingParams

if __name__ == "__main__":
    ranks = int(sys.argv[4])
    engine = create_inference_engine(sys.argv[1], backend="vllm", mode=sys.argv[2], tensor_parallel_size=ranks)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
    if sys.argv[3] == "closes":
        engine.close()
    if sys.argv[3] == "waits":
        print("ready", flush=True)
        sys.stdin.read()
"""


def run_script(bench: Bench, mode: str, ending: str, ranks: int = 1) -> subprocess.Popen[str]:
    script = bench.folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), bench.path, mode, ending, str(ranks)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MARK": f"{os.getpid()}-{mode}-{ending}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def marked(mark: str) -> list[int]:
    """Processes that have inherited this variable."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MARK={mark}\0".encode() in file.read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["closes", pytest.param("forgets", marks=pytest.mark.slow)])
def test_a_script_is_told_nothing_and_ends_by_itself(bench: Bench, mode: str, ending: str) -> None:
    segments = set(Path("/dev/shm").iterdir())
    script = run_script(bench, mode, ending)
    out, err = script.communicate(timeout=200)
    said = [
        line for line in (out + err).splitlines() if "Triton is installed" not in line
    ]  # before vLLM reads any setting
    assert script.returncode == 0 and not said
    assert not marked(f"{os.getpid()}-{mode}-{ending}") and set(Path("/dev/shm").iterdir()) <= segments


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ranks"), [("async", 1), ("sync", 2), ("async", 2)])
def test_a_killed_script_takes_its_engine_along(bench: Bench, mode: str, ranks: int) -> None:
    segments = set(Path("/dev/shm").iterdir())
    script = run_script(bench, mode, "waits", ranks)
    assert script.stdout is not None and script.stdout.readline() == "ready\n"
    mark = f"{os.getpid()}-{mode}-waits"
    assert len(marked(mark)) > 1
    script.kill()
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not marked(mark), "the engine's processes outlive the script"
    assert set(Path("/dev/shm").iterdir()) <= segments
    script.communicate()


def vllm_processes() -> set[int]:
    """vLLM's own of this machine, by the names that they give themselves."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"VLLM::" in file.read_bytes():
                found.add(int(file.parent.name))
    return found


async def struck(engine: InferenceEngine, before: set[int], how: signal.Signals) -> asyncio.Future[Any]:
    """A long request, while which the engine's processes, those that were not there before, get a signal."""
    call = asyncio.ensure_future(engine.agenerate([5, 6], SamplingParams(max_tokens=400, ignore_eos=True)))
    while not engine.running:
        await asyncio.sleep(0.01)
    for pid in vllm_processes() - before:
        os.kill(pid, how)
    return call


@pytest.mark.slow
def test_an_engine_whose_process_dies_says_so(bench: Bench) -> None:
    before = vllm_processes()
    with bench.engine(mode="async") as engine:

        async def scenario() -> None:
            call = await struck(engine, before, signal.SIGKILL)
            await asyncio.wait_for(call, 60)

        with pytest.raises(EngineError):
            asyncio.run(scenario())


@pytest.mark.slow
def test_close_ends_a_process_that_stands_still(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_adaptor.protocols.engine.CLOSE_WAIT_S", 0.5)
    before = vllm_processes()
    with bench.engine(mode="async") as engine:

        async def scenario() -> None:
            call = await struck(engine, before, signal.SIGSTOP)
            await asyncio.wait_for(asyncio.to_thread(engine.close), 60)
            await asyncio.wait_for(call, 60)

        try:
            with pytest.raises(EngineError):
                asyncio.run(scenario())
        finally:
            for pid in vllm_processes() - before:  # a stopped worker cannot see that its driver has ended it
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_replicas_are_one_engine(bench: Bench) -> None:
    """The same tokens as one, new weights on both, over HTTP too; one that dies is said."""
    before = vllm_processes()
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=7, n=3)
    prompts = bench.prompts(6)
    expected = [c.token_ids for c in bench.engine("hf").generate(prompts, params)]
    with bench.engine(replicas=2) as engine, bench.reference_trainer(learning_rate=0.05) as trainer:
        cores = engine._core.cores  # type: ignore[attr-defined]
        assert len(cores) == 2 and len(vllm_processes() - before) == 4, "a core and a worker each"
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected
        trainer.update(bench.batch(), policy_gradient)
        engine.update_weights(trainer.export_weights(digests=True))
        probe = [[*bench.prompts(1, longest=12)[0], 5 + number] for number in range(8)]
        with bench.engine("hf") as theirs:
            theirs.update_weights(trainer.export_weights())
            scores, wanted = engine.score(probe), theirs.score(probe)
            for ours, right in zip(scores, wanted, strict=True):
                assert ours == pytest.approx(right, abs=1e-4)
            greedy = theirs.generate([prompts[0]], SamplingParams(max_tokens=8, temperature=0))[0].token_ids
        with engine.serving() as served, ThreadPoolExecutor(4) as threads:
            body = json.dumps({"prompt": prompts[0], "max_tokens": 8, "temperature": 0, "return_token_ids": True})

            def ask(_: int) -> Any:
                request = urllib.request.Request(
                    f"{served.url}/v1/completions", body.encode(), {"content-type": "application/json"}
                )
                return json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"][0]["token_ids"]

            assert list(threads.map(ask, range(4))) == [list(greedy)] * 4

        async def one_dies() -> None:
            long = SamplingParams(max_tokens=480, ignore_eos=True)
            calls = [asyncio.ensure_future(engine.agenerate(prompt, long)) for prompt in prompts]
            while len(engine.running) < len(prompts):
                await asyncio.sleep(0.01)
            os.kill(max(vllm_processes() - before), signal.SIGKILL)
            await asyncio.wait_for(asyncio.gather(*calls), 60)

        with pytest.raises(EngineError):
            asyncio.run(one_dies())
        with pytest.raises(EngineError, match=r"replica \d of 2 has died"):
            engine.generate(prompts, params)
    assert not vllm_processes() - before


def test_samples_of_a_prompt_share_a_replica_until_it_is_too_full() -> None:
    from verl_adaptor.backends.vllm.replicas import APART, CoreReplicas

    class Stub:
        llm = SimpleNamespace(errored=False)

        def __init__(self) -> None:
            self.names: list[str] = []

        def add(self, name: str, *_: Any) -> None:
            self.names.append(name)

        def abort(self, names: list[str]) -> None:
            self.names = [name for name in self.names if name not in names]

    one, two = stubs = [Stub(), Stub()]
    core: Any = object.__new__(CoreReplicas)
    core.cores, core._running, core._homes, core._waiting, core._loads = stubs, {}, {}, {}, [0, 0]
    for number in range(4):
        core.add(f"a/{number}", [1, 2], None)
    core.add("b/0", [3, 4], None)
    assert (len(one.names), two.names) == (4, ["b/0"])
    core.abort([*one.names, "unknown"])
    for number in range(2 * APART):
        core.add(f"c/{number}", [5, 6], None)
    assert abs(len(one.names) - len(two.names)) <= APART
    core.abort([*one.names, *two.names])
    assert not core._running and not core._homes and not core._waiting and core._loads == [0, 0]


# -- weights -----------------------------------------------------------------------------------------------------


def test_a_torn_fused_group_is_refused(bench: Bench) -> None:
    """q without k and v would corrupt the layer in silence."""
    good = bench.reference_trainer().export_weights()

    def one_by_one() -> Iterator[dict[str, torch.Tensor]]:
        for bucket in good.buckets():
            for name, tensor in bucket.items():
                yield {name: tensor}

    with bench.engine() as engine:
        with pytest.raises(WeightUpdateError, match="one bucket"):
            engine.update_weights(dataclasses.replace(good, buckets=one_by_one, version=1))
        with pytest.raises(EngineError, match="failed half-way"):
            engine.score([[5, 6, 7]])


def test_bytes_that_change_on_their_way_are_noticed(bench: Bench) -> None:
    good = bench.reference_trainer().export_weights(digests=True)

    def noisy() -> Iterator[dict[str, torch.Tensor]]:
        for bucket in good.buckets():
            yield {name: tensor + (1e-6 if name.endswith("o_proj.weight") else 0) for name, tensor in bucket.items()}

    for backend in ("vllm", "hf"):
        with bench.engine(backend) as engine:
            engine.update_weights(dataclasses.replace(good, version=1))
            with pytest.raises(WeightUpdateError, match=r"other bytes than were sent: .*o_proj"):
                engine.update_weights(dataclasses.replace(good, buckets=noisy, version=2))


def test_the_same_seed_gives_the_same_tokens_as_hf(engine: InferenceEngine, bench: Bench) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7, n=3, top_p=0.95)
    ours, theirs = engine.generate(bench.prompts(4), params), bench.engine("hf").generate(bench.prompts(4), params)
    same = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= 11, "a sum that rounds otherwise may tip one draw of 144, not more"


def test_a_preempted_request_goes_on_where_it_was(bench: Bench) -> None:
    """A cache too small for all requests: vLLM throws some out and reads them again; their samples are the same."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=3)
    prompts = bench.prompts(6, seed=5)
    with bench.engine(kv_cache_gib=3 * 512 * 512 / 2**30) as tight:
        squeezed = tight.generate(prompts, params)
    free = bench.engine().generate(prompts, params)
    assert [c.token_ids for c in squeezed] == [c.token_ids for c in free]


def test_a_trainer_in_this_process_outlives_the_engine(bench: Bench) -> None:
    """vLLM would end torch.distributed with its engine."""
    with bench.engine() as engine, bench.reference_trainer(learning_rate=0.05) as trainer:
        trainer.update(bench.batch(), policy_gradient)
        engine.update_weights(trainer.export_weights())
    assert torch.distributed.is_initialized()
    torch.distributed.barrier()
