"""PyTorch FSDP2: weights, gradients and optimizer state in shards, with tensor and sequence parallelism as one mesh."""

from __future__ import annotations

from verl_adaptor.backends.fsdp import rules
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, unsupported
from verl_adaptor.hookspecs import hookimpl


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``fsdp`` backend."""
    return [
        BackendSpec(
            name="fsdp",
            aliases=("fsdp2",),
            summary="PyTorch FSDP2 (fully_shard, HSDP) with tensor and sequence parallelism",
            trainer="verl_adaptor.backends.fsdp.trainer:FSDPTrainer",
            trainer_options="verl_adaptor.backends.fsdp.options:FSDPOptions",
            distribution="torch",
            version_range=">=2.9,<2.14",
            install="pip install 'torch>=2.9,<2.14'",
            default_zero_stage=3,
            zero_stages=(2, 3),
            gradient_syncs=("fsdp",),
            preflight=(
                rules.fsdp_version,
                rules.shard_size,
                rules.one_answer_on_resharding,
                rules.tensor_parallel,
            ),
            process_effects=("torch.distributed stays initialised until the process ends",),
            capabilities={
                Capability.VALUE_HEAD: FULL,
                Capability.PACKING: FULL,
                Capability.TOKEN_BUDGET: FULL,
                Capability.ACTIVATION_CHECKPOINTING: FULL,
                Capability.BF16: FULL,
                Capability.EXACT_RESUME: FULL,
                Capability.SAVE_PRETRAINED: FULL,
                Capability.OFFLOAD: FULL,
                Capability.LORA: FULL,
                Capability.REFERENCE: FULL,
                Capability.ROLLOUT_ENGINE: FULL,
                Capability.DATA_PARALLEL: FULL,
                Capability.TENSOR_PARALLEL: FULL,
                Capability.SEQUENCE_PARALLEL: FULL,
                Capability.CONTEXT_PARALLEL: FULL,
                Capability.PIPELINE_PARALLEL: unsupported("each rank runs all layers, in shards"),
                Capability.EXPERT_PARALLEL: unsupported("experts are sharded like every other weight"),
            },
        )
    ]
