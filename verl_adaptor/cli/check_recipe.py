"""``verl-adaptor check RECIPE``: what would go wrong with this recipe, on this machine, before anything loads."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl_adaptor import errors
from verl_adaptor.cli.doctor import MACHINE
from verl_adaptor.cli.findings import show
from verl_adaptor.cli.memory import estimate, memory_findings
from verl_adaptor.cli.plan import Plans, Sections, check_room, fits_together, plan_sections
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.config import Recipe
from verl_adaptor.data import open_prompts
from verl_adaptor.errors import ConfigError, VerlAdaptorError
from verl_adaptor.execution import WorkerPool
from verl_adaptor.findings import Finding
from verl_adaptor.tokenizer import load_tokenizer

REPORTS: dict[type[VerlAdaptorError], tuple[str, ...]] = {
    errors.UnknownKey: ("C09",),
    errors.UnknownBackend: ("C32",),
    errors.BackendNotInstalled: ("C01",),
    errors.BackendVersionError: ("C01",),
    errors.UnsupportedCapability: ("C31",),
    errors.BrokenPlugin: ("C33",),
}
"""The reports that these errors come from."""


def check_recipe(recipe: Path, overrides: Sequence[str], *, as_json: bool) -> bool:
    """Print all findings; True if none is an error."""
    sys.path.insert(0, str(Path.cwd()))  # as train does
    return show(examine_recipe(recipe, overrides), as_json=as_json, recipe=str(recipe), settings=list(overrides))


def examine_recipe(path: Path, overrides: Sequence[str] = ()) -> list[Finding]:
    """All findings: about the settings, each section against its backend, all against each other, the data, the machine."""
    try:
        recipe = load_recipe(path, overrides)
    except ConfigError as error:
        return [*findings_of("", error), *_machine()]
    sections = Sections()
    plans = plan_sections(recipe, sections)
    sections.attempt("data", lambda: _look_at_prompts(recipe, plans))
    found = [] if plans is None else fits_together(recipe, plans)
    if plans is not None:
        with WorkerPool() as workers:
            found += _attempt("enough-cpus", lambda: check_room(recipe, plans, workers), "C14")
        if (model := recipe.model.path) is not None and not sections.errors and not found:
            found += sections.attempt("model", lambda: _memory(recipe, plans, model)) or []
    told = [finding for section, error in sections.errors for finding in findings_of(section, error)]
    parts = ", ".join(["engine", *(section for section, _ in plans.trainers())]) if plans else ""
    is_well = plans is not None and not told and all(finding.severity == "ok" for finding in found)
    well = [Finding("recipe", "ok", f"{path}: {parts} fit together")] if is_well else []
    return [*told, *found, *well, *_machine()]


def findings_of(section: str, error: VerlAdaptorError) -> Iterator[Finding]:
    """An error's findings: those that a rule made, else one for each of its sentences, by the kind of error."""
    where = f"{section}: " if section else ""
    if isinstance(error, ConfigError) and error.findings:
        for its in error.findings:
            yield Finding(its.id, its.severity, where + its.fact, its.cure, its.reports)
        return
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower()
    for line in str(error).splitlines():
        sentence = line.rstrip(".")
        fact, _, cure = sentence.rpartition("; ")
        if not fact:  # pydantic's, which say what is allowed
            fact, _, cure = sentence.partition(": ")
        yield Finding(name, "error", where + fact, cure, REPORTS.get(type(error), ()))


def _attempt(id: str, work: Callable[[], None], *reports: str) -> list[Finding]:
    try:
        work()
    except ConfigError as error:
        fact, _, cure = str(error).rstrip(".").partition("; ")
        return [Finding(id, "error", fact, cure, reports)]
    return []


def _look_at_prompts(recipe: Recipe, plans: Plans | None) -> None:
    """The first prompt can be read and is short enough, where that can be known: no stream is touched."""
    if recipe.model.path is None or recipe.data.streams or plans is None:
        return
    prompts, _ = open_prompts(
        recipe.data,
        load_tokenizer(recipe.model.path),
        seed=recipe.seed,
        held_out=recipe.evaluation.prompts,
        task=plans.task,
    )
    try:
        next(prompts)
    finally:
        prompts.close()


def _memory(recipe: Recipe, plans: Plans, path: str) -> list[Finding]:
    """What the run will take, and whether there is as much; of a model that is still to be built nothing is known."""
    processes = estimate(recipe, plans, path)
    return [
        *(Finding("memory-of-process", "ok", str(process), reports=("C25",)) for process in processes),
        *memory_findings(processes),
    ]


def _machine() -> list[Finding]:
    """What `doctor` has to say about this machine, but for what is well."""
    return [finding for look in MACHINE for finding in look() if finding.severity != "ok"]
