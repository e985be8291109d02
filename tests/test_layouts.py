"""Every law for trainers, for every backend and layout, on ranks of their own.

`make test` checks the laws that stand beside each of LAYOUTS: the update on all, the rest where a layout brings code of its
own. `make test-all` checks every law on all of the grid.
"""

from typing import Any

import pytest

from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.laws import LAWS

TWO, TENSOR, PIPELINE = {"data_parallel_size": 2}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}

UPDATE = ("one_update_is_the_same_update",)
CORE = (
    "log_probs_are_the_oracles",
    *UPDATE,
    "bf16_stays_near",
    "a_critic_makes_the_same_update",
    "exported_is_what_was_loaded",
    "resume_is_exact",
    "a_nan_never_reaches_the_weights",
)
FAILURE = "a_failing_loss_leaves_no_trace"
REST = tuple(law.name for law in LAWS if law.name not in (*CORE, FAILURE))
"""On one rank: what the same backend's ranks do not check."""

LAYOUTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "FSDPAlone": ("fsdp", {}, REST),
    "ZeroAlone": ("zero", {}, REST),
    "MegatronAlone": ("megatron", {}, REST),
    "HFDDP": ("hf", TWO, (*CORE, FAILURE)),
    "HFManual": ("hf", {**TWO, "gradient_sync": "manual"}, UPDATE),
    "FSDP": ("fsdp", TWO, (*CORE, FAILURE)),
    "FSDPTP": ("fsdp", TENSOR, CORE),
    "FSDPCP": ("fsdp", {"context_parallel_size": 2}, CORE),
    "FSDPTPSP": ("fsdp", SEQUENCE, UPDATE),
    "FSDPTPxDP": ("fsdp", {**TENSOR, **TWO}, UPDATE),
    "FSDPHybrid": ("fsdp", {"data_parallel_size": 4, "shard_size": 2}, UPDATE),
    "Zero1": ("zero", {**TWO, "zero_stage": 1}, UPDATE),
    "Zero2": ("zero", {**TWO, "zero_stage": 2}, CORE),
    "Zero3": ("zero", {**TWO, "zero_stage": 3}, (*CORE, FAILURE)),
    "MegatronTP": ("megatron", TENSOR, CORE),
    "MegatronTPSP": ("megatron", SEQUENCE, CORE),
    "MegatronPP": ("megatron", PIPELINE, (*CORE, FAILURE)),
    "MegatronTPxPP": ("megatron", {**TENSOR, **PIPELINE}, UPDATE),
    "MegatronTPxDP": ("megatron", {**TENSOR, **TWO, "zero_stage": 1}, UPDATE),
}
"""Backend, layout, and the laws that `make test` checks on it."""
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
    "MegatronMixtralTPSP": ("megatron", SEQUENCE, {"family": "mixtral"}),
    "MegatronMixtralEP": ("megatron", {**TWO, "expert_parallel_size": 2}, {"family": "mixtral"}),
}
"""Backend, layout, and which model."""


def suite(backend: str, settings: dict[str, Any], **model: Any) -> type:
    return conformance_suite(backend, trainer_settings=settings, roles=("training",), **model)


for name, (backend, settings, laws) in LAYOUTS.items():
    made = suite(backend, settings)
    for test in [attribute for attribute in vars(made) if attribute.startswith("test_")]:
        if test.split("_", 2)[2] not in laws:
            setattr(made, test, pytest.mark.slow(getattr(made, test)))
    globals()[f"Test{name}"] = made
for name, (backend, settings, model) in MORE.items():
    globals()[f"Test{name}"] = pytest.mark.slow(suite(backend, settings, **model))
