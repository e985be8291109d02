"""What the backend ``template`` is and can do. Runs at discovery: nothing heavy is imported here."""

from __future__ import annotations

from verl_adaptor import BackendSpec, hookimpl
from verl_adaptor.capabilities import FULL, Capability, unsupported


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The backends that this distribution offers."""
    return [
        BackendSpec(
            name="template",
            summary="a whole forward for each token, with transformers",
            engine="verl_adaptor_template.engine:TemplateEngine",
            # your framework's distribution, and the versions of it that this was measured with
            distribution="transformers",
            version_range=">=5.5,<5.20",
            install="pip install 'transformers>=5.5,<5.20'",
            # what is not declared counts as unsupported, and is refused with a sentence before anything loads
            capabilities={
                Capability.STREAM: FULL,
                Capability.ABORT: FULL,
                Capability.SCORE: FULL,
                Capability.UPDATE_WEIGHTS: FULL,
                Capability.IN_FLIGHT_KEEP: FULL,
                Capability.PENALTIES: unsupported("it samples from the policy alone"),
            },
        )
    ]
