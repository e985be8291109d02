"""``verl-adaptor train RECIPE [key=value ...] --output DIR [--resume]``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from verl_adaptor.cli import running
from verl_adaptor.cli.recipes import load_recipe


def train(recipe: Path, overrides: Sequence[str], *, output: Path, resume: bool) -> None:
    """Check, prepare, train. What is wrong before training ends with exit code 2, what goes wrong in it with 3."""
    sys.path.insert(0, str(Path.cwd()))  # so that package.module:name finds the user's own files, as with python -m
    checked = load_recipe(recipe, overrides)
    from transformers.utils import logging

    from verl_adaptor.cli.run import prepared, run_to_end

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # ours is the one to look at
    with prepared(checked, output, resume=resume) as (run, facts), running():
        summary = run_to_end(run, checked, output, facts)
    low, high = summary["reward_gain_interval"]
    typer.echo(
        f"held-out reward {summary['reward_before']:.3f} -> {summary['reward_after']:.3f} "
        f"(95 % interval of the gain {low:+.3f} to {high:+.3f}) in {summary['train_seconds']:.0f} s"
    )
    typer.echo(f"summary: {output / 'summary.json'}")
    if checked.tracking.report:
        typer.echo(f"report: {output / 'report.html'}")
