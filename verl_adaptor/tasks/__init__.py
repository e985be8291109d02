"""Tasks: prompts that come with their own scorer.

    task = load_task("reasoning_gym:chain_sum", {"max_terms": 2})
    task.train_records(seed=0), task.eval_records(200), task.score(trajectories)

A task of your own is a class (or a function that returns such an object) with these three methods, named in the recipe as
``data.task: package.module:name``; ``data.args`` are its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verl_adaptor.errors import ConfigError, nearest
from verl_adaptor.objects import check_arguments, load_callable
from verl_adaptor.samples import Trajectory

GYM = "reasoning_gym:"


@runtime_checkable
class Task(Protocol):
    """What a task must be."""

    def train_records(self, seed: int) -> Iterable[Mapping[str, Any]]:
        """One pass over the training records, finite or endless; each pass is asked for with another seed.

        A record holds the prompt (text, messages or token ids) under ``data.prompt_key`` and whatever `score` reads.
        The same seed must give the same records: a resumed run makes them again.
        """
        ...

    def eval_records(self, count: int) -> list[Mapping[str, Any]]:
        """At most `count` held-out records: always the same, no two alike, and none of them a training record."""
        ...

    def score(self, trajectories: Sequence[Trajectory]) -> list[float | list[float]]:
        """One reward for each trajectory, or one for each of its sampled tokens. `Trajectory.info` is the record."""
        ...


def load_task(name: str, args: Mapping[str, Any]) -> Task:
    """The task of this name.

    Args:
        name: ``digits``, ``reasoning_gym:NAME`` or ``package.module:factory``.
        args: its arguments.

    Raises:
        ConfigError: no such task, or what the factory returned is none.
        UnknownKey: it has no such argument.
        BackendNotInstalled: what the task needs is not installed.
    """
    if name == "digits":
        from verl_adaptor.tasks.digits import DigitsTask

        check_arguments(DigitsTask, args, key="data.args")
        return DigitsTask(**args)
    if name.startswith(GYM):
        from verl_adaptor.tasks.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(name.removeprefix(GYM), **args)
    if ":" not in name:
        known = ["digits", GYM + "NAME", "package.module:factory"]
        raise ConfigError(f"data.task: no task is named {name!r}; {nearest(name, known)}.")
    factory = load_callable(name, key="data.task")
    check_arguments(factory, args, key="data.args")
    task: Task = factory(**args)
    missing = [method for method in ("train_records", "eval_records", "score") if not hasattr(task, method)]
    if missing:
        raise ConfigError(
            f"data.task: {name} made a {type(task).__name__}, which lacks {', '.join(missing)}; see Task."
        )
    return task
