"""DeepSpeed ZeRO: optimizer state, gradients and weights sharded over the data-parallel ranks (arXiv 1910.02054)."""

from __future__ import annotations

from verl_adaptor.backends.zero import rules
from verl_adaptor.backends.zero.options import DEFAULT_STAGE
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, unsupported
from verl_adaptor.hookspecs import hookimpl


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``zero`` backend."""
    return [
        BackendSpec(
            name="zero",
            aliases=("deepspeed",),
            summary="DeepSpeed ZeRO 0-3 on a transformers model, with offload to host memory",
            trainer="verl_adaptor.backends.zero.trainer:ZeroTrainer",
            distribution="deepspeed",
            version_range=">=0.19.8,<0.20",
            install="DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed>=0.19.8,<0.20'",
            trainer_options="verl_adaptor.backends.zero.options:ZeroOptions",
            default_zero_stage=DEFAULT_STAGE,
            zero_stages=(0, 1, 2, 3),
            gradient_syncs=("zero",),
            preflight=(rules.offload_has_a_stage,),
            process_effects=(
                "torch.distributed is initialised, also for one rank, until the process ends",
                "DeepSpeed's accelerator (CUDA or CPU) is chosen once a process",
                "DeepSpeed's log goes to the root logger",
            ),
            capabilities={
                Capability.VALUE_HEAD: FULL,
                Capability.PACKING: FULL,
                Capability.TOKEN_BUDGET: FULL,
                Capability.ACTIVATION_CHECKPOINTING: FULL,
                Capability.BF16: FULL,
                Capability.EXACT_RESUME: FULL,
                Capability.SAVE_PRETRAINED: FULL,
                Capability.DATA_PARALLEL: FULL,
                Capability.CONTEXT_PARALLEL: FULL,
                Capability.LORA: FULL,
                Capability.OFFLOAD: FULL,
                Capability.REFERENCE: FULL,
                Capability.ROLLOUT_ENGINE: FULL,
                Capability.TENSOR_PARALLEL: unsupported("ZeRO shards over data-parallel ranks; layers run whole"),
                Capability.PIPELINE_PARALLEL: unsupported(
                    "DeepSpeed pipelines a list of layers, not a transformers model"
                ),
                Capability.SEQUENCE_PARALLEL: unsupported("it goes with tensor parallelism"),
                Capability.EXPERT_PARALLEL: unsupported("ZeRO shards experts like any other weight"),
            },
        )
    ]
