"""How fast the hf engine generates: against transformers' own generate, and concurrent calls against one call.

    OMP_NUM_THREADS=1 python benchmarks/hf_engine.py --json hf_engine.json

Both sides of a ratio take turns in one process, with the same prompts, token counts and kind of sampling; ratios are of
medians. Two models without trained weights: `tiny` shows the overhead of a step, `small` the arithmetic. Law I5 wants
`concurrent_over_batch` to be at least 0.7.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl_adaptor import create_inference_engine
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.models import make_tiny_model
from verl_adaptor.tracking.environment import environment

MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
}  # fmt: skip
ROWS, TOKENS, GROUP = 32, 64, 8
"""Requests at a time, new tokens in each, samples of one prompt in the group measurement."""
LIMIT = 0.7


def make_prompts() -> list[tuple[int, ...]]:
    """ROWS random prompts of 8 to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (ROWS,), generator=generator).tolist()
    return [tuple(torch.randint(3, 250, (n,), generator=generator).tolist()) for n in lengths]


def transformers_generate(path: str, prompts: list[tuple[int, ...]]) -> Callable[[], None]:
    """The peer: one padded batch through transformers' generate, sampling at temperature 1."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "pad_token_id": 0}

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, **settings)
        assert out.shape == (len(prompts), width + TOKENS)

    return run


def concurrently(engine: InferenceEngine, prompts: list[tuple[int, ...]], params: SamplingParams) -> Callable[[], None]:
    """ROWS async calls at once."""

    async def calls() -> None:
        await asyncio.gather(*(engine.agenerate(prompt, params) for prompt in prompts))

    return lambda: asyncio.run(calls())


def measure(name: str, repeats: int) -> dict[str, list[float]]:
    """Way -> seconds for ROWS x TOKENS tokens, of each run; the ways take turns, the first turn is thrown away."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
    prompts = make_prompts()
    grouped = [prompt for prompt in prompts[: ROWS // GROUP] for _ in range(GROUP)]
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_tiny_model("llama", folder, **MODELS[name]))
        with create_inference_engine(path, backend="hf") as engine:
            ways: dict[str, Callable[[], object]] = {
                "transformers": transformers_generate(path, prompts),
                "batch": lambda: engine.generate(prompts, params),
                "concurrent": concurrently(engine, prompts, params),
                "transformers_group": transformers_generate(path, grouped),
                "group": lambda: engine.generate(prompts[: ROWS // GROUP], params.replace(n=GROUP)),
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            shuffled = random.Random(0)
            for _ in range(repeats + 1):
                for way in shuffled.sample(list(ways), len(ways)):  # nobody always runs after the same one
                    start = time.perf_counter()
                    ways[way]()
                    seconds[way].append(time.perf_counter() - start)
    return {way: runs[1:] for way, runs in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, at least 5 (default: 7)")
    options = parser.parse_args()
    if options.repeats < 5:
        parser.error("--repeats: a median of fewer than 5 runs says little")
    result: dict[str, Any] = {}
    runs = {name: measure(name, options.repeats) for name in MODELS}
    for name, seconds in runs.items():
        median = {way: statistics.median(its) for way, its in seconds.items()}
        result |= {
            f"{name}_engine_over_transformers": round(median["transformers"] / median["batch"], 3),
            f"{name}_group_over_transformers": round(median["transformers_group"] / median["group"], 3),
            f"{name}_concurrent_over_batch": round(median["batch"] / median["concurrent"], 3),
            f"{name}_tokens_per_second": round(ROWS * TOKENS / median["batch"], 1),
        }
    result["within_limits"] = all(result[f"{name}_concurrent_over_batch"] >= LIMIT for name in MODELS)
    for key, value in result.items():
        print(f"{key:36} {value}")
    if options.json:
        details = {
            "rows": ROWS,
            "tokens": TOKENS,
            "group": GROUP,
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
        }
        options.json.write_text(json.dumps({**result, **details, "seconds": runs, **environment()}, indent=2) + "\n")
    sys.exit(0 if result["within_limits"] else 1)


if __name__ == "__main__":
    main()
