"""What the backend ``openai`` is and can do. Runs at discovery: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_adaptor import BackendSpec, hookimpl
from verl_adaptor.capabilities import FULL, Capability, unsupported
from verl_adaptor.preflight import rule

_SERVERS_OWN = ("dtype", "device", "max_prefill_tokens", "mode", "replicas")


@rule()
def a_server_is_named(facts: Any) -> Iterator[tuple[str, str]]:
    """There is nothing to talk to without an address."""
    if facts.options is not None and facts.options.base_url is None:
        yield (
            "base_url is not set, the address of an OpenAI-compatible server",
            "set it, e.g. base_url='http://127.0.0.1:8000' (verl-adaptor check openai engine.base_url=http://127.0.0.1:8000)",
        )


@rule()
def what_the_server_decides(facts: Any) -> Iterator[tuple[str, str]]:
    """Settings of a model that this process loads are nobody's here."""
    for name in _SERVERS_OWN:
        value, default = getattr(facts.config, name), type(facts.config).model_fields[name].default
        if value != default:
            yield f"{name}={value!r} is for the server to choose", "leave it out, and start the server with it"


@hookimpl
def verl_adaptor_backends() -> list[BackendSpec]:
    """The ``openai`` backend: what vLLM's server has when it is started as the README says. An engine narrows it to its own."""
    return [
        BackendSpec(
            name="openai",
            summary="an OpenAI-compatible server that runs already, such as vLLM's",
            engine="verl_adaptor_openai.engine:OpenAIEngine",
            engine_options="verl_adaptor_openai.options:OpenAIOptions",
            distribution="httpx",
            version_range=">=0.27,<1",
            install="pip install 'httpx>=0.27'",
            preflight=(a_server_is_named, what_the_server_decides),
            capabilities={
                Capability.STREAM: FULL,
                Capability.ABORT: FULL,
                Capability.SCORE: FULL,
                Capability.UPDATE_WEIGHTS: FULL,
                Capability.PENALTIES: FULL,
                Capability.IN_FLIGHT_KEEP: unsupported(
                    "a stream over HTTP does not say which of its tokens are of which policy"
                ),
                Capability.ADAPTER_SYNC: unsupported("weights reach the server as a folder of whole ones"),
                Capability.SLEEP: unsupported("the memory is the server's, for other clients too"),
                Capability.SERVE: unsupported("it is a client of a server"),
                Capability.TENSOR_PARALLEL: unsupported("the server is started with it"),
                Capability.PIPELINE_PARALLEL: unsupported("the server is started with it"),
                Capability.DATA_PARALLEL: unsupported("the server is started with it"),
            },
        )
    ]
