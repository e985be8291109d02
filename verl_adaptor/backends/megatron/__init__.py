"""Megatron-Core: GPT models over tensor, pipeline, sequence, expert and data parallel ranks."""

from __future__ import annotations

from verl_adaptor.backends.megatron.rules import RULES
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, only, unsupported
from verl_adaptor.hookspecs import hookimpl

SPEC = BackendSpec(
    name="megatron",
    aliases=("megatron-core",),
    summary="Megatron-Core, all parallel strategies, Llama, Qwen and Mistral families",
    engine="verl_adaptor.backends.megatron.engine:MegatronEngine",
    trainer="verl_adaptor.backends.megatron.trainer:MegatronTrainer",
    distribution="megatron-core",
    version_range=">=0.16,<0.17",
    install="pip install 'megatron-core>=0.16,<0.17'",
    trainer_options="verl_adaptor.backends.megatron.options:MegatronTrainerOptions",
    capabilities={
        Capability.STREAM: FULL,
        Capability.ABORT: FULL,
        Capability.SCORE: FULL,
        Capability.UPDATE_WEIGHTS: FULL,
        Capability.IN_FLIGHT_KEEP: FULL,
        Capability.PENALTIES: FULL,
        Capability.ADAPTER_SYNC: unsupported("weights come whole here, adapters merged"),
        Capability.SERVE: unsupported("it has no server of its own; serve the model with backend='vllm'"),
        Capability.SLEEP: unsupported("the shards of its ranks are their only copy; close the engine instead"),
        Capability.VALUE_HEAD: FULL,
        Capability.PACKING: FULL,
        Capability.TOKEN_BUDGET: FULL,
        Capability.ACTIVATION_CHECKPOINTING: FULL,
        Capability.BF16: FULL,
        Capability.EXACT_RESUME: FULL,
        Capability.SAVE_PRETRAINED: FULL,
        Capability.OFFLOAD: FULL,
        Capability.LORA: unsupported("peft wraps transformers' layers, not Megatron's"),
        Capability.REFERENCE: FULL,
        Capability.ROLLOUT_ENGINE: FULL,
        Capability.DATA_PARALLEL: only("training", "an engine's copies are its replicas"),
        Capability.TENSOR_PARALLEL: FULL,
        Capability.PIPELINE_PARALLEL: FULL,
        Capability.SEQUENCE_PARALLEL: FULL,
        Capability.EXPERT_PARALLEL: FULL,
        Capability.CONTEXT_PARALLEL: unsupported("Megatron's needs Transformer Engine, and is not measured"),
    },
    process_effects=(
        "torch.distributed is initialised, also for one rank, until the process ends",
        "torch.load(weights_only=True) may build some classes of megatron-core's checkpoints",
    ),
    zero_stages=(0, 1),
    gradient_syncs=("ddp",),
    preflight=RULES,
)


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``megatron`` backend."""
    return [SPEC]
