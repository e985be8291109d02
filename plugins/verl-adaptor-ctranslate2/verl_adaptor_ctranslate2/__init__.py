"""What the backend ``ctranslate2`` is and can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_adaptor import BackendSpec, hookimpl
from verl_adaptor.capabilities import FULL, Capability, unsupported
from verl_adaptor.preflight import rule

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type`` whose conversion was measured to keep every law. With transformers 5 the converter fails on others."""


@rule()
def converted_architecture(facts: Any) -> Iterator[tuple[str, str]]:
    """A model that CTranslate2 converts without a change of its log-probs."""
    kind = (facts.model or {}).get("model_type")
    if facts.model is not None and kind not in MODEL_TYPES:
        yield (
            f"ctranslate2 was not measured with model_type={kind!r}, only with {', '.join(MODEL_TYPES)}",
            "take another backend",
        )


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``ctranslate2`` backend."""
    return [
        BackendSpec(
            name="ctranslate2",
            summary="CTranslate2, a C++ engine",
            engine="verl_adaptor_ctranslate2.engine:CTranslate2Engine",
            distribution="ctranslate2",
            version_range=">=4.8,<4.9",
            install="pip install 'ctranslate2>=4.8,<4.9'",
            preflight=(converted_architecture,),
            capabilities={
                Capability.STREAM: FULL,
                Capability.ABORT: FULL,
                Capability.SCORE: FULL,
                Capability.UPDATE_WEIGHTS: FULL,
                Capability.IN_FLIGHT_KEEP: FULL,
                Capability.SLEEP: FULL,
                Capability.PENALTIES: unsupported("it samples from the policy alone"),
                Capability.ADAPTER_SYNC: unsupported("the whole model is converted anew for each update"),
                Capability.SERVE: unsupported("it has no server"),
            },
        )
    ]
