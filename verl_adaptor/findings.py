"""What is found wrong, or well, before anything loads: records, and the rules that make them.

A rule is one small function: it is handed what is known, and yields a fact and its cure for each thing that would go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One fact, how bad it is, and its cure."""

    id: str
    """Of the rule that found it."""
    severity: Severity
    """``error``: the run would fail or be wrong, and is refused."""
    fact: str
    """What was given or seen, and what is allowed."""
    cure: str = ""
    """What to do; empty where nothing need be done."""
    reports: tuple[str, ...] = ()
    """Numbers of the reports it comes from, as docs/cases.md lists them: ``C29``."""

    def __str__(self) -> str:
        return f"{self.fact}; {self.cure}." if self.cure else f"{self.fact}."


Look = Callable[..., Iterable[tuple[str, str]]]


@dataclass(frozen=True)
class Rule:
    """What makes findings of one kind.

    Args:
        look: yields ``(fact, cure)`` for each problem: two half-sentences, without a full stop.
        severity: of all its findings.
        reports: where it comes from.
    """

    look: Look
    severity: Severity = "error"
    reports: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The function's name, with hyphens."""
        return str(self.look.__name__).replace("_", "-")

    def __call__(self, *facts: Any) -> Iterator[Finding]:
        """The findings; `facts` are the function's arguments."""
        for fact, cure in self.look(*facts):
            yield Finding(self.id, self.severity, fact, cure, self.reports)


def rule(*reports: str, severity: Severity = "error") -> Callable[[Look], Rule]:
    """Make a function a `Rule`.

    >>> @rule("C14")
    ... def enough_cpus(wanted, there):
    ...     if wanted > there:
    ...         yield f"{wanted} CPUs are asked for and there are {there}", "lower cpus_per_worker"
    >>> [finding] = enough_cpus(4, 2)
    >>> finding.id, str(finding)
    ('enough-cpus', '4 CPUs are asked for and there are 2; lower cpus_per_worker.')
    """

    def made(look: Look) -> Rule:
        found = Rule(look, severity, reports)
        object.__setattr__(found, "__doc__", look.__doc__)
        return found

    return made
