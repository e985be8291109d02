"""A reward service: scores what ``reward.url`` sends, with an exact match, a task's own scorer or a function of yours.

    python examples/reward_service.py --task digits --port 8100
    verl-adaptor train recipes/digits.yaml reward.url=http://127.0.0.1:8100 --output runs/digits

It needs ``pip install fastapi uvicorn``. ``--latency-mean-s`` makes it as slow as a large verifier, ``--fail-rate`` and
``--garbage-rate`` as unreliable as a busy one. It listens on this machine alone unless told otherwise, and asks nobody
who they are: give ``--host`` only within a network that you trust.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel

from verl_adaptor.errors import VerlAdaptorError
from verl_adaptor.objects import load_callable
from verl_adaptor.ppo.reward import Reward, RewardFunction
from verl_adaptor.samples import Trajectory
from verl_adaptor.tasks import load_task


class Sample(BaseModel):
    """One response, as `verl_adaptor.ppo.reward_http` sends it."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    group_id: str
    info: dict[str, Any]

    def trajectory(self) -> Trajectory:
        """As reward functions take it; log-probs are not sent."""
        return Trajectory(
            prompt_ids=tuple(self.prompt_ids),
            response_ids=tuple(self.response_ids),
            response_mask=tuple(self.response_mask),
            rollout_log_probs=(0.0,) * len(self.response_ids),
            finish_reason=self.finish_reason,
            group_id=self.group_id,
            info=self.info,
            text=self.text,
        )


class Batch(BaseModel):
    """A request."""

    samples: list[Sample]


def exact_match(trajectories: Sequence[Trajectory], key: str = "answer") -> list[float]:
    """1 where the response, stripped, is the record's answer; 0 elsewhere."""
    return [float(t.text.strip() == str(t.info[key]).strip()) for t in trajectories]


def make_app(reward: Reward, asked: argparse.Namespace, announce: str) -> FastAPI:
    """The service; prints `announce` once it answers."""
    rng = random.Random(asked.seed)
    mu = math.log(asked.latency_mean_s) - asked.latency_sigma**2 / 2 if asked.latency_mean_s else None

    @asynccontextmanager
    async def started(app: FastAPI) -> AsyncIterator[None]:
        print(announce, flush=True)
        yield

    app = FastAPI(lifespan=started)

    @app.post("/", response_model=None)
    async def score(batch: Batch) -> dict[str, Any] | Response:
        luck = rng.random()
        if mu is not None:
            await asyncio.sleep(rng.lognormvariate(mu, asked.latency_sigma))  # others are answered meanwhile
        if luck < asked.fail_rate:
            return Response("busy", status_code=503)
        if luck < asked.fail_rate + asked.garbage_rate:
            return Response("<html>It works!</html>", media_type="text/html")
        try:
            return {"rewards": await reward.score([sample.trajectory() for sample in batch.samples])}
        except VerlAdaptorError as error:
            raise HTTPException(500, str(error)) from error

    return app


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A reward service for reward.url.")
    scorer = parser.add_mutually_exclusive_group()
    scorer.add_argument("--function", help="module:function, as reward.function takes it; default: an exact match")
    scorer.add_argument("--task", help="a task with its own scorer, as data.task takes it: digits")
    parser.add_argument("--answer-key", default="answer", help="field of the record that an exact match compares with")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8100, help="port to listen at; 0 takes a free one")
    parser.add_argument("--latency-mean-s", type=float, default=0.0, help="mean of a log-normal delay of each answer")
    parser.add_argument("--latency-sigma", type=float, default=1.0, help="its sigma: the deviation of its logarithm")
    parser.add_argument("--fail-rate", type=float, default=0.0, help="share of requests answered with 503")
    parser.add_argument("--garbage-rate", type=float, default=0.0, help="share of requests answered with no JSON")
    parser.add_argument("--seed", type=int, default=0, help="of delays and faults, in the order of requests")
    asked = parser.parse_args(arguments)
    rates = (asked.fail_rate, asked.garbage_rate)
    if min(rates) < 0 or sum(rates) > 1:
        parser.error(f"--fail-rate and --garbage-rate are shares of all requests, at most 1 together; given {rates}.")
    if not (0 <= asked.latency_mean_s < math.inf and 0 <= asked.latency_sigma < math.inf):
        parser.error("--latency-mean-s (seconds) and --latency-sigma are at least 0, and finite.")
    return asked


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    asked = parse()
    sys.path.insert(0, str(Path.cwd()))  # so that module:function finds the user's own files
    try:
        if asked.task:
            reward = RewardFunction(load_task(asked.task, {}).score, name=asked.task)
        elif asked.function:
            reward = RewardFunction(load_callable(asked.function, key="--function"), name=asked.function)
        else:
            reward = RewardFunction(exact_match, {"key": asked.answer_key})
        family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET
        listening = socket.create_server((asked.host, asked.port), family=family)
    except (VerlAdaptorError, OSError, OverflowError) as error:
        sys.exit(f"reward_service: {error}")
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    app = make_app(reward, asked, f"http://{host}:{listening.getsockname()[1]}")
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
