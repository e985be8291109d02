"""What would fail late fails here, with the cure: rules as small pure functions, run before any framework is imported.

A rule (`findings.Rule`) about one backend is handed `Facts`. Rules about one framework live in its backend and are named in
its spec (`BackendSpec.preflight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_adaptor.capabilities import BackendSpec, Role
from verl_adaptor.errors import BrokenPlugin, ConfigError
from verl_adaptor.findings import Finding, Rule, rule
from verl_adaptor.preflight.parallel import parallel_size_divides, sequence_parallel_has_ranks

if TYPE_CHECKING:  # a listing looks at versions only, and need not wait for the configs
    from verl_adaptor.config import Config, EngineConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known before anything loads."""

    role: Role
    config: EngineConfig | TrainerConfig
    options: Config | None = None
    """The backend's own options."""
    model: Mapping[str, Any] | None = None
    """The model's ``config.json``; None for a hub id or a model that does not exist yet."""


RULES: Sequence[Rule] = (sequence_parallel_has_ranks, parallel_size_divides)
"""What holds for every framework."""


def examine(spec: BackendSpec, facts: Facts) -> list[Finding]:
    """What all rules find, the spec's own last.

    Raises:
        BrokenPlugin: the spec names something else than rules.
    """
    if others := [its for its in spec.preflight if not isinstance(its, Rule)]:
        raise BrokenPlugin(
            f"backend {spec.name!r}: {others[0]!r} in its preflight is no rule; decorate it with "
            "verl_adaptor.preflight.rule and let it yield (fact, cure)."
        )
    return [finding for its in (*RULES, *spec.preflight) for finding in its(facts)]


def check(spec: BackendSpec, facts: Facts) -> None:
    """Run all rules. Raises `ConfigError` with every error found."""
    refuse(examine(spec, facts))


def refuse(findings: Iterable[Finding]) -> None:
    """Raise `ConfigError` with the errors among these, a line each."""
    errors = tuple(finding for finding in findings if finding.severity == "error")
    if errors:
        raise ConfigError("\n".join(map(str, errors)), findings=errors)


__all__ = ["RULES", "Facts", "Finding", "Rule", "check", "examine", "refuse", "rule"]
