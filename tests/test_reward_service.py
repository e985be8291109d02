"""Rewards over HTTP: the format, how patiently a service is asked, and what is said when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptor.cli.recipes import differences
from verl_adaptor.config import RewardConfig
from verl_adaptor.config.base import LONGEST_PAUSE_S
from verl_adaptor.errors import BackendNotInstalled, ConfigError, RewardError
from verl_adaptor.ppo.reward import load_reward
from verl_adaptor.ppo.reward_http import RewardService
from verl_adaptor.samples import Trajectory
from verl_adaptor.service import backoff_cap_s, pause_s
from verl_adaptor.tasks.digits import BOS, END_OF_PROMPT, DigitsTask

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "reward_service.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

pytestmark = [  # a connection that is left to the garbage collector is an error
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]


def trajectory(text: str = "", mask: Sequence[int] = (1, 0, 1), **info: Any) -> Trajectory:
    return Trajectory(
        prompt_ids=(1, 3),
        response_ids=(2,) * len(mask),
        response_mask=tuple(mask),
        rollout_log_probs=(0.0,) * len(mask),
        finish_reason="length",
        group_id="g",
        info=info,
        text=text,
    )


def digits() -> list[Trajectory]:
    """Responses to all held-out prompts, right up to different places."""
    made = []
    for number, record in enumerate(DigitsTask().eval_records(72)):
        response = (*record["target"][: number % 10], 5)
        made.append(
            Trajectory(
                prompt_ids=(BOS, *record["shown"], END_OF_PROMPT),
                response_ids=response,
                response_mask=(1,) * len(response),
                rollout_log_probs=(0.0,) * len(response),
                finish_reason="stop",
                info=record,
            )
        )
    return made


def until(true: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


Answer = tuple[int, dict[str, str], str]
"""Status, headers and body of an answer."""


def lengths(body: dict[str, Any]) -> Answer:
    return 200, {}, json.dumps({"rewards": [len(sample["text"]) for sample in body["samples"]]})


class Server(ThreadingHTTPServer):
    """Answers as `answer` says, given the request's body; knows its requests and its open connections."""

    answer: Callable[[dict[str, Any]], Answer] = staticmethod(lengths)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # connections are kept open

    def handle(self) -> None:
        with self.server.lock:
            self.server.connections += 1
        with contextlib.suppress(ConnectionError):
            super().handle()
        with self.server.lock:
            self.server.connections -= 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        status, headers, text = self.server.answer(body)
        self.send_response_only(status)  # without a Date of its own
        for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
            assert until(lambda: server.connections == 0), "the client left a connection open"
        finally:
            server.released.set()
            server.shutdown()
            thread.join(10)


def client(url: str, **settings: Any) -> tuple[RewardService, list[float]]:
    """A client that pauses for no time, and its pauses."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    return RewardService(RewardConfig(url=url, **settings), sleep=sleep, rng=random.Random(0)), pauses


def run(reward: Any, trajectories: Sequence[Trajectory]) -> Any:
    return asyncio.run(reward.score(trajectories))


# -- the example, a process of its own ---------------------------------------------------------------------------


@contextlib.contextmanager
def example(*arguments: str) -> Iterator[str]:
    """URL of a running examples/reward_service.py."""
    command = [sys.executable, str(EXAMPLE), "--port", "0", *arguments]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            yield url
        finally:
            watchdog.cancel()
            process.terminate()
            process.wait(20)


def test_a_service_scores_as_the_task_does() -> None:
    with example("--task", "digits") as url:
        service = load_reward(RewardConfig(url=url, batch_size=10), None)
        assert isinstance(service, RewardService)
        assert run(service, digits()) == DigitsTask().score(digits())
        assert service.attempts == 8
        with pytest.raises(RewardError, match=r"trajectories 0 to 0: attempt 1: 500 .* knows the prompt"):
            run(service, [trajectory(shown=[1], target=[2])])


def test_rewards_survive_a_slow_and_unreliable_service() -> None:
    faults = ("--fail-rate", "0.3", "--garbage-rate", "0.2", "--latency-mean-s", "0.01", "--seed", "1")
    with example("--answer-key", "word", *faults) as url:
        service, pauses = client(url, batch_size=1, retries=50)
        asked = [trajectory(f" {number % 3}", word=number % 2) for number in range(40)]
        assert run(service, asked) == [float(number % 3 == number % 2) for number in range(40)]
        assert service.attempts == 40 + len(pauses) > 40


# -- the format --------------------------------------------------------------------------------------------------


def test_what_is_sent_and_what_may_come_back(server: Server) -> None:
    server.answer = lambda body: (200, {}, '{"rewards": [1, [0, 0.5], true], "model": "judge"}')
    service, _ = client(server.url)
    asked = [trajectory("a", answer=(1, 2)), trajectory("b"), trajectory("é")]
    assert run(service, asked) == [1.0, [0.0, 0.5], 1.0]
    [body] = server.bodies
    assert body["samples"][0] == {
        "prompt_ids": [1, 3],
        "response_ids": [2, 2, 2],
        "response_mask": [1, 0, 1],
        "text": "a",
        "finish_reason": "length",
        "group_id": "g",
        "info": {"answer": [1, 2]},
    }
    assert [sample["text"] for sample in body["samples"]] == ["a", "b", "é"]


@pytest.mark.parametrize(
    ("value", "message"), [(object(), r"info\['x'\] holds a object"), ([float("nan")], r"info\['x'\] holds a NaN")]
)
def test_what_json_cannot_carry_is_named(server: Server, value: Any, message: str) -> None:
    service, _ = client(server.url, batch_size=1)
    with pytest.raises(RewardError, match=f"trajectory 1 cannot be sent .*{message}"):
        run(service, [trajectory(), trajectory(x=value)])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[1.0]", "returned 1 rewards for 2 trajectories"),
        ("[1.0, NaN]", "trajectory 3: the reward is nan"),
        (f"[1{'0' * 400}, 1]", "trajectory 2: the reward is inf"),
        ("[1.0, [1, 2, 3]]", "trajectory 3: 3 token rewards for 2 sampled tokens"),
        ("[null, 1]", "trajectory 2: None is a NoneType"),
    ],
)
def test_an_answer_that_is_no_reward_is_not_asked_for_again(server: Server, rewards: str, message: str) -> None:
    server.answer = lambda body: (
        200,
        {},
        f'{{"rewards": {rewards if body["samples"][0]["text"] == "c" else "[0, 0]"}}}',
    )
    service, pauses = client(server.url, batch_size=2, concurrency=1)
    with pytest.raises(RewardError, match=f"reward service {server.url}.*{message}"):
        run(service, [trajectory(text) for text in "abcd"])
    assert (service.attempts, pauses) == (2, [])


# -- faults ------------------------------------------------------------------------------------------------------


def test_a_service_that_is_down_is_tried_a_bounded_number_of_times() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    service, pauses = client(f"http://127.0.0.1:{port}", retries=3, backoff_s=2.0)
    with pytest.raises(RewardError) as caught:
        run(service, [trajectory()])
    for part in (
        f"http://127.0.0.1:{port} ",
        "trajectories 0 to 0",
        "attempts 1 to 4: ConnectError: [Errno ",
        "--resume",
    ):
        assert part in str(caught.value)
    assert service.attempts == 4
    assert len(pauses) == 3 and all(0 <= pause <= cap for pause, cap in zip(pauses, (2, 4, 8), strict=True))


def test_a_slow_answer_is_not_waited_for(server: Server) -> None:
    server.answer = lambda body: (server.released.wait(30), lengths(body))[1]
    service, _ = client(server.url, retries=1, timeout_s=0.1)
    with pytest.raises(RewardError, match=r"attempts 1 to 2: no answer within 0\.1 s.*raise .*reward\.timeout_s=0\.1"):
        run(service, [trajectory()])
    server.released.set()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<html>It works!</html>", "'<html>It works!</html>' instead of JSON"),
        ('{"rewards": [0.5', "instead of JSON"),
        ("[0.5]", r"'\[0.5\]' instead of {\"rewards\": \[...\]}"),
        ("[" * 100_000, "instead of JSON"),
    ],
)
def test_an_answer_that_cannot_be_read_is_asked_for_again_then_named(server: Server, text: str, told: str) -> None:
    server.answer = lambda body: (200, {}, text)
    service, _ = client(server.url, retries=2)
    with pytest.raises(RewardError, match=f"attempts 1 to 3: .*{told}"):
        run(service, [trajectory()])
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("status", "headers", "shortest"),
    [
        (503, {}, 0),
        (502, {"Retry-After": "7"}, 7),
        (429, {"Retry-After": "900"}, LONGEST_PAUSE_S),
        (504, {"Retry-After": "Wed, 21 Oct 2015 07:28:09 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 9),
        (503, {"Retry-After": "soon"}, 0),
    ],
)
def test_a_busy_service_is_asked_again_when_it_says(
    server: Server, status: int, headers: dict[str, str], shortest: float
) -> None:
    server.answer = lambda body: lengths(body) if len(server.bodies) > 2 else (status, headers, "busy")
    service, pauses = client(server.url, backoff_s=1.0)
    assert run(service, [trajectory("abc")]) == [3.0]
    assert service.attempts == len(server.bodies) == 3
    assert len(pauses) == 2
    for pause, cap in zip(pauses, (1, 2), strict=True):
        assert shortest <= pause <= min(LONGEST_PAUSE_S, shortest + cap)


def test_the_error_tells_each_attempt_and_other_statuses_end_it(server: Server) -> None:
    answers: Iterator[Answer] = iter([(503, {}, "busy"), (503, {}, "busy"), (400, {}, "no samples")])
    server.answer = lambda body: next(answers)
    service, _ = client(server.url)
    with pytest.raises(
        RewardError, match=r"attempts 1 to 2: 503 .*'busy'; attempt 3: 400 Bad Request 'no samples'\. Such"
    ):
        run(service, [trajectory()])
    server.answer = lambda body: (307, {"Location": "/score/"}, "")
    with pytest.raises(RewardError, match=r"attempt 1: 307 .*a redirection to /score/: give that"):
        run(service, [trajectory()])
    assert service.attempts == len(server.bodies) == 4


# -- loops and connections ---------------------------------------------------------------------------------------


def test_requests_run_side_by_side_within_the_bound_in_any_loop(server: Server) -> None:
    together = threading.Barrier(3, timeout=20)  # nobody is answered before three are there
    inside, most = Counter[str](), []

    def answer(body: dict[str, Any]) -> Answer:
        with server.lock:
            inside["now"] += 1
            most.append(inside["now"])
        together.wait()
        with server.lock:
            inside["now"] -= 1
        return lengths(body)

    server.answer = answer
    service, _ = client(server.url, batch_size=1, concurrency=3)
    texts = [trajectory("x" * length) for length in range(6)]

    async def twice() -> Any:
        return await asyncio.gather(service.score(texts), service.score(texts))

    for _ in range(2):
        assert asyncio.run(twice()) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
        assert until(lambda: server.connections == 0), "connections outlived their calls"
    assert max(most) == 3 and service.attempts == len(server.bodies) == 24


def test_others_wait_while_a_service_in_trouble_recovers(server: Server) -> None:
    server.answer = lambda body: (503, {}, "busy") if len(server.bodies) == 1 else lengths(body)
    config = RewardConfig(url=server.url, batch_size=1, concurrency=1)
    service = RewardService(config, sleep=lambda seconds: asyncio.sleep(0.05))
    assert run(service, [trajectory("a"), trajectory("bb")]) == [1.0, 2.0]
    assert [body["samples"][0]["text"] for body in server.bodies] == ["a", "a", "bb"]


def test_a_failure_ends_the_other_requests(server: Server) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        if body["samples"][0]["text"] == "bad":
            return 400, {}, "bad"
        server.released.wait(30)
        return lengths(body)

    server.answer = answer
    service, _ = client(server.url, batch_size=1)
    with pytest.raises(RewardError, match="trajectories 1 to 1: attempt 1: 400"):
        run(service, [trajectory("slow"), trajectory("bad")])
    server.released.set()


# -- patience ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    backoff_s=st.floats(0, 1e308),
    retry_after_s=st.floats(0, LONGEST_PAUSE_S),
    attempts=st.integers(1, 101),
    seed=st.integers(0, 2**32),
)
def test_pauses_are_bounded_and_their_caps_never_shrink(
    backoff_s: float, retry_after_s: float, attempts: int, seed: int
) -> None:
    caps = [backoff_cap_s(attempt, backoff_s) for attempt in range(1, attempts + 1)]
    assert caps == sorted(caps) and caps[0] == min(backoff_s, LONGEST_PAUSE_S) and caps[-1] <= LONGEST_PAUSE_S
    for attempt, cap in enumerate(caps, 1):
        pause = pause_s(attempt, backoff_s, random.Random(seed), retry_after_s)
        assert retry_after_s <= pause <= min(LONGEST_PAUSE_S, retry_after_s + cap)
        assert pause == pause_s(attempt, backoff_s, random.Random(seed), retry_after_s)


def test_longest_counts_every_attempt_of_every_round() -> None:
    config = RewardConfig(url="http://h", batch_size=10, concurrency=2, retries=1, timeout_s=5)
    assert config.longest_s(41) == 3 * (2 * 5 + LONGEST_PAUSE_S)  # five requests, two at a time
    assert RewardConfig(timeout_s=5).longest_s(41) == 5


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url: 'localhost:8000' is no address of a service; write 'http://host:port/path'"),
        ({"url": "http://"}, "is no address"),
        ({"url": "http://h:99999"}, "is no address"),
        ({"url": "http://me:secret@h"}, "url: it holds a user or password"),
        ({"url": "http://h", "function": "a:b"}, "function and url exclude each other"),
        ({"url": "http://h", "model": "m"}, "model and url exclude each other"),
        ({"batch_size": 4, "retries": 0}, "batch_size=4 is for reward.url, which is not set; delete it.\nretries=0"),
        ({"function": "a:b", "backoff_s": 2.0}, "backoff_s=2.0 is for reward.url"),
        ({"url": "http://h", "concurrency": 0}, "concurrency=0 is not allowed"),
        ({"url": "http://h", "model_batch_size": 4}, "model_batch_size=4 is for reward.model"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RewardConfig(**settings)
    assert message in str(caught.value) and "secret" not in str(caught.value)


def test_arguments_are_for_functions() -> None:
    with pytest.raises(ConfigError, match=r"are for reward\.function"):
        load_reward(RewardConfig(url="http://h", args={"scale": 2}), None)


def test_a_resumed_run_may_find_its_service_elsewhere() -> None:
    def changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        return differences({"reward": old}, {"reward": new})

    assert changed({"url": "http://a", "retries": 5}, {"url": "http://b", "retries": 9}) == []
    assert changed({"url": None}, {"url": "http://b"}) == ["reward.url: None then, 'http://b' now"]
    assert (
        changed({"model": None}, {"model": None, "url": None, "batch_size": 16}) == []
    )  # a run from before there were services


def test_without_httpx_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for module in ("ppo.reward_http", "service"):
        monkeypatch.delitem(sys.modules, f"verl_adaptor.{module}")
    with pytest.raises(BackendNotInstalled, match=r"pip install 'verl-adaptor\[reward-service\]'"):
        load_reward(RewardConfig(url="http://h"), None)


# -- a run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_a_service_is_the_run_without(tmp_path: Path) -> None:
    small = [
        "model.build_args.warm_start_steps=20",
        "ppo.total_steps=2",
        "ppo.train_batch_size=64",
        "tracking.report=false",
    ]

    def held_out(output: Path, *overrides: str) -> tuple[float, float]:
        recipe = [str(ROOT / "recipes" / "digits.yaml"), *small, *overrides, "--output", str(output)]
        command = [sys.executable, "-m", "verl_adaptor.cli", "train", *recipe]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        summary = json.loads((output / "summary.json").read_text())
        return summary["reward_before"], summary["reward_after"]

    with example("--task", "digits", "--latency-mean-s", "0.02") as url:
        served = held_out(tmp_path / "served", f"reward.url={url}")
    assert served == held_out(tmp_path / "local")
