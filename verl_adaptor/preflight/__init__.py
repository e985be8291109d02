"""What would fail late fails here, with the cure: rules as small pure functions, run before any framework is imported.

A rule is handed `Facts` and returns sentences, one a problem: what was given, what is allowed, what to do. Rules about
one framework live in its backend and are named in its spec (`BackendSpec.preflight`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_adaptor.capabilities import BackendSpec, Role
from verl_adaptor.errors import ConfigError
from verl_adaptor.preflight.parallel import divisible, sequence_parallel_has_ranks

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


Rule = Callable[[Facts], Iterable[str]]

RULES: Sequence[Rule] = (
    lambda facts: sequence_parallel_has_ranks(facts.config.parallel),
    lambda facts: divisible(facts.model, facts.config.parallel) if facts.model else (),
)
"""What holds for every framework."""


def check(spec: BackendSpec, facts: Facts) -> None:
    """Run all rules, the spec's own last. Raises `ConfigError` with every problem found."""
    problems = [problem for rule in (*RULES, *spec.preflight) for problem in rule(facts)]
    if problems:
        raise ConfigError("\n".join(problems))


__all__ = ["RULES", "Facts", "Rule", "check"]
