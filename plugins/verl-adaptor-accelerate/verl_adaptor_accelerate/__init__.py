"""What the backend ``accelerate`` is and can do. Runs at discovery: nothing heavy is imported here."""

from __future__ import annotations

from verl_adaptor import BackendSpec, hookimpl
from verl_adaptor.capabilities import FULL, Capability, unsupported

_WHOLE = unsupported("every rank holds the whole model")


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``accelerate`` backend."""
    return [
        BackendSpec(
            name="accelerate",
            summary="Hugging Face accelerate, the whole model on every rank",
            trainer="verl_adaptor_accelerate.trainer:AccelerateTrainer",
            distribution="accelerate",
            version_range=">=1.10,<2",
            install="pip install 'accelerate>=1.10,<2'",
            gradient_syncs=("ddp",),
            process_effects=("accelerate's own state, and torch.distributed, stay until the process ends",),
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
                Capability.TENSOR_PARALLEL: _WHOLE,
                Capability.PIPELINE_PARALLEL: _WHOLE,
                Capability.SEQUENCE_PARALLEL: _WHOLE,
                Capability.CONTEXT_PARALLEL: _WHOLE,
                Capability.EXPERT_PARALLEL: _WHOLE,
            },
        )
    ]
