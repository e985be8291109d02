"""An engine over HTTP: `serving`, `verl-adaptor serve`, and new weights from a folder."""

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
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_adaptor.backends.folder import folder_update
from verl_adaptor.cli import main
from verl_adaptor.errors import (
    ConfigError,
    EngineError,
    InvalidRequest,
    ModelError,
    UnsupportedCapability,
    WeightUpdateError,
)
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.bench import Bench

ROOT = Path(__file__).parent.parent
PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(get_spec("vllm"), model={"head_dim": 32}, engine_settings={"mode": "async"})
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def engine(bench: Bench) -> InferenceEngine:
    return bench.engine()


@pytest.fixture(scope="module")
def other(bench: Bench) -> str:
    """The same architecture with other weights."""
    return bench.variant("other", seed=5)


def ask(url: str, body: Any = None) -> tuple[int, Any, Any]:
    """Status, headers, JSON; POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read() or b"{}")


def complete(url: str, **more: Any) -> dict[str, Any]:
    """The first choice of a completion."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **more}
    status, _, answer = ask(f"{url}/v1/completions", body)
    assert status == 200, answer
    return dict(answer["choices"][0])


def until(true: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def session(leader: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its, *_ = file.read_text().rpartition(")")[2].split()
            if int(its) == leader and state != "Z":
                found.append(int(file.parent.name))
    return found


# -- without an engine -------------------------------------------------------------------------------------------


def test_a_folder_is_an_update_and_a_wrong_one_is_refused_unwritten(bench: Bench, other: str, tmp_path: Path) -> None:
    with bench.engine("hf") as here, bench.engine("hf") as there:
        there.update_weights(folder_update(other, 3))
        assert there.policy_version == 3
        assert here.score([PROMPT]) != there.score([PROMPT])
        with pytest.raises(WeightUpdateError, match="misshapen"):
            there.update_weights(folder_update(bench.variant("narrow", head_dim=16), 4))
        cut, bare = tmp_path / "cut", tmp_path / "bare"
        shutil.copytree(other, cut)
        weights = cut / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        shutil.copytree(other, bare, ignore=shutil.ignore_patterns("*.safetensors"))
        for folder in (cut, bare, tmp_path / "nowhere"):
            with pytest.raises(ModelError, match=folder.name):
                folder_update(str(folder), 4)
        assert there.policy_version == 3 and there.generate([PROMPT], GREEDY)


def test_a_backend_without_a_server_says_which_has_one(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with bench.engine("hf") as engine, pytest.raises(UnsupportedCapability, match="serve is unsupported"):
        engine.serving()
    with pytest.raises(SystemExit) as ended:
        main(["serve", bench.path, "backend=hf"])
    assert ended.value.code == 2 and "backends that have it: vllm" in capsys.readouterr().err


def test_the_gate_holds_requests_while_the_engine_changes() -> None:
    from verl_adaptor.backends.vllm.client import Client, VLLMParams

    finish = asyncio.Event()

    class Stub:
        model_config = SimpleNamespace(max_model_len=65)

        async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[str, None]:
            yield "first"
            await finish.wait()
            yield "last"

    async def scenario() -> None:
        model = SimpleNamespace(eos_token_ids=(2,), max_model_len=64)
        engine = SimpleNamespace(model=model, policy_version=0, tokenizer="some")
        core: Any = SimpleNamespace(llm=Stub(), loop=asyncio.get_running_loop(), adapters=None)
        client = Client([core], engine, lambda: False, lambda: None)  # type: ignore[arg-type]
        assert client.model_config.max_model_len == 64

        async def request(name: str) -> list[Any]:
            return [output async for output in client.generate({}, VLLMParams(), name)]

        before = asyncio.ensure_future(request("before"))
        await asyncio.sleep(0.01)
        settled = asyncio.ensure_future(client.settle("wait"))
        await asyncio.sleep(0.01)
        during = asyncio.ensure_future(request("during"))
        await asyncio.sleep(0.01)
        assert not settled.done() and not before.done()
        finish.set()
        await asyncio.wait_for(settled, 5)
        assert before.done() and not during.done(), "nothing runs between settling and opening"
        client.open()
        assert await asyncio.wait_for(during, 5) == ["first", "last"]
        finish.clear()  # two that chose the same name, one of them never read on
        stalled, same = client.generate({}, VLLMParams(), "twice"), asyncio.ensure_future(request("twice"))
        assert await anext(stalled) == "first"
        settled = asyncio.ensure_future(client.settle("wait"))
        await asyncio.sleep(0.01)
        assert not settled.done()
        finish.set()
        await asyncio.wait_for(settled, 5)
        assert await asyncio.wait_for(same, 5) == ["first", "last"]
        await stalled.aclose()
        client.open()
        for refused in ({"prompt_logprobs": 1}, {"logprob_token_ids": [5]}):
            with pytest.raises(InvalidRequest, match=next(iter(refused))):
                await anext(client.generate({}, VLLMParams(**refused), "refused"))

    asyncio.run(scenario())


# -- with one ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_http_gives_what_the_engine_gives_before_and_after_an_update(
    bench: Bench, engine: InferenceEngine, other: str
) -> None:
    mine = engine.generate([PROMPT], GREEDY)[0]
    sampled = engine.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, seed=3))[0]
    with pytest.raises(ConfigError, match="listened at"), engine.serving("203.0.113.1"):
        pass
    with engine.serving() as served:
        url = served.url
        with pytest.raises(EngineError, match="already"), engine.serving():
            pass
        over_http = complete(url, logprobs=1)
        assert over_http["token_ids"] == list(mine.token_ids) and over_http["text"] == mine.text
        assert over_http["logprobs"]["token_logprobs"] == pytest.approx(mine.log_probs, abs=1e-5)
        seeded = complete(url, temperature=0.7, top_p=0.9, seed=3, logprobs=0)
        assert seeded["token_ids"] == list(sampled.token_ids)
        assert seeded["logprobs"]["token_logprobs"] == pytest.approx(sampled.log_probs, abs=1e-5)
        body = {"prompt": PROMPT, "max_tokens": 12, "n": 4, "return_token_ids": True}
        drawn = ask(f"{url}/v1/completions", body)[2]["choices"]
        assert len({tuple(choice["token_ids"]) for choice in drawn}) == 4, "n samples are independent"
        assert ask(f"{url}/v1/completions", {**body, "prompt_logprobs": 1})[0] == 400
        status, _, answer = ask(f"{url}/v1/completions", {**body, "use_beam_search": True})
        assert status == 400 and "beam search is not served" in answer["error"]["message"]
        assert ask(f"{url}/policy_version")[2] == {"policy_version": 0}

        with ThreadPoolExecutor(2) as threads:
            body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
            for in_flight in ("keep", "wait"):
                running = threads.submit(ask, f"{url}/v1/completions", body)
                time.sleep(0.1)
                assert not running.done(), "it runs across the update"
                version = engine.policy_version
                new = bench.path if version else other
                update = {"path": new, "version": version + 4, "in_flight": in_flight}
                assert ask(f"{url}/update_weights", update)[2] == {"policy_version": version + 4}
                status, headers, answer = running.result(60)
                assert status == 200 and answer["usage"]["completion_tokens"] == 400
                assert headers["x-policy-version"] == str(version), "no token is older"
                with bench.engine("hf") as theirs:
                    theirs.update_weights(folder_update(new, 1))
                    expected = theirs.generate([PROMPT], GREEDY)[0].token_ids
                assert complete(url)["token_ids"] == list(expected)
        assert complete(url)["token_ids"] == list(mine.token_ids), "back at the first weights"

        for wrong, told in [
            ({"path": other, "version": 1}, "older than version 8"),
            ({"path": bench.variant("narrow", head_dim=16)}, "misshapen"),
            ({"path": "/nowhere"}, "no such folder"),
            ({"folder": other}, "no weight update"),
            ({"path": other, "in_flight": "drop"}, "use wait, abort, keep"),
        ]:
            status, _, answer = ask(f"{url}/update_weights", wrong)
            assert status == 400 and told in answer["error"]["message"]
        assert engine.policy_version == 8 and complete(url)["token_ids"] == list(mine.token_ids)
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(ask, f"{url}/update_weights", {"path": bench.path}) for _ in range(2)]
            assert sorted(answer.result(60)[2]["policy_version"] for answer in asked) == [9, 10]

        engine.pause()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(complete, url)
            time.sleep(0.2)
            assert not waiting.done()
            engine.resume()
            assert waiting.result(20)["token_ids"] == list(mine.token_ids)
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith("vllm-update")])
    assert engine.generate([PROMPT], GREEDY)[0].token_ids == mine.token_ids


@pytest.mark.slow
def test_after_a_torn_update_http_refuses_and_nothing_hangs(bench: Bench, engine: InferenceEngine, other: str) -> None:
    """Last on this engine: it serves no more afterwards."""
    good = folder_update(other, engine.policy_version + 1)

    def torn() -> Iterator[dict[str, torch.Tensor]]:
        bucket = next(good.buckets())
        yield {name: tensor for name, tensor in bucket.items() if "k_proj" not in name}

    with engine.serving() as served, ThreadPoolExecutor(1) as threads:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        running = threads.submit(ask, f"{served.url}/v1/completions", body)
        time.sleep(0.2)
        with pytest.raises(WeightUpdateError):
            engine.update_weights(dataclasses.replace(good, buckets=torn), in_flight="keep")
        assert running.result(20)[0] == 500
        status, _, answer = ask(f"{served.url}/v1/completions", body)
        assert status == 500 and "half-way" in answer["error"]["message"]
        assert ask(f"{served.url}/health")[0] == 503
        with pytest.raises(EngineError, match="half-way"):
            served.check()
        start = time.monotonic()
        engine.close()
        assert time.monotonic() - start < 30
    assert until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("vllm", "ThreadPool"))])


@pytest.mark.slow
def test_the_command_serves_token_ids_without_a_tokenizer_and_ends_by_a_signal(
    bench: Bench, other: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(bench.path, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*", "chat_template*"))
    segments = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "verl_adaptor.cli", "serve", str(bare), "replicas=2", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].removesuffix("/v1")
        before = complete(url, logprobs=0)
        assert before["text"] == "" and len(before["logprobs"]["token_logprobs"]) == 8
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "text"}]}
        for route, body in [("", {"prompt": "text"}), ("", {"prompt": PROMPT, "stop": ["x"]}), ("chat/", chat)]:
            status, _, answer = ask(f"{url}/v1/{route}completions", body)
            assert status == 400 and "token ids" in answer["error"]["message"]
        assert ask(f"{url}/update_weights", {"path": other})[2] == {"policy_version": 1}
        assert complete(url)["token_ids"] != before["token_ids"]
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.count("\n") <= 1
    assert not [line for line in err.splitlines() if "Triton is installed" not in line]
    assert until(lambda: not session(process.pid)), "the engine's processes outlive the command"
    assert set(Path("/dev/shm").iterdir()) <= segments
