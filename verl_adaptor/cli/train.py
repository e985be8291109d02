"""``verl-adaptor train RECIPE [key=value ...] --output DIR [--resume]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from verl_adaptor.cli import running
from verl_adaptor.cli.recipes import load_recipe
from verl_adaptor.config import Recipe
from verl_adaptor.errors import VerlAdaptorError
from verl_adaptor.execution import WorkerPool, torchrun


def train(recipe: Path, overrides: Sequence[str], *, output: Path, resume: bool) -> None:
    """Check, prepare, train. What is wrong before training ends with exit code 2, what goes wrong in it with 3.

    Under torchrun the first rank does this, and the others serve its trainers until it ends.
    """
    sys.path.insert(0, str(Path.cwd()))  # so that package.module:name finds the user's own files, as with python -m
    if torchrun.world()[0] > 0:
        return _serve(recipe, overrides)
    with _workers() as workers:
        _train(load_recipe(recipe, overrides), output, resume=resume, workers=workers)


def _train(checked: Recipe, output: Path, *, resume: bool, workers: WorkerPool) -> None:
    from verl_adaptor.cli.run import prepared, run_to_end

    _quiet()
    with prepared(checked, output, resume=resume, workers=workers) as (run, facts), running():
        summary = run_to_end(run, checked, output, facts)
    low, high = summary["reward_gain_interval"]
    typer.echo(
        f"held-out reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f} "
        f"(95 % interval of the gain {low:+.3f} to {high:+.3f}) in {summary['train_seconds']:.0f} s"
    )
    typer.echo(f"summary: {output / 'summary.json'}")
    if checked.tracking.report:
        typer.echo(f"report: {output / 'report.html'}")


def _quiet() -> None:
    """The progress bar and the sentences to look at are ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _workers() -> WorkerPool:
    """Where trainers of several ranks run: on the ranks that torchrun started, else on workers that start when needed."""
    return WorkerPool() if torchrun.world()[1] == 1 else torchrun.TorchrunPool()


def _serve(recipe: Path, overrides: Sequence[str]) -> None:
    """A rank that torchrun started beside the first: at the service of that one until it ends.

    It ends well even if the run does not: torchrun ends all ranks when one fails, and the first has a sentence to say.
    """
    idle_s = 600.0
    try:
        checked = load_recipe(recipe, overrides)
        # longest that the first rank is busy without its peers: prompts, rollouts and rewards of a step and of an evaluation
        samples = max(checked.ppo.train_batch_size * checked.rollout.n, checked.evaluation.prompts)
        idle_s += 2 * (checked.rollout.timeout_s + checked.reward.longest_s(samples))
        idle_s += checked.data.longest_s(checked.ppo.train_batch_size)
    except VerlAdaptorError:
        pass  # the first rank says so
    _quiet()
    torchrun.serve(idle_s)
