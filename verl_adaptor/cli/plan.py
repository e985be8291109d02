"""From a recipe to checked plans: every section against its backend and against the others, before anything loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_adaptor.capabilities import Capability
from verl_adaptor.config import EngineConfig, Recipe, TrainerConfig
from verl_adaptor.config.recipe import TRAINERS_OWN
from verl_adaptor.errors import ConfigError, VerlAdaptorError
from verl_adaptor.execution import WorkerPool
from verl_adaptor.factory import Plan, resolve_engine, resolve_trainer
from verl_adaptor.objects import load_callable
from verl_adaptor.ppo.reward import Reward, load_reward
from verl_adaptor.ppo.rollout import Rollout, single_turn
from verl_adaptor.preflight import Finding, refuse
from verl_adaptor.preflight.recipe import batch_divides, hangs_are_told_apart
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.tasks import Task, load_task

TrainerPlan = Plan[TrainerBackend, TrainerConfig]
NO_ADAPTERS = dict.fromkeys(("lora_rank", "lora_alpha", "lora_target_modules"))
"""What a reference does not inherit from the actor: it is the model as it was."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plans:
    """All parts of a recipe, checked and not made yet: no model is loaded but a reward's, nothing is written."""

    engine: Plan[InferenceEngine, EngineConfig] | dict[str, Any]
    """Settings for `TrainerBackend.rollout_engine` where it is to run on the actor's own weights."""
    actor: TrainerPlan
    critic: TrainerPlan | None
    reference: TrainerPlan | None
    """A model of its own; None where there is none, or the actor's adapters, switched off, are enough."""
    reference_is_view: bool
    """Whether the actor is asked for it: `TrainerBackend.reference`."""
    task: Task | None
    reward: Reward
    rollout: Rollout

    def trainers(self) -> Iterator[tuple[str, TrainerPlan]]:
        """Those that there are, by their sections."""
        parts = {"trainer": self.actor, "critic": self.critic, "reference": self.reference}
        yield from ((section, part) for section, part in parts.items() if part is not None)

    def engine_ranks(self) -> EngineConfig | None:
        """What the engine asks of a `WorkerPool`."""
        return self.engine.ranks if isinstance(self.engine, Plan) else None  # type: ignore[return-value]


class Sections:
    """Tries one section after the other, so that what is wrong in all of them is told at once."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, VerlAdaptorError]] = []
        """What was wrong in which section."""

    def attempt(self, section: str, make: Callable[[], T]) -> T | None:
        """What `make` makes; None where it raises an error of ours."""
        try:
            return make()
        except VerlAdaptorError as error:
            if all(
                str(error) != str(known) for _, known in self.errors
            ):  # a critic inherits what is wrong in the trainer
                self.errors.append((section, error))
            return None

    def settle(self) -> None:
        """Raise what was wrong: the one error, or a `ConfigError` with the sentences of all."""
        if len(self.errors) == 1:
            raise self.errors[0][1]
        if self.errors:
            lines = [f"{section}: {line}" for section, error in self.errors for line in str(error).splitlines()]
            raise ConfigError("\n".join(lines))


def plan(recipe: Recipe) -> Plans:
    """Check every section against its backend, and all against each other.

    Raises:
        VerlAdaptorError: what `resolve_engine`, `resolve_trainer`, `load_reward` or `load_task` raise, where one section is
            wrong; else a `ConfigError` with all that is.
    """
    sections = Sections()
    plans = plan_sections(recipe, sections)
    sections.settle()
    assert plans is not None  # nothing was wrong
    refuse(fits_together(recipe, plans))
    return plans


def plan_sections(recipe: Recipe, sections: Sections) -> Plans | None:
    """All parts; None where `sections` has noted errors."""
    path, steps = recipe.model.path, recipe.ppo.optimizer_steps
    of_actor = steps - steps // recipe.ppo.total_steps * min(recipe.ppo.critic_warmup_steps, recipe.ppo.total_steps)

    def trainer(total_steps: int = steps, **settings: Any) -> TrainerPlan:
        return resolve_trainer(path, **{"seed": recipe.seed, "total_steps": total_steps, **recipe.trainer, **settings})

    def rollout() -> Rollout:
        function = recipe.rollout.function
        return single_turn if function is None else load_callable(function, key="rollout.function")

    actor = sections.attempt("trainer", lambda: trainer(max(1, of_actor)))
    engine = sections.attempt("engine", lambda: _engine(path, {"seed": recipe.seed, **recipe.engine}))
    critic = None
    if (its := recipe.critic) is not None:
        critic = sections.attempt("critic", lambda: trainer(**{**its, "head": "value"}))
    is_view, reference = False, None
    if actor is not None and recipe.ppo.kl.where != "none":
        has_view = actor.config.lora_rank is not None and bool(actor.spec.support(Capability.REFERENCE))
        is_view = has_view and not recipe.reference  # settings of its own ask for a model of its own
        frozen = {**NO_ADAPTERS, **recipe.reference, "trainable": False, "activation_checkpointing": False}
        reference = None if is_view else sections.attempt("reference", lambda: trainer(**frozen))
    task = None
    if (name := recipe.data.task) is not None:
        task = sections.attempt("data", lambda: load_task(name, recipe.data.args))
    reward = None
    if task is not None or name is None:
        reward = sections.attempt("reward", lambda: load_reward(recipe.reward, task))
    rolled = sections.attempt("rollout", rollout)
    if actor is None or engine is None or reward is None or rolled is None or sections.errors:
        return None
    return Plans(
        engine=engine,
        actor=actor,
        critic=critic,
        reference=reference,
        reference_is_view=is_view,
        task=task,
        reward=reward,
        rollout=rolled,
    )


def fits_together(recipe: Recipe, plans: Plans) -> list[Finding]:
    """What the rules about whole recipes find."""
    trained = {section: part.config for section, part in plans.trainers() if part.config.trainable}
    found = list(batch_divides(recipe.ppo, recipe.rollout, trained))
    if recipe.pipeline is not None and (ranks := plans.engine_ranks()) is not None:
        found += hangs_are_told_apart(recipe.pipeline, ranks.execution)
    return found


def check_room(recipe: Recipe, plans: Plans, workers: WorkerPool) -> None:
    """Raise `ConfigError` where the ranks of all parts do not fit this machine together (C14)."""
    trainers: Iterable[Any] = [ranks for _, part in plans.trainers() if (ranks := part.ranks)]
    ranks = plans.engine_ranks()
    engine = [ranks] if ranks is not None else []
    _, copies = engine_copies(recipe)
    workers.check(trainers if copies else [*trainers, *engine], engine * copies)


def engine_copies(recipe: Recipe) -> tuple[int, int]:
    """Number of the first engine's ranks, and how many engines have ranks of their own.

    All of a pipeline have: on a trainer's they could not overlap with it, and would end with it.
    """
    return (1, recipe.pipeline.engines) if recipe.pipeline else (0, 0)


def _engine(path: str | None, settings: dict[str, Any]) -> Plan[InferenceEngine, EngineConfig] | dict[str, Any]:
    own = settings.get("backend") == TRAINERS_OWN
    return {k: v for k, v in settings.items() if k != "backend"} if own else resolve_engine(path, **settings)
