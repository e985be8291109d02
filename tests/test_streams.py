"""Sources without an end: a file that grows, a service, a generator. Exact positions, no reading ahead, and bounded waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_adaptor.cli.recipes import differences
from verl_adaptor.cli.run import prepared
from verl_adaptor.cli.signals import StopSignals
from verl_adaptor.config import DataConfig, Recipe
from verl_adaptor.data import PromptEncoder, PromptSource, open_prompts
from verl_adaptor.data.served import ServedRecords
from verl_adaptor.data.streams import FollowedFile
from verl_adaptor.errors import BackendNotInstalled, ConfigError, DataError
from verl_adaptor.ppo.loop import train
from verl_adaptor.ppo.pipeline import Pipeline
from verl_adaptor.ppo.reading import PromptReader
from verl_adaptor.samples import Trajectory
from verl_adaptor.testing.bench import WORKERS
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking import is_timing

pytestmark = [
    pytest.mark.filterwarnings("error::ResourceWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]
DAY_S = 86400.0


def line(number: int) -> bytes:
    return json.dumps({"prompt": f"é {number}", "answer": number}).encode() + b"\n"


def numbers(rows: Any, count: int) -> list[int]:
    return [record["answer"] for _, record in itertools.islice(rows, count)]


def held(folder: Path) -> Path:
    path = folder / "held.jsonl"
    path.write_text('{"prompt": [999]}\n')
    return path


# -- a file that grows -------------------------------------------------------------------------------------------


class Writer:
    """Stands in for another process: each pause of the reader is one write."""

    def __init__(self, path: Path, pieces: Sequence[bytes]) -> None:
        self.path, self.pieces = path, list(pieces)
        path.write_bytes(b"")

    def __call__(self, seconds: float) -> None:
        with self.path.open("ab") as file:
            file.write(self.pieces.pop(0))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data(), count=st.integers(1, 12))
def test_any_writes_of_the_same_lines_are_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int
) -> None:
    """And whoever goes on after k of them meets number k."""
    path = tmp_path_factory.mktemp("grows") / "d.jsonl"
    whole = b"\n".join(line(number) for number in range(count))  # blank lines do not count
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20), label="cuts"))
    pieces = [whole[a:b] for a, b in itertools.pairwise([0, *cuts, len(whole)])]
    assert numbers(FollowedFile(path, DAY_S, Writer(path, pieces)).read(0), count) == list(range(count))
    k = data.draw(st.integers(0, count - 1), label="k")
    assert numbers(FollowedFile(path, DAY_S).read(0, k), count - k) == list(range(k, count))


def test_a_half_line_may_be_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(line(0) + b'{"prompt": "ha')
    mended = FollowedFile(path, DAY_S, lambda seconds: path.write_bytes(line(0) + line(1)))
    assert numbers(mended.read(0), 2) == [0, 1]


def replace(path: Path) -> None:
    (path.parent / "new").write_bytes(line(0) * 9)
    (path.parent / "new").replace(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: path.write_bytes(line(7)), r"has \d+ bytes, and \d+ were read of it: it was truncated or"),
        (lambda path: path.write_bytes(line(123456) * 9), "was rewritten"),
        (replace, "is another file now"),
        (lambda path: path.unlink(), "cannot be opened: .*No such file"),
    ],
)
def test_a_file_that_does_not_only_grow_is_named(tmp_path: Path, change: Callable[[Path], None], told: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(line(0) + line(1))
    rows = FollowedFile(path, DAY_S, lambda seconds: change(path)).read(0)
    assert numbers(rows, 2) == [0, 1]
    with pytest.raises(DataError, match=f"d.jsonl.*{told}"):
        next(rows)


def test_what_was_read_must_be_there_at_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(line(0) + line(1))
    with pytest.raises(DataError, match=r"d\.jsonl holds 2 records, and 3 were read of it.*start a new run"):
        next(FollowedFile(path, DAY_S).read(0, 3))


def test_prompts_come_as_lines_do_and_the_position_is_a_number(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"".join(b'{"prompt": [%d]}\n' % n for n in (1, 999, 2, 3)))
    config = DataConfig(path=path, follow=True, eval_path=held(tmp_path), follow_timeout_s=0.01)
    source, held_out = open_prompts(config, None, seed=0, held_out=4)
    assert [p.token_ids for p in held_out] == [(999,)]
    assert [next(source).token_ids for _ in range(2)] == [(1,), (2,)]
    resumed, _ = open_prompts(config, None, seed=0, held_out=4)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert source.state_dict()["index"] == 3
    for each in (source, resumed):
        assert next(each).group_id == "0:3"
        with pytest.raises(DataError, match=r"d\.jsonl had no new record for 0\.01 s \(data\.follow_timeout_s\)"):
            next(each)  # and not the first one again
    with path.open("ab") as file:
        file.write(b'{"prompt": [4]}\n')
    assert next(source).token_ids == (4,)


def test_a_reader_that_waits_is_let_go(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b"")
    config = DataConfig(path=tmp_path / "d.jsonl", follow=True, eval_path=held(tmp_path))
    source, _ = open_prompts(config, None, seed=0, held_out=1)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            next(source)
        except DataError as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    source.close()
    thread.join(20)
    assert not thread.is_alive() and "was closed while it was read" in str(raised)


def test_a_file_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    config = DataConfig(path=tmp_path / "hold.jsonl", follow=True, eval_path=held(tmp_path))
    with pytest.raises(DataError, match=r"hold\.jsonl does not exist; did you mean 'held\.jsonl'"):
        open_prompts(config, None, seed=0, held_out=1)


# -- a service ---------------------------------------------------------------------------------------------------

Page = tuple[int, str]
"""Status and body of an answer."""


class Server(ThreadingHTTPServer):
    """Has records 0, 1, 2, ...; `answer` is given start, limit and the number of the request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/records?set=train"
        self.starts: list[int] = []
        self.answer: Callable[[int, int, int], Page] = lambda start, limit, request: page(start, limit)


def page(start: int, count: int) -> Page:
    return 200, json.dumps({"records": [{"prompt": f"question {n}", "answer": n} for n in range(start, start + count)]})


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = {key: value for key, [value] in parse_qs(urlsplit(self.path).query).items()}
        assert asked.pop("set") == "train" and asked.keys() == {"start", "limit"}
        start = int(asked["start"])
        self.server.starts.append(start)
        status, body = self.server.answer(start, int(asked["limit"]), len(self.server.starts))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(20)


def served(url: str, **more: Any) -> tuple[ServedRecords, list[float]]:
    """A client that pauses for no time, and its pauses."""
    pauses: list[float] = []
    config = DataConfig(url=url, eval_path=Path("held.jsonl"), **more)
    return ServedRecords(config, pauses.append, random.Random(0)), pauses


def test_records_are_asked_for_when_they_are_needed_and_go_on_exactly(server: Server) -> None:
    records, pauses = served(server.url, limit=3)
    rows = records.read(0)
    assert server.starts == []
    assert numbers(rows, 4) == [0, 1, 2, 3]
    assert server.starts == [0, 3] and pauses == []
    rows.close()
    again = records.read(0, 4)
    assert numbers(again, 3) == [4, 5, 6] and server.starts == [0, 3, 4]
    again.close()


def test_a_service_that_has_none_yet_or_is_in_trouble_is_asked_again(server: Server) -> None:
    troubles = [(200, '{"records": []}'), (503, "busy"), (200, "<html>"), (200, '{"records": 3}'), (502, "")]
    server.answer = lambda start, limit, request: troubles[request - 1] if request <= 5 else page(start, 1)
    records, pauses = served(server.url, retries=4)
    rows = records.read(0)
    assert numbers(rows, 2) == [0, 1]
    assert server.starts == [0] * 6 + [1] and len(pauses) == 5
    rows.close()


@pytest.mark.parametrize(
    ("answer", "told", "requests"),
    [
        ((503, "busy"), r"no records from number 7 on: attempts 1 to 3: 503 .*'busy'\. See that it runs", 3),
        ((200, '{"rewards": []}'), r"attempts 1 to 3: .* instead of \{\"records\": \[\.\.\.\]\}", 3),
        ((404, "lost"), r"attempt 1: 404 Not Found 'lost'\. Such an answer is not asked for again", 1),
        (page(0, 5), r"gave 5 records from number 7 on, and was asked for limit=4 at most", 1),
        ((200, '{"records": [3]}'), "record 7: a record must be an object", 1),
    ],
)
def test_a_service_that_fails_is_named(server: Server, answer: Page, told: str, requests: int) -> None:
    server.answer = lambda start, limit, request: answer
    records, _ = served(server.url, retries=2, limit=4)
    with pytest.raises(DataError, match=f"{server.url.replace('?', '.')}.*{told}"):
        next(records.read(0, 7))
    assert len(server.starts) == requests


def test_a_service_that_is_silent_or_closed_is_not_waited_for_for_ever(server: Server) -> None:
    server.answer = lambda start, limit, request: (200, '{"records": []}')
    records, pauses = served(server.url, follow_timeout_s=0.05)
    with pytest.raises(DataError, match=r"had no new record for 0\.05 s"):
        next(records.read(0))
    assert len(pauses) >= 1
    records.close()
    with pytest.raises(DataError, match="was closed"):
        next(records.read(0))


def test_without_httpx_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for module in ("data.served", "service"):
        monkeypatch.delitem(sys.modules, f"verl_adaptor.{module}")
    with pytest.raises(
        BackendNotInstalled, match=r"data\.url need httpx.*pip install 'verl-adaptor\[reward-service\]'"
    ):
        open_prompts(DataConfig(url="http://h", eval_path=held(tmp_path)), None, seed=0, held_out=1)


# -- a generator -------------------------------------------------------------------------------------------------

made: list[int] = []


def endless(first: int = 0) -> Iterator[dict[str, Any]]:
    for number in itertools.count(first):
        made.append(number)
        yield {"prompt": [number], "answer": number}


@pytest.mark.parametrize("buffer", [0, 8])
def test_an_endless_generator_is_pulled_as_it_is_used(tmp_path: Path, buffer: int) -> None:
    config = DataConfig(generator=f"{__name__}:endless", eval_path=held(tmp_path), shuffle_buffer=buffer)
    made.clear()
    source, _ = open_prompts(config, None, seed=0, held_out=1)
    assert made == []
    drawn = [next(source).info["answer"] for _ in range(21)]
    assert len(made) == (21 if buffer == 0 else 24)
    resumed, _ = open_prompts(config, None, seed=0, held_out=1)
    resumed.load_state_dict(source.state_dict())
    rest = [next(source).info["answer"] for _ in range(11)]
    assert [next(resumed).info["answer"] for _ in range(11)] == rest
    assert sorted(drawn + rest) == list(range(32))


# -- settings ----------------------------------------------------------------------------------------------------

FOLLOW = {"path": "d.jsonl", "follow": True, "eval_path": "e.jsonl"}
URL = {"url": "http://h/records", "eval_path": "e.jsonl"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**FOLLOW, "shuffle_buffer": 8}, "shuffle_buffer=8: the first prompt would wait"),
        ({**URL, "shuffle_buffer": 1}, "shuffle_buffer=1: the first prompt would wait"),
        ({**FOLLOW, "eval_path": None}, "eval_path: null is not allowed for a source that streams"),
        ({**URL, "eval_path": None}, "eval_path: null is not allowed"),
        ({**FOLLOW, "path": "d.parquet"}, r"follow=true is for a \.jsonl file in data\.path, which is 'd\.parquet'"),
        ({"task": "digits", "follow": True}, r"follow=true is for a \.jsonl file in data\.path, which is not set"),
        ({**URL, "path": "d.jsonl"}, "exactly one of path, task, generator and url; given: path, url"),
        ({**URL, "args": {"a": 1}}, "args=.* with url nobody reads them"),
        ({**URL, "url": "h:80"}, "url: 'h:80' is no address of a service"),
        ({**URL, "url": "http://me:secret@h"}, "url: it holds a user or password"),
        ({**URL, "limit": 0}, "limit=0 is not allowed"),
        ({**FOLLOW, "limit": 4, "retries": 1}, r"limit=4 is for data\.url, which is not set; delete it\.\nretries=1 is for"),
        ({"task": "digits", "follow_timeout_s": 3}, r"follow_timeout_s=3\.0 is for data\.follow or data\.url"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        DataConfig(**given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("given", [FOLLOW, URL])
def test_a_stream_keeps_its_order_and_its_config_comes_back_as_it_was(given: dict[str, Any]) -> None:
    config = DataConfig(**given)
    assert config.streams and config.shuffle_buffer == config.replace(max_prompt_tokens=7).shuffle_buffer == 0
    assert DataConfig(**config.model_dump()) == config
    assert DataConfig(path="d.jsonl").shuffle_buffer == 1024


def test_a_resumed_run_may_find_its_records_elsewhere() -> None:
    then = {"data": {"url": "http://a", "limit": 2, "follow_timeout_s": 1.0}}
    assert differences(then, {"data": {"url": "http://b", "limit": 3, "follow_timeout_s": 2.0}}) == []
    assert differences(then, {"data": {"url": None}})[0] == "data.url: 'http://a' then, None now"


# -- beside an event loop ----------------------------------------------------------------------------------------


class Gated:
    """Records that come when they are released."""

    def __init__(self) -> None:
        self.released = threading.Semaphore(0)
        self.asked = 0

    def read(self, epoch: int, start: int = 0) -> Any:
        for number in itertools.count(start):
            self.asked += 1
            assert self.released.acquire(timeout=20)
            if number == 3:
                raise DataError("no fourth")
            yield f"record {number}", {"prompt": [number]}


def test_a_prompt_that_has_come_is_not_kept_back_by_the_next() -> None:
    async def go() -> None:
        records = Gated()
        encode = PromptEncoder(DataConfig(task="t"), None)
        reader = PromptReader(PromptSource(records, encode, seed=0, shuffle_buffer=0))
        records.released.release()
        found, position = await reader.take(4)
        assert [p.token_ids for p in found] == [(0,)] and position["index"] == 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.take(4), 0.02)  # and whoever stops waiting loses nothing
        assert records.asked == 2
        records.released.release(3)
        taken = []
        with pytest.raises(DataError, match="no fourth"):
            while True:
                found, position = await reader.take(1)
                taken += [p.token_ids for p in found]
                assert position["index"] == len(taken) + 1
        assert taken == [(1,), (2,)]

    asyncio.run(go())


# -- a run -------------------------------------------------------------------------------------------------------

BATCH, STEPS, ETA, FIRST = 4, 5, 1, 10
WRITER = """
import json, sys, time
path, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(first, last):
    line = json.dumps({"prompt": f"question {number}", "answer": number}) + "\\n"
    with open(path, "a") as file:
        for half in (line[:9], line[9:]):
            file.write(half)
            file.flush()
            time.sleep(0.002)
"""


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    return [sum(t.response_ids) % 7 / 7 for t in trajectories]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    make_tiny_model("llama", folder / "model")
    (folder / "held.jsonl").write_text("".join(json.dumps({"prompt": f"held {n}"}) + "\n" for n in range(2)))
    return folder


def recipe(folder: Path, data: dict[str, Any], **sections: Any) -> Recipe:
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {"path": str(folder / "model")},
        "data": {"eval_path": folder / "held.jsonl", "chat_template": False, **data},
        "rollout": {"max_tokens": 6, "n": 2},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"function": f"{__name__}:score"},
        "ppo": {"total_steps": STEPS, "train_batch_size": BATCH, "advantage": "grpo"},
        "evaluation": {"prompts": 2},
        "checkpoint": {"every": 1},
        "tracking": {"sinks": [], "report": False},
    }
    return Recipe(**{**tree, **sections})


def rows(output: Path) -> list[dict[str, Any]]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [{k: v for k, v in json.loads(text).items() if not is_timing(k)} for text in lines]


def reads_prompts() -> bool:
    return any(thread.name == "prompts" for thread in threading.enumerate())


class Part:
    """A part of a run: until it is done, or interrupted in the silence after the first records."""

    def __init__(self, wanted: Recipe, output: Path, begin: Callable[[Part], None], *, resume: bool) -> None:
        self.rolled: set[int] = set()
        """Numbers of the records that were rolled out."""
        self.interrupted = False
        with prepared(wanted, output, resume=resume, workers=WORKERS) as (run, _), StopSignals() as stop:
            inner = run.rollout

            async def rollout(engine: Any, prompt: Any, params: Any) -> Any:
                if not prompt.group_id.startswith("held-out"):
                    self.rolled.add(prompt.info["answer"])
                return await inner(engine, prompt, params)

            def stop_requested() -> bool:
                silent = self.pipeline.ledger.admitted == FIRST and reads_prompts()
                if silent and not resume and len(rows(output)) >= 2 and not stop():
                    os.kill(os.getpid(), signal.SIGINT)
                return stop()

            run.rollout, run.stop_requested = rollout, stop_requested
            assert wanted.pipeline is not None
            self.pipeline = Pipeline(run, wanted.pipeline)
            begin(self)
            try:
                asyncio.run(self.pipeline.train())
            except KeyboardInterrupt:
                self.interrupted = True
            self.pipeline.ledger.check()
        deadline = time.monotonic() + 20
        while reads_prompts() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not reads_prompts(), "somebody still waits for prompts"

    def room(self) -> int:
        """How many records may have been read by now, at most."""
        ledger = self.pipeline.ledger
        return ledger.trained + ledger.dropped.total() + (ETA + 1) * BATCH


def in_two_parts(wanted: Recipe, output: Path, begin: Callable[[Part], None], go_on: Callable[[Part], None]) -> None:
    """A run that is interrupted while its source is silent, and resumed: each record in its place, none twice."""
    first = Part(wanted, output, begin, resume=False)
    assert first.interrupted and first.rolled == set(range(FIRST))
    assert first.pipeline.state_dict()["prompts"]["index"] == FIRST
    second = Part(wanted, output, go_on, resume=True)
    ledger = second.pipeline.ledger
    assert not second.interrupted and ledger.trained == STEPS * BATCH
    assert first.rolled | second.rolled == set(range(ledger.admitted))
    assert len(rows(output)) >= STEPS


def test_a_run_follows_a_file_that_another_process_writes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no further than it may roll out, however much is there."""
    path, read_from, parts = tmp_path / "grows.jsonl", [], []
    path.touch()
    inner = FollowedFile.read

    def read(self: FollowedFile, epoch: int, start: int = 0) -> Iterator[Any]:
        read_from.append(start)
        for number, row in enumerate(inner(self, epoch, start), start):
            assert number < parts[-1].room(), "read ahead"
            yield row

    monkeypatch.setattr(FollowedFile, "read", read)
    wanted = recipe(folder, {"path": str(path), "follow": True}, pipeline={"max_staleness": ETA, "reward_samples": 2})
    with contextlib.ExitStack() as writers:

        def write(part: Part, first: int, last: int) -> None:
            parts.append(part)
            command = [sys.executable, "-c", WRITER, str(path), str(first), str(last)]
            writer = writers.enter_context(subprocess.Popen(command))
            writers.callback(writer.kill)

        in_two_parts(wanted, tmp_path / "run", lambda part: write(part, 0, FIRST), lambda part: write(part, FIRST, 500))
    assert read_from == [0, FIRST]


def test_a_run_asks_a_service_for_no_more_than_it_needs(folder: Path, tmp_path: Path, server: Server) -> None:
    limit, available, parts, handed_out, too_early = 3, [FIRST], [], [], []

    def answer(start: int, limit: int, request: int) -> Page:
        if start >= parts[-1].room():
            too_early.append(start)
        if request % 5 == 0:
            return 503, "busy"
        count = 0 if request % 3 == 0 else min(limit, available[0] - start)
        handed_out.extend(range(start, start + count))
        return page(start, count)

    def begin(part: Part) -> None:
        parts.append(part)

    def go_on(part: Part) -> None:
        begin(part)
        available[0] = 10_000
        assert server.starts[-1] == FIRST
        server.starts.clear()

    server.answer = answer
    data = {"url": server.url, "limit": limit, "backoff_s": 0.01}
    wanted = recipe(folder, data, pipeline={"max_staleness": ETA, "reward_samples": 2})
    in_two_parts(wanted, tmp_path / "run", begin, go_on)
    assert too_early == [] and server.starts[0] == FIRST
    assert handed_out == list(range(len(handed_out))) and len(handed_out) < parts[-1].room() + limit


def test_a_synchronous_run_is_the_one_with_the_file_as_it_is(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {n}", "answer": n}) + "\n" for n in range(8)))
    for name, more in {"stream": {"follow": True}, "file": {"shuffle_buffer": 0}}.items():
        short = {"total_steps": 2, "train_batch_size": BATCH, "advantage": "grpo"}
        wanted = recipe(folder, {"path": str(path), **more}, ppo=short)
        with prepared(wanted, tmp_path / name, resume=False, workers=WORKERS) as (run, _):
            asyncio.run(train(run))
    assert rows(tmp_path / "stream") == rows(tmp_path / "file") != []
    kept = tmp_path / "file" / "config.yaml"  # as a run wrote it from before there were streams
    kept.write_text("".join(text for text in kept.read_text().splitlines(True) if "  follow" not in text))
    with prepared(wanted, tmp_path / "file", resume=True, workers=WORKERS):
        pass
