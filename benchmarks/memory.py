"""How near the estimate of a run's memory is to what its processes take at their peak.

    python benchmarks/memory.py --json docs/results/memory.json [--only digits]

Each case is a recipe with overrides, trained for two steps in a process of its own. The peak of each process (VmHWM) is read
until it ends: of the one that drives the run, and the largest of its workers'. smollm2's recipe runs on a model of the same
shape with random weights, and its task on numbers, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from verl_adaptor.cli.memory import estimate
from verl_adaptor.cli.plan import plan
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.preflight.memory import TOLERANCE
from verl_adaptor.tracking.environment import environment

SHORT = (
    "ppo.total_steps=2",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "checkpoint.every=0",
    "tracking.report=false",
)
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
RANKS = ("trainer.data_parallel_size=2", "trainer.cpus_per_worker=0.5")
CASES: Mapping[str, tuple[str, Sequence[str]]] = {
    "digits": ("digits", ()),
    "digits, wider": (
        "digits",
        ("model.build_args={hidden_size: 512, intermediate_size: 1408, layers: 8, warm_start_steps: 1}",),
    ),
    "digits, fsdp on 2 ranks": ("digits", ("trainer.backend=fsdp", *RANKS)),
    "digits, vllm": ("digits", ("model.build_args.hidden_size=256", "engine.backend=vllm", "engine.kv_cache_gib=0.25")),
    "smollm2": ("smollm2", ()),
    "smollm2, float32, rows of 8": (
        "smollm2",
        ("trainer.dtype=float32", "engine.dtype=float32", "trainer.micro_batch_size=8", "trainer.packing=false"),
    ),
    "smollm2, checkpointing": ("smollm2", ("trainer.activation_checkpointing=true",)),
    "smollm2, lora": ("smollm2", ("trainer.lora_rank=8",)),
    "smollm2, reference": ("smollm2", ("ppo.kl.where=loss",)),
    "smollm2, fsdp on 2 ranks": ("smollm2", ("trainer.backend=fsdp", *RANKS)),
}
LONGEST_S = 900.0


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Estimated and measured MiB of one case's processes."""
    recipe, overrides = CASES[name]
    overrides = [*SHORT, *overrides]
    if recipe == "smollm2":
        overrides += _smollm2(folder)
    command = [sys.executable, "-m", "verl_adaptor.cli", "train", f"recipes/{recipe}.yaml", *overrides]
    output = folder / "run"
    began = time.monotonic()
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen([*command, "--output", str(output)], stdout=log, stderr=log)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            _look(process.pid, peaks)
            if time.monotonic() - began > LONGEST_S:
                process.kill()
                raise SystemExit(f"{name} took longer than {LONGEST_S:.0f} s")
            time.sleep(0.05)
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{Path(log.name).read_text()[-3000:]}")
    checked = load_recipe(Path(f"recipes/{recipe}.yaml"), overrides)
    path = checked.model.path or str(output / "model")
    found = estimate(checked, plan(checked), path)
    driver = peaks.pop(process.pid)
    measured = [driver, *([max(peaks.values())] if len(found) > 1 else [])]
    return {
        "overrides": overrides,
        "seconds": round(time.monotonic() - began, 1),
        "processes": [
            {
                "name": its.name,
                "estimated_mib": round(its.total / 2**20),
                "measured_mib": round(peak / 2**20),
                "ratio": round(its.total / peak, 3),
                "parts_mib": {part: round(size / 2**20) for part, size in its.parts.items()},
            }
            for its, peak in zip(found, measured, strict=True)
        ],
    }


def _smollm2(folder: Path) -> list[str]:
    from transformers import AutoConfig

    from verl_adaptor.testing.models import save_random_model

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    save_random_model(AutoConfig.for_model("llama", **SMOLLM2, **ids), folder / "model", seed=0)
    return [f"model.path={folder / 'model'}", "data.args.messages=[]", "data.chat_template=false"]


def _look(pid: int, peaks: dict[int, int]) -> None:
    """Note the peaks of the process and of the Ray or vLLM workers under it."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            words = process.name() + " ".join(process.cmdline()[:2])
            if process.pid != pid and not ("ray::" in words or "RayWorker" in words or "EngineCore" in words):
                continue
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue
        high = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
        if high:
            peaks[process.pid] = max(peaks.get(process.pid, 0), high[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--only", default="", help="only cases with this in their name")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = {}
    for name in CASES:
        if options.only in name:
            with tempfile.TemporaryDirectory() as folder:
                cases[name] = measure(name, Path(folder))
            for its in cases[name]["processes"]:
                print(
                    f"{name:32} {its['name']:20} {its['estimated_mib']:6} of {its['measured_mib']:6} MiB {its['ratio']:.2f}"
                )
                print(f"{'':32} {yaml.safe_dump(its['parts_mib'], default_flow_style=True, width=200).strip()}")
    far = [name for name, case in cases.items() for its in case["processes"] if abs(its["ratio"] - 1) > TOLERANCE]
    if options.json:
        result = {"tolerance": TOLERANCE, "within": not far, "cases": cases, **environment()}
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(f"further off than {TOLERANCE:.0%}: {', '.join(far)}" if far else 0)


if __name__ == "__main__":
    main()
