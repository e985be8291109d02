"""The same recipe with every trainer, and with pairs of an engine and a trainer: does it learn, and are its first steps the
reference's?

    python benchmarks/digits_trainers.py --json digits_trainers.json

Each row is one `verl-adaptor train recipes/digits.yaml` in a process of its own, where only `trainer.*` and `engine.*`
arguments differ.
The first steps are compared with hf's: while the weights agree to rounding, the engine samples the same tokens and loss and
grad norm agree; once rounding flips one sampled token the two runs are different, equally good, samples of training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from verl_adaptor.tracking.environment import environment

ROOT = Path(__file__).parent.parent
TARGET = 0.9
"""Held-out reward that counts as learned."""
FIRST = 10
"""Steps that are compared."""
FSDP = ("trainer.backend=fsdp", "trainer.data_parallel_size=2")
ZERO = ("trainer.backend=zero", "trainer.data_parallel_size=2", "trainer.zero_stage=3")
MEGATRON = ("trainer.backend=megatron", "trainer.tensor_parallel_size=2")
RUNS: dict[str, list[str]] = {
    "hf": [],
    "hf ddp x2": ["trainer.backend=hf", "trainer.data_parallel_size=2"],
    "fsdp x2": [*FSDP],
    "zero 3 x2": [*ZERO],
    "megatron TP2": [*MEGATRON],
    "vllm + fsdp x2": ["engine.backend=vllm", *FSDP],
    "vllm + zero 3 x2": ["engine.backend=vllm", *ZERO],
    "vllm + megatron TP2": ["engine.backend=vllm", *MEGATRON],
    "megatron TP2 + megatron TP2": ["engine.backend=megatron", "engine.tensor_parallel_size=2", *MEGATRON],
    "megatron TP2 on its own shards": ["engine.backend=trainer", *MEGATRON],
    "fsdp x2 on its own shards": ["engine.backend=trainer", *FSDP],
}


def run(name: str, folder: Path, more: list[str]) -> dict[str, Any]:
    """Train once; the summary and the first steps' metrics."""
    output = folder / name.replace(" ", "-")
    settings = RUNS[name] + more
    command = [sys.executable, "-m", "verl_adaptor.cli", "train", str(ROOT / "recipes/digits.yaml"), *settings]
    print(f"{name}: {' '.join(settings)}", flush=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output", str(output)], check=True, env=environ, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "settings": settings,
        "summary": json.loads((output / "summary.json").read_text()),
        "first_steps": [{key: row[f"actor/{key}"] for key in ("loss", "grad_norm")} for row in rows[:FIRST]],
    }


def agreement(steps: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, Any]:
    """How far apart, step by step, and how many steps from the first agree within 1e-4."""
    apart = {
        key: [abs(a[key] - b[key]) for a, b in zip(steps, reference, strict=True)] for key in ("loss", "grad_norm")
    }
    same = [loss <= 1e-4 and norm <= 1e-4 for loss, norm in zip(apart["loss"], apart["grad_norm"], strict=True)]
    return {
        "max_loss_difference": max(apart["loss"]),
        "max_grad_norm_difference": max(apart["grad_norm"]),
        "steps_equal_within_1e-4": same.index(False) if False in same else len(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="rows to run; hf always runs")
    parser.add_argument("overrides", nargs="*", default=[], help="more recipe settings, e.g. seed=1")
    options = parser.parse_args()
    names = ["hf", *(name for name in options.only if name != "hf")]
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run(name, Path(folder), options.overrides) for name in names}
    table = {}
    for name, found in runs.items():
        summary = found["summary"]
        table[name] = {
            "reward_before": summary["reward_before"],
            "reward_after": summary["reward_after"],
            "train_seconds": summary["train_seconds"],
            **agreement(found["first_steps"], runs["hf"]["first_steps"]),
        }
        print(name, json.dumps(table[name]), flush=True)
    learned = all(row["reward_after"] >= TARGET for row in table.values())
    if options.json:
        result = {"all_reach_target": learned, "target": TARGET, "table": table, "runs": runs, **environment()}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
