"""``verl-adaptor serve PATH [key=value ...] [--host HOST] [--port PORT]``."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from verl_adaptor.capabilities import BackendSpec, Capability, SupportLevel
from verl_adaptor.cli import running
from verl_adaptor.cli.recipes import apply_override
from verl_adaptor.errors import UnsupportedCapability
from verl_adaptor.factory import resolve_engine
from verl_adaptor.registry import registry

CHECK_S = 0.5
"""Between two looks at whether the engine still serves."""


def serve(path: str, overrides: Sequence[str], *, host: str, port: int) -> None:
    """Start an engine and serve it over HTTP until SIGINT or SIGTERM.

    Raises:
        UnsupportedCapability: the backend has no server.
        EngineError: the engine died while it served.
    """
    settings: dict[str, Any] = {"mode": "async"}
    for override in overrides:
        apply_override(settings, override)
    plan = resolve_engine(path, settings.pop("backend", None) or _default(), **settings)
    _check(plan.spec)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with plan.create() as engine, engine.serving(host, port) as served, running():
            typer.echo(f"{path} is served at {served.url}/v1")
            typer.echo(f"its version: GET {served.url}/policy_version; new weights: POST {served.url}/update_weights")
            while True:
                time.sleep(CHECK_S)
                served.check()
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _able() -> list[str]:
    return registry().supporting(Capability.SERVE, "inference")


def _default() -> str:
    """The first backend that has a server."""
    return next((name.split()[0] for name in _able()), "hf")


def _check(spec: BackendSpec) -> None:
    support = spec.support(Capability.SERVE)
    if not support and support.level != SupportLevel.ONLY:
        raise UnsupportedCapability(
            f"backend {spec.name!r} cannot serve over HTTP (serve is {support}); backends that have it: "
            f"{', '.join(_able()) or 'none'}."
        )
