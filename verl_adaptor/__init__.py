"""One argument swaps the framework under an RL post-training loop.

>>> from verl_adaptor import create_inference_engine, create_trainer_backend

The public names are imported at first use: ``import verl_adaptor`` itself loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_adaptor.capabilities import BackendSpec, Capability, Support
    from verl_adaptor.errors import VerlAdaptorError
    from verl_adaptor.factory import create_inference_engine, create_trainer_backend, resolve_engine, resolve_trainer
    from verl_adaptor.hookspecs import hookimpl
    from verl_adaptor.protocols import InferenceEngine, TrainerBackend
    from verl_adaptor.registry import register
    from verl_adaptor.samples import Completion, Delta, Prompt, SamplingParams, Trajectory, WeightUpdate

__all__ = [
    "BackendSpec",
    "Capability",
    "Completion",
    "Delta",
    "InferenceEngine",
    "Prompt",
    "SamplingParams",
    "Support",
    "TrainerBackend",
    "Trajectory",
    "VerlAdaptorError",
    "WeightUpdate",
    "__version__",
    "create_inference_engine",
    "create_trainer_backend",
    "hookimpl",
    "register",
    "resolve_engine",
    "resolve_trainer",
]

__version__: str

_HOMES = {
    "capabilities": ("BackendSpec", "Capability", "Support"),
    "errors": ("VerlAdaptorError",),
    "factory": ("create_inference_engine", "create_trainer_backend", "resolve_engine", "resolve_trainer"),
    "hookspecs": ("hookimpl",),
    "protocols": ("InferenceEngine", "TrainerBackend"),
    "registry": ("register",),
    "samples": ("Completion", "Delta", "Prompt", "SamplingParams", "Trajectory", "WeightUpdate"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, and keep it."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("verl-adaptor")
    elif name in _HOME_OF:
        value = getattr(importlib.import_module(f"verl_adaptor.{_HOME_OF[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)
