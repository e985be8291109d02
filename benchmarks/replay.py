"""Rollouts of one run, used again by another: ``rollout.function: benchmarks.replay:recorded``, then ``...:replayed``.

Two runs whose weights differ by rounding sample the same tokens until one draw falls between them; from there on they
are two samples of training. With the tokens of the first, the second shows what its trainer alone does. Greedy rollouts
(evaluation) are never recorded. ``REPLAY_FILE`` names the file between them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

from verl_adaptor.ppo.rollout import single_turn
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.samples import Prompt, SamplingParams, Trajectory


async def recorded(engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    """A single turn, kept under its seed, which no other sample of the run has."""
    trajectory = await single_turn(engine, prompt, params)
    if params.temperature:
        with Path(os.environ["REPLAY_FILE"]).open("a") as file:
            file.write(json.dumps({"seed": params.seed, **asdict(trajectory)}) + "\n")
    return trajectory


async def replayed(engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    """What `recorded` kept of this sample. Raises KeyError if there is none, ValueError if it answered another prompt."""
    if not params.temperature:
        return await single_turn(engine, prompt, params)
    trajectory = _recording()[params.seed]
    if trajectory.prompt_ids != tuple(prompt.token_ids or ()):
        raise ValueError(f"the recording with seed {params.seed} answers another prompt; record with the same recipe.")
    return trajectory


@cache
def _recording() -> dict[int | None, Trajectory]:
    rows = [json.loads(line) for line in Path(os.environ["REPLAY_FILE"]).read_text().splitlines()]
    lists = {"prompt_ids", "response_ids", "response_mask", "rollout_log_probs"}
    return {
        row.pop("seed"): Trajectory(
            **{key: tuple(value) if key in lists else value for key, value in row.items() if key != "version_runs"},
            version_runs=tuple((version, count) for version, count in row["version_runs"]),
        )
        for row in rows
    }
