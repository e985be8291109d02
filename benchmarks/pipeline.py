"""What overlapping rollouts, rewards and updates gains: the asynchronous pipeline against the synchronous loop.

    python benchmarks/pipeline.py --json pipeline.json

Runs of both ways in turn, same model, same number of trained prompts, two cores, rewards from a service of its own process
whose latency is log-normal (sigma 0.5) with about one rollout's time as its mean. Both are given the thread count that is best
for them, as the first round finds it; the pipeline has its engine in a process of its own, with one thread. A shared machine is
a fifth slower in one minute than in another: so each round compares runs that follow each other, and the median round counts.

- ``throughput_ratio``: trained tokens a second, asynchronous to synchronous.
- ``bound``: what the stage times allow: the synchronous step over the pipeline's at its best thread count, which is its longest
  stage that computes, or all that it computes spread over both cores, whichever is longer.
- ``interruptions_ratio``: updates that had to wait for their samples (longer than a tenth of their own time), asynchronous to
  synchronous.
- ``queue_growth``: bytes of both buffers, last quarter of the run to the second.
- ``learning``: the digits recipe as it is, but asynchronous, over 200 steps: its reward on unseen prompts, and its queue_growth.

Limits: throughput_ratio >= min(2.1, 0.85 x bound), interruptions_ratio <= 0.1, queue_growth <= 1.5, reward_after >= 0.9.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_adaptor.tracking.environment import environment

ROOT = Path(__file__).parent.parent
SIGMA = 0.5
CORES = 2
TARGET, SHARE = 2.1, 0.85
"""The ratio that is wanted, and what share of the bound will do."""
WAITED = 0.1
"""An update has waited when that took more than this share of its step."""
MODELS: dict[str, list[str]] = {
    "digits": ["ppo.total_steps=25"],
    "20m": [
        "ppo.total_steps=12",
        "ppo.train_batch_size=128",
        "model.build_args.hidden_size=512",
        "model.build_args.intermediate_size=1408",
        "model.build_args.layers=6",
        "model.build_args.warm_start_steps=20",
        "trainer.learning_rate=3.0e-5",
        "critic.learning_rate=5.0e-5",
    ],
}
ROUNDS = {"digits": 3, "20m": 2}
APART = ["engine.executor=ray", "engine.cpus_per_worker=1"]
"""The engine in a process of its own."""
PIPELINE = ["pipeline.max_staleness=2", "pipeline.reward_samples=16", "pipeline.reward_calls=16"]


SILENT = ["checkpoint.every=0", "tracking.report=false", "tracking.sinks=[]"]
FEW_EVALUATIONS = ["evaluation.every=0", "evaluation.prompts=8"]
"""As few evaluations as there can be: they are no part of what is compared."""
LEARNING_STEPS, LEARNT = 200, 0.9


def train(folder: Path, name: str, settings: list[str], *, threads: int) -> list[dict[str, Any]]:
    """One run in processes of its own; its metrics."""
    output = folder / name
    command = [sys.executable, "-m", "verl_adaptor.cli", "train", str(ROOT / "recipes/digits.yaml"), *SILENT]
    command += [f"threads={threads}", *settings, "--output", str(output)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # of an engine beside; the recipe's threads are torch's here
    print(f"{name}: {' '.join(settings)}", flush=True)
    done = subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def service(latency_s: float) -> Iterator[str]:
    """The example of a reward service; its URL."""
    command = [
        sys.executable,
        str(ROOT / "examples/reward_service.py"),
        "--task",
        "digits",
        "--seed",
        "0",
        "--port",
        "0",
    ]
    command += ["--latency-mean-s", str(latency_s), "--latency-sigma", str(SIGMA)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(20)


def seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds a step of each stage; the first steps warm up."""
    steady = rows[2:]
    names = {key for row in steady for key in row if key.startswith("time/")}
    return {
        name.removeprefix("time/"): statistics.median(row.get(name, 0.0) for row in steady) for name in sorted(names)
    }


def rate(rows: list[dict[str, Any]]) -> float:
    """Trained tokens a second over the whole run."""
    return float(sum(row["tokens"] for row in rows) / sum(row["time/step"] for row in rows))


def waited(rows: list[dict[str, Any]], stages: tuple[str, ...]) -> int:
    """Updates that waited for their samples."""
    waits = [sum(row.get(f"time/{stage}", 0.0) for stage in stages) for row in rows]
    return sum(wait > WAITED * row["time/step"] for wait, row in zip(waits, rows, strict=True))


def growth(rows: list[dict[str, Any]]) -> float:
    """Of the bytes in both buffers, last quarter to the second."""
    held = [row["pipeline/queue_bytes"] + row["pipeline/buffer_bytes"] for row in rows]
    quarter = max(1, len(held) // 4)
    return float(max(held[-quarter:]) / max(1.0, *held[quarter : 2 * quarter]))


def learn(folder: Path, latency_s: float) -> dict[str, Any]:
    """The recipe with its own evaluations, rewards from the service."""
    with service(latency_s) as url:
        asked = [f"reward.url={url}", "reward.batch_size=16", "reward.concurrency=16"]
        steps = [f"ppo.total_steps={LEARNING_STEPS}", "evaluation.every=20"]
        rows = train(folder, "learning", [*asked, *steps, *APART, *PIPELINE], threads=1)
    summary = json.loads((folder / "learning/summary.json").read_text())
    found = {
        "steps": len(rows),
        "reward_before": summary["reward_before"],
        "reward_after": summary["reward_after"],
        "staleness_max": max(row["pipeline/staleness_max"] for row in rows),
        "queue_bytes_max": max(row["pipeline/queue_bytes"] + row["pipeline/buffer_bytes"] for row in rows),
        "queue_growth": growth(rows),
        "dropped": rows[-1]["pipeline/dropped"],
        "seconds": sum(row["time/step"] for row in rows),
    }
    return {**found, "within_limits": found["reward_after"] >= LEARNT and found["queue_growth"] <= 1.5}


def shortest(stages: dict[str, float], one: dict[str, float], threads: int) -> float:
    """Seconds of an overlapped step: the update on so many threads beside the rollouts on one, on two cores."""
    update = stages["step"] - stages["rollout"] - stages["reward"]
    return max(update, one["rollout"], (threads * update + one["rollout"]) / CORES)


@dataclass
class Round:
    """Runs that followed each other, by their threads."""

    synchronous: dict[int, list[dict[str, Any]]]
    overlapped: dict[int, list[dict[str, Any]]]

    @property
    def best(self) -> tuple[int, int]:
        """Threads of the faster synchronous run, and of the faster overlapped one."""
        ways = (self.synchronous, self.overlapped)
        return tuple(max(way, key=lambda threads: rate(way[threads])) for way in ways)  # type: ignore[return-value]

    @property
    def ratio(self) -> float:
        """Trained tokens a second, asynchronous to synchronous, each at its best."""
        threads, overlapped_threads = self.best
        return rate(self.overlapped[overlapped_threads]) / rate(self.synchronous[threads])

    @property
    def bound(self) -> float:
        """What the ratio could be; the shorter step of the thread counts that were tried."""
        stages = {threads: seconds(rows) for threads, rows in self.synchronous.items()}
        shortest_s = min(shortest(its, stages[1], threads) for threads, its in stages.items())
        return stages[self.best[0]]["step"] / shortest_s


def measure(model: str, folder: Path) -> dict[str, Any]:
    settings = [*MODELS[model], *FEW_EVALUATIONS]
    probe = seconds(train(folder, f"{model}-probe", [*settings, "ppo.total_steps=5"], threads=1))
    rounds: list[Round] = []
    with service(probe["rollout"]) as url:
        asked = [*settings, f"reward.url={url}", "reward.batch_size=16", "reward.concurrency=16"]
        for number in range(ROUNDS[model]):
            best, overlapped_best = rounds[0].best if rounds else (None, None)
            rounds.append(
                Round(
                    {  # one thread always: what the engine beside the update takes
                        threads: train(folder, f"{model}-sync-{threads}-{number}", asked, threads=threads)
                        for threads in sorted({1, best or 2})
                    },
                    {
                        threads: train(
                            folder, f"{model}-async-{threads}-{number}", [*asked, *APART, *PIPELINE], threads=threads
                        )
                        for threads in ([overlapped_best] if overlapped_best else (1, 2))
                    },
                )
            )
    ratio, bound = (statistics.median(values) for values in zip(*((r.ratio, r.bound) for r in rounds), strict=True))
    synchronous = [rows for r in rounds for threads, rows in r.synchronous.items() if threads == rounds[0].best[0]]
    overlapped = [rows for r in rounds for threads, rows in r.overlapped.items() if threads == rounds[0].best[1]]
    waits = [
        sum(waited(rows, stages) / len(rows) for rows in runs)
        for runs, stages in (
            (overlapped, ("wait",)),
            (synchronous, ("rollout", "reward")),
        )
    ]
    grown = statistics.median(growth(rows) for rows in overlapped)
    wanted = min(TARGET, SHARE * bound)
    return {
        "throughput_ratio": ratio,
        "bound": bound,
        "wanted": wanted,
        "interruptions_ratio": waits[0] / waits[1],
        "queue_growth": grown,
        "staleness_max": max(row["pipeline/staleness_max"] for rows in overlapped for row in rows),
        "dropped": sum(rows[-1]["pipeline/dropped"] for rows in overlapped),
        "best_threads": rounds[0].best[0],
        "asynchronous_best_threads": rounds[0].best[1],
        "latency_mean_s": probe["rollout"],
        "rounds": [_told(r) for r in rounds],
        "within_limits": ratio >= wanted and waits[0] / waits[1] <= 0.1 and grown <= 1.5,
    }


def _told(found: Round) -> dict[str, Any]:
    ways = {"synchronous": found.synchronous, "asynchronous": found.overlapped}
    return {
        "ratio": found.ratio,
        "bound": found.bound,
        **{
            way: {str(threads): {"tokens_per_second": rate(rows), **seconds(rows)} for threads, rows in runs.items()}
            for way, runs in ways.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS), help="which (default: all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = {model: measure(model, Path(scratch)) for model in options.model}
        learnt = learn(Path(scratch), found["digits"]["latency_mean_s"]) if "digits" in found else None
    for model, numbers in found.items():
        print(model, json.dumps({k: v for k, v in numbers.items() if not isinstance(v, dict | list)}))
    headline = {f"{model}_{key}": value[key] for model, value in found.items() for key in ("throughput_ratio", "bound")}
    if learnt:
        print("learning", json.dumps(learnt))
    result = {
        **headline,
        "within_limits": all(v["within_limits"] for v in (*found.values(), *([learnt] if learnt else []))),
    }
    if options.json:
        options.json.write_text(
            json.dumps({**result, "models": found, "learning": learnt, **environment()}, indent=2) + "\n"
        )
    sys.exit(0 if result["within_limits"] else 1)


if __name__ == "__main__":
    main()
