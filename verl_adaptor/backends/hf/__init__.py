"""transformers, whole on every rank: the reference backend, and the one that needs nothing else installed."""

from __future__ import annotations

from verl_adaptor.capabilities import FULL, BackendSpec, Capability, only, unsupported
from verl_adaptor.hookspecs import hookimpl

_WHOLE = unsupported("every rank holds the whole model")


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``hf`` backend."""
    return [
        BackendSpec(
            name="hf",
            aliases=("transformers",),
            summary="transformers, the whole model on every rank, any causal LM",
            engine="verl_adaptor.backends.hf.engine:HFEngine",
            trainer="verl_adaptor.backends.hf.trainer:HFTrainer",
            distribution="transformers",
            version_range=">=5.5,<5.26",
            install="pip install 'transformers>=5.5,<5.26'",
            gradient_syncs=("ddp", "manual"),
            capabilities={
                Capability.STREAM: FULL,
                Capability.ABORT: FULL,
                Capability.SCORE: FULL,
                Capability.UPDATE_WEIGHTS: FULL,
                Capability.IN_FLIGHT_KEEP: FULL,
                Capability.PENALTIES: FULL,
                Capability.ADAPTER_SYNC: unsupported("weights come whole here, adapters merged"),
                Capability.SERVE: unsupported("it has no server of its own; serve the model with backend='vllm'"),
                Capability.SLEEP: unsupported(
                    "the weights of this process are its only copy; close the engine instead"
                ),
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
                Capability.DATA_PARALLEL: only("training", "an engine's copies are its replicas"),
                Capability.TENSOR_PARALLEL: _WHOLE,
                Capability.PIPELINE_PARALLEL: _WHOLE,
                Capability.SEQUENCE_PARALLEL: _WHOLE,
                Capability.CONTEXT_PARALLEL: _WHOLE,
                Capability.EXPERT_PARALLEL: _WHOLE,
            },
        )
    ]
