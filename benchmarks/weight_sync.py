"""How fast new weights reach an engine, beside a plain copy of the same bytes; how fast it then generates, beside plain vLLM.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py --json weight_sync.json

A random Llama of 88 M parameters, the hf trainer in this process, and hf, vLLM in this process and vLLM beside it. The ways
take turns; ratios are of medians of one run:

- ``*_over_memcpy``: bytes a second of ``engine.update_weights(trainer.export_weights())`` to those of copying the same
  tensors into others. Limits: vLLM in this process 0.15, beside it 0.11.
- ``*_extra_mib``: by how much an update raises the peak memory of this process, beside a bucket and the largest fused group.
- ``adaptor_over_vllm``: seconds of 64 prompts through the engine to those through vLLM's own `LLM.generate`, both with each
  token's log-prob. Limit 1.03.
- ``ready_seconds`` from the end of vLLM's import to the engine, ``first_generate_seconds`` after that. Limits 5 s and 1 s.
"""

from __future__ import annotations

import argparse
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
from transformers import LlamaConfig

from verl_adaptor import create_inference_engine, create_trainer_backend
from verl_adaptor.backends.vllm.environment import vllm_environment
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.models import save_random_model
from verl_adaptor.tracking.environment import environment

ROWS, TOKENS = 64, 32
SETTINGS = {"max_model_len": 256, "max_batch_size": ROWS}
CONFIG = {
    "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
LIMITS = {"vllm_over_memcpy": 0.15, "vllm_beside_over_memcpy": 0.11}
CEILINGS = {"adaptor_over_vllm": 1.03, "ready_seconds": 5.0, "first_generate_seconds": 1.0}


def copying(trainer: TrainerBackend) -> tuple[Callable[[], None], int]:
    """What copies the exported tensors into others, and how many bytes that is."""
    source = {name: t.clone() for bucket in trainer.export_weights().buckets() for name, t in bucket.items()}
    target = {name: torch.empty_like(t) for name, t in source.items()}

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    return copy, sum(t.nbytes for t in source.values())


def in_turns(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run of each way, in an order of its own each turn; the first turn is thrown away."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    shuffled = random.Random(0)
    for _ in range(repeats + 1):
        for way in shuffled.sample(list(ways), len(ways)):
            start = time.perf_counter()
            ways[way]()
            seconds[way].append(time.perf_counter() - start)
    return {way: runs[1:] for way, runs in seconds.items()}


def extra_mib(act: Callable[[], object]) -> float:
    """By how much `act` raises this process's peak of memory over what it holds before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = status("VmRSS")
    act()
    return round((status("VmHWM") - before) / 1024, 1)


def status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make_prompts() -> list[list[int]]:
    """ROWS random prompts of 16 to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 65, (ROWS,), generator=generator).tolist()
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def plain_vllm(path: str, prompts: list[list[int]]) -> Callable[[], None]:
    """The peer: vLLM's own entry point, in this process too."""
    with vllm_environment():
        from vllm import LLM
        from vllm import SamplingParams as VLLMParams

        llm = LLM(
            path, dtype="float32", max_model_len=SETTINGS["max_model_len"], max_num_seqs=ROWS, enforce_eager=True,
            kv_cache_memory_bytes=1 << 29, distributed_executor_backend="uni", skip_tokenizer_init=True,
            disable_log_stats=True, max_num_batched_tokens=16384,
        )  # fmt: skip
    params = VLLMParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)

    def run() -> None:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)

    return run


def engine_generates(engine: InferenceEngine, prompts: list[list[int]]) -> Callable[[], None]:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return lambda: engine.generate(prompts, params)  # type: ignore[return-value]


def measure(path: str, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Headline numbers, and the seconds behind them."""
    result: dict[str, Any] = {}
    with vllm_environment():
        import verl_adaptor.backends.vllm.engine  # noqa: F401 - ready_seconds begins after the import
    start = time.perf_counter()
    here = create_inference_engine(path, backend="vllm", kv_cache_gib=0.5, **SETTINGS)
    result["ready_seconds"] = round(time.perf_counter() - start, 2)
    start = time.perf_counter()
    here.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    result["first_generate_seconds"] = round(time.perf_counter() - start, 2)

    trainer = create_trainer_backend(path, backend="hf")
    engines = {
        "hf": create_inference_engine(path, backend="hf", **SETTINGS),
        "vllm": here,
        "vllm_beside": create_inference_engine(path, backend="vllm", mode="async", kv_cache_gib=0.25, **SETTINGS),
    }
    copy, size = copying(trainer)
    ways: dict[str, Callable[[], object]] = {"memcpy": copy}
    for name, engine in engines.items():
        ways[name] = lambda engine=engine: engine.update_weights(trainer.export_weights())
    syncs = in_turns(ways, repeats)
    median = {way: statistics.median(runs) for way, runs in syncs.items()}
    result |= {f"{way}_gb_per_s": round(size / seconds / 1e9, 2) for way, seconds in median.items()}
    result |= {f"{way}_over_memcpy": round(median["memcpy"] / median[way], 3) for way in engines}
    result |= {f"{way}_extra_mib": extra_mib(ways[way]) for way in engines}
    engines.pop("vllm_beside").close()
    engines.pop("hf").close()

    prompts = make_prompts()
    generates = in_turns({"vllm": plain_vllm(path, prompts), "adaptor": engine_generates(here, prompts)}, repeats)
    speed = {way: statistics.median(runs) for way, runs in generates.items()}
    result["adaptor_over_vllm"] = round(speed["adaptor"] / speed["vllm"], 3)
    result["adaptor_tokens_per_second"] = round(ROWS * TOKENS / speed["adaptor"], 1)
    return result, {"sync_seconds": syncs, "generate_seconds": generates, "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, at least 5 (default: 7)")
    options = parser.parse_args()
    if options.repeats < 5:
        parser.error("--repeats: a median of fewer than 5 runs says little")
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_random_model(LlamaConfig(**CONFIG), Path(folder) / "m100", seed=0))
        result, details = measure(path, options.repeats)
    result["within_limits"] = all(result[name] >= limit for name, limit in LIMITS.items()) and all(
        result[name] <= limit for name, limit in CEILINGS.items()
    )
    for key, value in result.items():
        print(f"{key:32} {value}")
    if options.json:
        details |= {"rows": ROWS, "tokens": TOKENS, "repeats": options.repeats, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({**result, **LIMITS_TOLD, **details, **environment()}, indent=2) + "\n")
    sys.exit(0 if result["within_limits"] else 1)


LIMITS_TOLD = {f"{name}_limit": limit for name, limit in {**LIMITS, **CEILINGS}.items()}

if __name__ == "__main__":
    main()
