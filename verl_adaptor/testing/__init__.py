"""The conformance suite: the laws of docs/behaviour.md as tests, for any backend, in one line.

from verl_adaptor.testing import conformance_suite

TestMine = conformance_suite("mine")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_adaptor.testing.suite import conformance_suite

__all__ = ["conformance_suite"]


def __getattr__(name: str) -> Any:
    """Import the suite, and pytest with it, at first use: the model makers beside it need neither."""
    if name == "conformance_suite":
        from verl_adaptor.testing.suite import conformance_suite

        return conformance_suite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
