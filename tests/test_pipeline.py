"""The asynchronous pipeline on real engines and trainers: laws Q1 to Q4, and the synchronous run as its special case."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_adaptor import create_inference_engine, create_trainer_backend
from verl_adaptor.cli.run import prepared
from verl_adaptor.config import PipelineConfig, Recipe
from verl_adaptor.errors import ConfigError, EngineError, PipelineError, RewardError, WorkerDied
from verl_adaptor.execution import WorkerPool
from verl_adaptor.ppo.buffers import Group
from verl_adaptor.ppo.gate import GatedEngine
from verl_adaptor.ppo.loop import PPO, Clock, train
from verl_adaptor.ppo.pipeline import Pipeline
from verl_adaptor.samples import Delta, SamplingParams, Trajectory
from verl_adaptor.testing.bench import SHARE_CPUS
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking import is_timing

ROOT = Path(__file__).parent.parent
BATCH, N, STEPS = 4, 2, 5


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    return [sum(t.response_ids) % 7 / 7 for t in trajectories]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    make_tiny_model("llama", folder / "model")
    lines = [json.dumps({"prompt": f"question {i}", "answer": i}) for i in range(40)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def recipe(folder: Path, pipeline: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "prompts.jsonl"), "shuffle_buffer": 8, "chat_template": False},
        "rollout": {"max_tokens": 6, "n": N},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"function": f"{__name__}:score"},
        "ppo": {"total_steps": STEPS, "train_batch_size": BATCH, "advantage": "grpo"},
        "evaluation": {"prompts": 2, "every": 2},
        "checkpoint": {"every": 0},
        "tracking": {"sinks": [], "report": False},
    }
    for section, more in sections.items():
        tree[section] = {**tree.get(section, {}), **more}
    return Recipe(**tree, pipeline=pipeline)


@contextmanager
def ready(wanted: Recipe, output: Path, *, resume: bool = False) -> Iterator[PPO]:
    with WorkerPool() as workers, prepared(wanted, output, resume=resume, workers=workers) as (run, _):
        yield run  # ranks of its own: some are killed, and none are left to the tests after these


def run_pipeline(
    wanted: Recipe, output: Path, change: Callable[[PPO], None] = lambda run: None, *, resume: bool = False
) -> Watched:
    with ready(wanted, output, resume=resume) as run:
        change(run)
        assert wanted.pipeline is not None
        pipeline = Watched(run, wanted.pipeline)
        try:
            asyncio.run(asyncio.wait_for(pipeline.train(), 300))
        finally:
            pipeline.ledger.check()
        assert pipeline.ledger.trained == BATCH * STEPS
        return pipeline


class Watched(Pipeline):
    """Looks at what the actor is really given (Q2), whatever was filtered before."""

    def __init__(self, run: PPO, config: PipelineConfig) -> None:
        super().__init__(run, config)
        self.places: list[int] = []
        """Trained on, in order."""
        self.oldest = 0

    def _learn(self, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
        begins = self.run.actor.policy_version
        tokens = [version for group in groups for t in group.trajectories for version, _ in t.version_runs]
        self.oldest = max(self.oldest, begins - min(tokens, default=begins))
        self.places += [group.place for group in groups]
        return super()._learn(groups, clock)


def rows(output: Path) -> list[dict[str, Any]]:
    whole, _, _ = (output / "metrics.jsonl").read_text().rpartition("\n")  # the last may be half there
    return [json.loads(line) for line in whole.splitlines()]


class Unsteady:
    """A reward that takes its time, and fails where it is told to."""

    def __init__(
        self, seed: int = 0, slowest_s: float = 0.05, fails: Callable[[int], bool] = lambda call: False
    ) -> None:
        self.random, self.slowest_s, self.fails, self.calls = random.Random(seed), slowest_s, fails, 0

    async def score(self, trajectories: Sequence[Trajectory]) -> Any:
        self.calls += 1
        call = self.calls
        await asyncio.sleep(self.random.uniform(0, self.slowest_s))
        if self.fails(call):
            raise RewardError(f"call {call} fails.")
        return score(trajectories)


def give(reward: Any) -> Callable[[PPO], None]:
    def change(run: PPO) -> None:
        run.reward = reward

    return change


# -- the synchronous run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_without_staleness_it_is_the_synchronous_run(folder: Path, tmp_path: Path, in_flight: str) -> None:
    with ready(recipe(folder), tmp_path / "sync") as run:
        asyncio.run(train(run))
    asynchronous = recipe(folder, {"max_staleness": 0, "in_flight": in_flight, "reward_samples": N})
    run_pipeline(asynchronous, tmp_path / "async", give(Unsteady()))
    one, other = rows(tmp_path / "sync"), rows(tmp_path / "async")
    same = [{k: v for k, v in row.items() if not is_timing(k) and not k.startswith("pipeline/")} for row in other]
    assert [{k: v for k, v in row.items() if not is_timing(k)} for row in one] == same


# -- Q1, Q2, Q3 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eta", "in_flight"), [(1, "keep"), (2, "abort"), (3, "wait")])
def test_nothing_too_old_is_trained_on_and_nothing_is_lost(
    folder: Path, tmp_path: Path, eta: int, in_flight: str
) -> None:
    wanted = recipe(folder, {"max_staleness": eta, "in_flight": in_flight, "reward_samples": N})
    pipeline = run_pipeline(wanted, tmp_path / "run", give(Unsteady(seed=eta)))
    found = rows(tmp_path / "run")
    assert pipeline.oldest <= eta
    assert len(set(pipeline.places)) == len(pipeline.places), "a prompt was trained on twice"
    assert pipeline.ledger.dropped["stale"] <= BATCH, "long responses are not dropped as a rule"
    assert sum(row["pipeline/prompts"] for row in found) == BATCH * STEPS
    for row in found:  # as the log tells it, at every step
        stages = sum(value for key, value in row.items() if key.startswith("pipeline/at_"))
        assert row["pipeline/admitted"] == row["pipeline/trained"] + row["pipeline/dropped"] + stages
    assert pipeline.run.config.rollout_correction.level == "token"


def test_rollouts_that_tell_no_versions_are_as_old_as_their_beginning(folder: Path, tmp_path: Path) -> None:
    async def silent(engine: Any, prompt: Any, params: Any) -> Trajectory:
        [completion] = await engine.agenerate(prompt, params)
        return replace(Trajectory.from_completion(completion, prompt), version_runs=())

    def change(run: PPO) -> None:
        run.rollout = silent

    run_pipeline(recipe(folder, {"max_staleness": 1}), tmp_path / "run", change)
    assert max(row["pipeline/staleness_max"] for row in rows(tmp_path / "run")) <= 1


def test_a_full_train_buffer_drops_the_oldest_and_lets_others_in(folder: Path, tmp_path: Path) -> None:
    bounds = {"buffer_bytes": 24_000, "reward_samples": N}
    pipeline = run_pipeline(recipe(folder, {"max_staleness": 4, **bounds}), tmp_path / "run")
    found = rows(tmp_path / "run")
    assert pipeline.ledger.dropped["overflow"] > 0
    assert max(row["pipeline/buffer_bytes"] for row in found) <= 24_000
    with pytest.raises(PipelineError, match=r"full with 1 prompts .* raise pipeline\.buffer_bytes") as stopped:
        run_pipeline(recipe(folder, {"max_staleness": 1, "buffer_bytes": 100}), tmp_path / "tiny")
    assert stopped.value.stage == "train_buffer"


def test_prompts_without_a_signal_are_replaced(folder: Path, tmp_path: Path) -> None:
    class Coarse:
        async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
            return [float(sum(t.response_ids) % 2) for t in trajectories]

    wanted = recipe(folder, {"max_staleness": 0, "drop_silent": True})
    pipeline = run_pipeline(wanted, tmp_path / "run", give(Coarse()))
    assert pipeline.ledger.dropped["silent"] > 0
    assert all(row["reward/std"] > 0 for row in rows(tmp_path / "run"))


# -- Q4: faults --------------------------------------------------------------------------------------------------


def test_a_reward_that_fails_stops_the_run_or_costs_its_prompts(folder: Path, tmp_path: Path) -> None:
    def every_third(call: int) -> bool:
        return call > 2 and call % 3 == 0  # the evaluation's call must not fail

    config = {"max_staleness": 1, "reward_samples": N}
    with pytest.raises(PipelineError, match="stage reward failed: RewardError: call 3 fails") as stopped:
        run_pipeline(recipe(folder, config), tmp_path / "stops", give(Unsteady(fails=every_third)))
    assert stopped.value.stage == "reward" and isinstance(stopped.value.__cause__, RewardError)
    # evaluations ask too, and a failed one ends the run: there are none after the first
    dropping = recipe(folder, {**config, "on_reward_failure": "drop"}, evaluation={"prompts": 2, "every": 0})
    fails = Unsteady(fails=lambda call: 1 < call < 8)
    pipeline = run_pipeline(dropping, tmp_path / "drops", give(fails))
    assert pipeline.ledger.dropped["reward_failed"] == 6


def test_a_reward_that_hangs_is_named(folder: Path, tmp_path: Path) -> None:
    class Hangs:
        calls = 0

        async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
            self.calls += 1
            if self.calls > 1:  # the evaluation before training comes first
                await asyncio.sleep(3600)
            return score(trajectories)

    wanted = recipe(folder, {"max_staleness": 1, "stall_timeout_s": 1.5})
    with pytest.raises(PipelineError, match=r"stage reward has .* made no progress for 2 s"):
        run_pipeline(wanted, tmp_path / "run", give(Hangs()))
    assert "score" in (tmp_path / "run" / "stacks.txt").read_text()


def test_an_engine_whose_step_does_not_return_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, where nobody can end it: neither the watchdog waits for it, nor the end of the run."""
    monkeypatch.setattr("verl_adaptor.protocols.engine.CLOSE_WAIT_S", 0.1)
    wanted = recipe(folder, {"max_staleness": 1, "stall_timeout_s": 1.5})
    returns = threading.Event()

    def change(run: PPO) -> None:
        step, engine = run.engine._step, run.engine

        def stops_later() -> Any:
            if engine.policy_version == 1:
                returns.wait(120)
            return step()

        monkeypatch.setattr(engine, "_step", stops_later)

    try:
        with pytest.raises(PipelineError, match=r"stage (rollout|weight_sync) has .* made no progress"):
            run_pipeline(wanted, tmp_path / "run", change)
        assert not returns.is_set()
        assert "stops_later" in (tmp_path / "run" / "stacks.txt").read_text()
    finally:
        returns.set()


# -- Q4: real processes, really killed ---------------------------------------------------------------------------


class Teller:
    """On a rank of a worker group: which process it is."""

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        pass


def pids(group: Any) -> list[int]:
    """Of the ranks' processes."""
    group.create("teller", f"{__name__}:Teller", {})
    return list(group.call_each("teller", "pid"))


def after_a_step(output: Path, strike: Callable[[], None]) -> Callable[[], bool]:
    """For `PPO.stop_requested`: strikes once, when the first update is logged."""
    left = [strike]

    def asked() -> bool:
        if left and (output / "metrics.jsonl").exists() and rows(output):
            left.pop()()
        return False

    return asked


@contextmanager
def service(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The example of a reward service, in a process of its own: its URL."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "examples" / "reward_service.py"), "--function", f"{__name__}:score"]
    with subprocess.Popen([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()
            process.wait(20)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reward_service_that_goes_away_is_named(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    with service() as (url, process):
        asked = {"function": None, "url": url, "retries": 1, "backoff_s": 0.01, "timeout_s": 1.5}
        wanted = recipe(folder, {"max_staleness": 1}, reward=asked, evaluation={"prompts": 2, "every": 0})

        def change(run: PPO) -> None:
            run.stop_requested = after_a_step(tmp_path / "run", lambda: process.send_signal(how))

        with pytest.raises(PipelineError, match=r"stage reward failed: RewardError: .*attempt") as stopped:
            run_pipeline(wanted, tmp_path / "run", change)
        assert stopped.value.stage == "reward"


def test_a_reward_service_that_answers_garbage_costs_its_prompts(folder: Path, tmp_path: Path) -> None:
    with service("--garbage-rate", "0.4", "--seed", "1") as (url, _):
        asked = {"function": None, "url": url, "retries": 0, "backoff_s": 0.0}
        wanted = recipe(folder, {"max_staleness": 1, "reward_samples": N, "on_reward_failure": "drop"}, reward=asked)

        def change(run: PPO) -> None:
            run.reward = Patient(run.reward)

        pipeline = run_pipeline(wanted, tmp_path / "run", change)
        assert pipeline.ledger.dropped["reward_failed"] > 0


class Patient:
    """Evaluations (whole calls of other sizes than a group) are asked for until they are answered."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def score(self, trajectories: Sequence[Trajectory]) -> Any:
        for _ in range(50):
            try:
                return await self.inner.score(trajectories)
            except RewardError:
                if len({t.group_id for t in trajectories}) == 1:
                    raise
        raise AssertionError("the service never answers")


@pytest.mark.parametrize("restarts", [1, 0])
def test_an_engine_that_is_killed_is_made_anew(folder: Path, tmp_path: Path, restarts: int) -> None:
    """Of two engines, and no other; it serves only after a sync: Q2 is looked at where the actor is called."""
    wanted = recipe(
        folder,
        {"max_staleness": 1, "engines": 1 + restarts, "engine_restarts": restarts},
        engine={"executor": "ray", **SHARE_CPUS},
    )
    engines, made = [], []

    def change(run: PPO) -> None:
        engines.append(run.engine)
        [pid] = pids(run.engine._group)  # type: ignore[attr-defined]
        run.stop_requested = after_a_step(tmp_path / "run", lambda: os.kill(pid, signal.SIGKILL))
        make = run.new_engine
        assert make is not None
        run.new_engine = lambda number: made.append(number) or make(number)  # type: ignore[func-returns-value]

    if not restarts:
        with pytest.raises(PipelineError, match=r"stage (rollout|update) failed: EngineError") as stopped:
            run_pipeline(wanted, tmp_path / "run", change)
        assert isinstance(stopped.value.__cause__, EngineError)
        return
    pipeline = run_pipeline(wanted, tmp_path / "run", change)
    assert made == [1, 0] and pipeline.run.engine is not engines[0]
    assert all(gate.engine.policy_version == pipeline.run.actor.policy_version for gate in pipeline.gates)
    assert pipeline.oldest <= 1


@pytest.mark.slow
def test_on_ray_an_engine_of_two_replicas_loses_one_and_is_replaced(folder: Path, tmp_path: Path) -> None:
    """Rollout workers and trainer as actors."""
    ranks = {"executor": "ray", **SHARE_CPUS}
    wanted = recipe(
        folder,
        {"max_staleness": 2},
        engine={**ranks, "replicas": 2},
        trainer={**ranks, "backend": "fsdp", "data_parallel_size": 2},
    )

    def change(run: PPO) -> None:
        victim = pids(run.engine._group)[1]  # type: ignore[attr-defined]
        run.stop_requested = after_a_step(tmp_path / "run", lambda: os.kill(victim, signal.SIGKILL))

    pipeline = run_pipeline(wanted, tmp_path / "run", change)
    assert pipeline._restarts == 1
    assert max(row["pipeline/staleness_max"] for row in rows(tmp_path / "run")) <= 2


def test_an_engine_that_stands_still_is_made_anew(folder: Path, tmp_path: Path) -> None:
    """Stopped, not killed: it is found out by the calls that it does not answer, while all else goes on."""
    wanted = recipe(folder, {"max_staleness": 1}, engine={"executor": "ray", "call_timeout_s": 4.0, **SHARE_CPUS})
    stopped: list[int] = []

    def change(run: PPO) -> None:
        stopped.extend(pids(run.engine._group))  # type: ignore[attr-defined]
        run.stop_requested = after_a_step(tmp_path / "run", lambda: os.kill(stopped[0], signal.SIGSTOP))

    try:
        assert run_pipeline(wanted, tmp_path / "run", change)._restarts == 1
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_killed_trainer_rank_ends_the_run_which_resumes(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    wanted = recipe(
        folder,
        {"max_staleness": 1},
        trainer={"backend": "fsdp", "data_parallel_size": 2, **SHARE_CPUS},
        checkpoint={"every": 1},
    )

    def change(run: PPO) -> None:
        victim = pids(run.actor._group)[1]  # type: ignore[attr-defined]
        run.stop_requested = after_a_step(output, lambda: os.kill(victim, signal.SIGKILL))

    with pytest.raises(PipelineError, match="stage update failed: WorkerDied: rank") as stopped:
        run_pipeline(wanted, output, change)
    assert isinstance(stopped.value.__cause__, WorkerDied)
    pipeline = run_pipeline(wanted, output, resume=True)
    assert pipeline.ledger.admitted == pipeline._next_place
    assert max(row["pipeline/staleness_max"] for row in rows(output)) <= 1  # also after the recovery (C23)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_command_is_stopped_and_resumed(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    output, file = tmp_path / "run", tmp_path / "recipe.yaml"
    wanted = recipe(folder, {"max_staleness": 2}, checkpoint={"every": 1}, ppo={"total_steps": 20})
    file.write_text(yaml.safe_dump(wanted.model_dump(mode="json", exclude_unset=True)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "verl_adaptor.cli", "train", str(file), "--output", str(output)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (output / "metrics.jsonl").exists() or len(rows(output)) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "no step was logged"
        time.sleep(0.01)
    process.send_signal(how)
    assert process.wait(60) in ((-signal.SIGKILL,) if how is signal.SIGKILL else (130, 0))
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    last = rows(output)[-1]
    stages = sum(value for key, value in last.items() if key.startswith("pipeline/at_"))
    assert last["pipeline/trained"] == 20 * BATCH
    assert last["pipeline/admitted"] == last["pipeline/trained"] + last["pipeline/dropped"] + stages
    assert sum(row["pipeline/prompts"] for row in rows(output)) == 20 * BATCH


# -- resume ------------------------------------------------------------------------------------------------------


def test_what_was_in_flight_is_resumed(folder: Path, tmp_path: Path) -> None:
    """Stopped with prompts at every stage: each is trained or dropped once, in the run that goes on."""
    wanted = recipe(folder, {"max_staleness": 2, "reward_samples": N}, checkpoint={"every": 1})
    output = tmp_path / "run"

    def stop_soon(run: PPO) -> None:
        run.stop_requested = lambda: len(rows(output)) >= 2 if (output / "metrics.jsonl").exists() else False
        run.reward = Unsteady()

    with ready(wanted, output) as run:
        stop_soon(run)
        assert wanted.pipeline is not None
        first = Watched(run, wanted.pipeline)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(first.train())
    second = run_pipeline(wanted, output, give(Unsteady()), resume=True)
    trained = first.places + second.places
    assert len(set(trained)) == len(trained) == BATCH * STEPS
    assert second.ledger.admitted == second._next_place
    in_flight = {group.place for group in second.state_dict()["groups"]}
    assert len({*trained, *in_flight}) + second.ledger.dropped.total() == second._next_place
    assert second.oldest <= 2


# -- what cannot be ----------------------------------------------------------------------------------------------


def test_what_would_stand_still_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(
            folder,
            {"buffer_samples": 7, "queue_samples": 1, "drop_silent": True},
            ppo={"advantage": "remax"},
            engine={"backend": "trainer"},
        )
    for word in ("buffer_samples=7 does not hold the 16 samples", "queue_samples=1", "remax", "share the same ranks"):
        assert word in str(refused.value)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_goes_on_where_new_weights_have_aborted_it(folder: Path, n: int) -> None:
    """A rollout that streams gets whole samples, each under one name, as one that waits does."""
    params = SamplingParams(max_tokens=40, n=n, ignore_eos=True, seed=4)

    async def follow() -> list[Delta]:
        with (
            create_inference_engine(folder / "model", backend="hf", device="cpu") as engine,
            create_trainer_backend(folder / "model", backend="hf", device="cpu", learning_rate=1e-3) as trainer,
        ):
            gate, deltas = GatedEngine(engine), list[Delta]()
            async for delta in gate.stream((3, 4, 5), params):
                deltas.append(delta)
                if len(deltas) in (4 * n, 12 * n):
                    update = replace(trainer.export_weights(), version=len(deltas))
                    await asyncio.to_thread(engine.update_weights, update, in_flight="abort")
            await asyncio.wait_for(gate.settled(), 5)
            return deltas

    deltas = asyncio.run(asyncio.wait_for(follow(), 60))
    assert len({delta.request_id for delta in deltas}) == 1
    for index in range(n):
        its = [delta for delta in deltas if delta.index == index]
        assert sum(len(delta.token_ids) for delta in its) == 40
        assert [delta.finish_reason for delta in its if delta.finish_reason] == ["length"] == [its[-1].finish_reason]
    assert {delta.policy_version for delta in deltas} == {0, 4 * n, 12 * n}
