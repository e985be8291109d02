"""Every law for trainers, for every backend and layout, on ranks of their own.

`make test` checks the laws of CORE on LAYOUTS, and the update alone on COMBINED; `make test-all` checks every law on all
of the grid.
"""

from typing import Any

import pytest

from verl_adaptor.testing import conformance_suite

TWO, TENSOR, PIPELINE = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "HFDDP": ("hf", TWO),
    "HFManual": ("hf", {**TWO, "gradient_sync": "manual"}),
    "FSDP": ("fsdp", TWO),
    "FSDPTP": ("fsdp", TENSOR),
    "FSDPCP": ("fsdp", {"context_parallel_size": 2}),
    "Zero1": ("zero", {**TWO, "zero_stage": 1}),
    "Zero2": ("zero", {**TWO, "zero_stage": 2}),
    "Zero3": ("zero", {**TWO, "zero_stage": 3}),
    "MegatronTP": ("megatron", TENSOR),
    "MegatronTPSP": ("megatron", SEQUENCE),
    "MegatronPP": ("megatron", PIPELINE),
    "MegatronTPxPP": ("megatron", {**TENSOR, **PIPELINE}),
    "MegatronTPxDP": ("megatron", {**TENSOR, **TWO, "zero_stage": 1}),
}
COMBINED: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDPTPSP": ("fsdp", SEQUENCE),
    "FSDPTPxDP": ("fsdp", {**TENSOR, **TWO}),
    "FSDPHybrid": ("fsdp", {"data_parallel_size": 4, "shard_size": 2}),
}
HEART = ("one_update_is_the_same_update",)
CORE = (
    "log_probs_are_the_oracles",
    *HEART,
    "bf16_stays_near",
    "a_critic_makes_the_same_update",
    "exported_is_what_was_loaded",
    "resume_is_exact",
    "a_nan_never_reaches_the_weights",
)
MORE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "FSDPTPSPxDP": ("fsdp", {**SEQUENCE, **TWO}, {}),
    "FSDPCPxDP": ("fsdp", {**TWO, "context_parallel_size": 2}, {}),
    "FSDPQwen2TP": ("fsdp", TENSOR, {"family": "qwen2"}),
    "FSDPMixtral": ("fsdp", TWO, {"family": "mixtral"}),
    "Zero0": ("zero", {**TWO, "zero_stage": 0}, {}),
    "ZeroCP": ("zero", {"context_parallel_size": 2}, {}),
    "Zero3Qwen2": ("zero", {**TWO, "zero_stage": 3}, {"family": "qwen2"}),
    "MegatronInterleaved": (
        "megatron",
        {**PIPELINE, "virtual_pipeline_parallel_size": 2},
        {"model": {"num_hidden_layers": 4}},
    ),
    "MegatronQwen2PP": ("megatron", PIPELINE, {"family": "qwen2"}),
    "MegatronQwen3TP": ("megatron", TENSOR, {"family": "qwen3"}),
    "MegatronMixtralEP": ("megatron", {**TWO, "expert_parallel_size": 2}, {"family": "mixtral"}),
}
"""Backend, layout, and which model."""


def suite(backend: str, settings: dict[str, Any], **model: Any) -> type:
    return conformance_suite(backend, trainer_settings=settings, roles=("training",), **model)


for name, (backend, settings) in (LAYOUTS | COMBINED).items():
    made = suite(backend, settings)
    for test in [attribute for attribute in vars(made) if attribute.startswith("test_")]:
        if test.split("_", 2)[2] not in (CORE if name in LAYOUTS else HEART):
            setattr(made, test, pytest.mark.slow(getattr(made, test)))
    globals()[f"Test{name}"] = made
for name, (backend, settings, model) in MORE.items():
    globals()[f"Test{name}"] = pytest.mark.slow(suite(backend, settings, **model))
