"""Every law for trainers, for every backend and layout, on ranks of their own."""

from typing import Any

import pytest

from verl_adaptor.testing import conformance_suite

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "HFDDP": ("hf", {"data_parallel_size": 2}),
    "HFManual": ("hf", {"data_parallel_size": 2, "gradient_sync": "manual"}),
    "FSDP": ("fsdp", {"data_parallel_size": 2}),
    "FSDPTP": ("fsdp", {"tensor_parallel_size": 2}),
    "FSDPTPSP": ("fsdp", {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "FSDPTPxDP": ("fsdp", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "FSDPHybrid": ("fsdp", {"data_parallel_size": 4, "shard_size": 2}),
    "Zero1": ("zero", {"data_parallel_size": 2, "zero_stage": 1}),
    "Zero2": ("zero", {"data_parallel_size": 2, "zero_stage": 2}),
    "Zero3": ("zero", {"data_parallel_size": 2, "zero_stage": 3}),
    "MegatronTP": ("megatron", {"tensor_parallel_size": 2}),
    "MegatronTPSP": ("megatron", {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "MegatronPP": ("megatron", {"pipeline_parallel_size": 2}),
    "MegatronTPxPP": ("megatron", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "MegatronTPxDP": ("megatron", {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1}),
}
"""The layouts that every change is tested with."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDPTP2xDP2SP": ("fsdp", {"tensor_parallel_size": 2, "data_parallel_size": 2, "sequence_parallel": True}),
    "Zero0": ("zero", {"data_parallel_size": 2, "zero_stage": 0}),
}
"""More of the grid, for `make test-all`."""
FAMILIES = ("qwen2", "qwen3", "mistral")
"""Checked on some layouts, for `make test-all`."""


def suite(backend: str, settings: dict[str, Any], **more: Any) -> type:
    return conformance_suite(backend, trainer_settings=settings, roles=("training",), **more)


for name, (backend, settings) in LAYOUTS.items():
    globals()[f"Test{name}"] = suite(backend, settings)
for name, (backend, settings) in MORE.items():
    globals()[f"Test{name}"] = pytest.mark.slow(suite(backend, settings))
