"""The laws as a registry: each a function of a `Bench`, with its number and what it needs.

A law raises AssertionError when it is broken. What it needs is a role and capabilities: the suite derives from the
BackendSpec whether to run it, to demand `UnsupportedCapability`, or to expect a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_adaptor.capabilities import Capability, Role
from verl_adaptor.testing.bench import Bench


@dataclass(frozen=True)
class Law:
    """One law, or one part of one."""

    number: str
    """``I1`` to ``P3``, as in docs/behaviour.md."""
    name: str
    roles: tuple[Role, ...]
    needs: tuple[Capability, ...]
    check: Callable[[Bench], None]
    refused: Callable[[Bench], None] | None = None
    """What must raise `UnsupportedCapability` where a needed capability is declared UNSUPPORTED."""


LAWS: list[Law] = []


def law(
    number: str,
    *roles: Role,
    needs: tuple[Capability, ...] = (),
    refused: Callable[[Bench], None] | None = None,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as (a part of) law `number` for backends that play all of `roles`."""

    def register(check: Callable[[Bench], None]) -> Callable[[Bench], None]:
        LAWS.append(Law(number, check.__name__, roles, needs, check, refused))
        return check

    return register
