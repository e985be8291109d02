"""From a recipe to a finished run: everything is checked, then made, then trained, then told.

DIR/config.yaml       the recipe as it ran, overrides applied
DIR/model/            the model it started from, where the recipe builds one
DIR/metrics.jsonl     one object a step
DIR/checkpoints/      the newest ones
DIR/final/            the trained policy, a Hugging Face folder
DIR/summary.json, DIR/report.html
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from verl_adaptor.cli.memory import estimate, memory_findings
from verl_adaptor.cli.plan import Plans, check_room, engine_copies, plan
from verl_adaptor.cli.recipes import differences
from verl_adaptor.cli.signals import StopSignals
from verl_adaptor.config import Recipe
from verl_adaptor.data import open_prompts
from verl_adaptor.errors import ConfigError, ModelError
from verl_adaptor.execution import WorkerPool
from verl_adaptor.factory import Plan
from verl_adaptor.objects import load_callable
from verl_adaptor.ppo.checkpoints import Checkpoints
from verl_adaptor.ppo.evaluate import gain_interval
from verl_adaptor.ppo.loop import PPO, train
from verl_adaptor.ppo.pipeline import Pipeline
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.tokenizer import load_tokenizer, pad_token_id
from verl_adaptor.tracking import Tracker, environment, write_report
from verl_adaptor.tracking.records import read_rows, write_atomically

logger = logging.getLogger(__name__)


def _engine(plans: Plans, actor: TrainerBackend, path: str, workers: WorkerPool, number: int = 0) -> InferenceEngine:
    if isinstance(plans.engine, Plan):
        return plans.engine.create(path, workers=workers, copy=number)
    return actor.rollout_engine(**plans.engine)


@contextmanager
def prepared(
    recipe: Recipe, output: Path, *, resume: bool, workers: WorkerPool
) -> Iterator[tuple[PPO, dict[str, Any]]]:
    """A run that is ready to train, and facts about its model; everything but `workers` is closed at the end.

    Args:
        recipe: what to run.
        output: the run's folder.
        resume: go on from its newest checkpoint.
        workers: where trainers of several ranks run; those of one layout share their ranks.

    Raises:
        ConfigError: the folder holds another run, or cannot be written; or anything `plan` raises.
    """
    plans = plan(recipe)
    check_room(recipe, plans, workers)
    first, _ = engine_copies(recipe)
    checkpoints = Checkpoints(output / "checkpoints", recipe.checkpoint)
    _check_folder(recipe, output, checkpoints, resume=resume)
    with ExitStack() as stack:
        stack.enter_context(_threads(recipe.threads))
        tracker = stack.enter_context(
            Tracker(
                recipe.tracking,
                output,
                total_steps=recipe.ppo.total_steps,
                resume_step=checkpoints.newest_step() if resume else None,
            )
        )
        path, facts = _model(recipe, output, resume=resume)
        tokenizer = load_tokenizer(path)
        for finding in memory_findings(estimate(recipe, plans, path)):
            if finding.severity == "error":
                raise ConfigError(str(finding), findings=(finding,))
            logger.warning("%s", finding)
        actor = stack.enter_context(plans.actor.create(path, workers=workers))
        engine = stack.enter_context(_engine(plans, actor, path, workers, first))
        prompts, held_out = open_prompts(
            recipe.data.replace(max_prompt_tokens=_room_for_prompts(recipe, engine)),
            tokenizer,
            seed=recipe.seed,
            held_out=recipe.evaluation.prompts,
            task=plans.task,
        )
        stack.callback(prompts.close)
        if not recipe.data.streams:  # which may have none yet, and is waited for when one is needed
            start = prompts.state_dict()
            next(prompts)  # there is one to train on, beside the held-out ones
            prompts.load_state_dict(start)
        run = (
            PPO(
                config=recipe.ppo,
                rollout_config=recipe.rollout,
                evaluation_config=recipe.evaluation,
                tracking_config=recipe.tracking,
                seed=recipe.seed,
                prompts=prompts,
                held_out=held_out,
                engine=engine,
                actor=actor,
                critic=stack.enter_context(plans.critic.create(path, workers=workers)) if plans.critic else None,
                reference=_reference(plans, actor, path, workers, stack),
                reward=plans.reward,
                tracker=tracker,
                checkpoints=checkpoints,
                pad_token_id=pad_token_id(tokenizer) if tokenizer else 0,
                rollout=plans.rollout,
                new_engine=lambda number: stack.enter_context(_engine(plans, actor, path, workers, first + number)),
            ),
            facts,
        )
        dump = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
        write_atomically(output / "config.yaml", dump.encode())  # last: now the folder holds a run
        yield run


def run_to_end(run: PPO, recipe: Recipe, output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Train, save the policy, and write summary and report. Returns the summary.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM arrived; a checkpoint of the last whole step was saved.
    """
    with StopSignals() as stop, _nothing_old_collected():
        run.stop_requested = stop
        asyncio.run(train(run) if recipe.pipeline is None else Pipeline(run, recipe.pipeline).train())
    run.actor.save_pretrained(output / "final")
    before, after = run.evaluations[0], run.evaluations[max(run.evaluations)]
    rows = read_rows(output / "metrics.jsonl")
    seconds = sum(row["time/step"] for row in rows)
    summary = {
        "reward_before": before.mean,
        "reward_after": after.mean,
        "reward_gain_interval": list(gain_interval(before, after)),
        "eval_prompts": len(after.rewards),
        "steps": max(run.evaluations),
        "train_seconds": seconds,
        "tokens_per_second": sum(row["tokens"] for row in rows) / seconds if seconds else 0.0,
        "seed": recipe.seed,
        "model": facts,
        **environment(),
    }
    run.tracker.summary(summary)
    run.tracker.close()
    if recipe.tracking.report:
        write_report(output)
    return summary


def _reference(
    plans: Plans, actor: TrainerBackend, path: str, workers: WorkerPool, stack: ExitStack
) -> TrainerBackend | None:
    """The actor with its adapters off, a model of its own, or None; closed with `stack`."""
    if plans.reference_is_view:
        return stack.enter_context(actor.reference())
    return stack.enter_context(plans.reference.create(path, workers=workers)) if plans.reference else None


def _room_for_prompts(recipe: Recipe, engine: InferenceEngine) -> int:
    """Most tokens in a prompt, so that a whole response fits behind it."""
    if not engine.model.eos_token_ids:
        raise ModelError(
            f"{engine.path} names no EOS token, so that no response could end; set eos_token_id in its config."
        )
    room = engine.model.max_model_len - recipe.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens={recipe.rollout.max_tokens} leaves no room for a prompt within the engine's "
            f"max_model_len={engine.model.max_model_len}; lower it."
        )
    return min(recipe.data.max_prompt_tokens, room)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch's CPU threads within this block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _nothing_old_collected() -> Iterator[None]:
    """Within this block the garbage collector passes over what there is already: models and modules live as long as the run.

    A look through all of them takes a quarter of a second, in which no other thread runs Python.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_folder(recipe: Recipe, output: Path, checkpoints: Checkpoints, *, resume: bool) -> None:
    """A new run needs a folder without one; a resumed run needs the recipe that the folder holds."""
    kept = output / "config.yaml"
    if not resume and (kept.exists() or checkpoints.newest() is not None):
        raise ConfigError(f"{output} holds a run; go on with --resume, or choose another --output.")
    if resume and kept.exists():
        old = Recipe(**yaml.safe_load(kept.read_text(encoding="utf-8"))).model_dump(
            mode="json"
        )  # settings new since then
        changed = differences(old, recipe.model_dump(mode="json"))
        if changed:
            raise ConfigError(
                f"{output} was run with another recipe, so that a resumed run would be neither: {'; '.join(changed)}. "
                "Use the old values, or start a new run in another --output."
            )


def _model(recipe: Recipe, output: Path, *, resume: bool) -> tuple[str, dict[str, Any]]:
    """The folder to start from, made if the recipe says how, and what is known about it.

    It is built beside its place and renamed, so that an interrupted build is never taken for a model; a resumed run
    starts from the one that is there.
    """
    if recipe.model.path is not None:
        return recipe.model.path, {"path": recipe.model.path}
    folder, partial = output / "model", output / "model.partial"
    if not (resume and folder.exists()):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        build = load_callable(recipe.model.build or "", key="model.build")
        facts = build(partial, seed=recipe.seed, **recipe.model.build_args)
        (partial / "build.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        partial.rename(folder)
    return str(folder), json.loads((folder / "build.json").read_text(encoding="utf-8"))
