"""The memory of a whole recipe: which part of it runs in which process, and what all of them take together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any

from verl_adaptor.cli.plan import Plans
from verl_adaptor.config import EngineConfig, Recipe
from verl_adaptor.data import open_prompts
from verl_adaptor.execution.pool import choose_executor
from verl_adaptor.factory import Plan
from verl_adaptor.findings import Finding
from verl_adaptor.preflight import Facts
from verl_adaptor.preflight.memory import (
    ModelSize,
    Part,
    ProcessMemory,
    Step,
    engine_part,
    enough_memory,
    little_memory,
    model_size,
    trainer_part,
)
from verl_adaptor.preflight.model import read_model_config
from verl_adaptor.tokenizer import load_tokenizer
from verl_adaptor.tracking.memory import available_bytes

LOOKED_AT = 64
"""Prompts whose length is looked at."""
PROCESS = 620 << 20
"""Bytes of a process that has loaded Python, torch and transformers, as measured."""
WORKER = 60 << 20
"""Bytes that Ray adds to it."""
DRIVER, ENGINE = "this process", "engine"


def memory_findings(processes: Sequence[ProcessMemory]) -> list[Finding]:
    """What the rules about memory find in an estimate of `estimate`, against what this machine has now."""
    free = available_bytes()
    if not processes or free is None:
        return []
    return [*enough_memory(processes, free), *little_memory(processes, free)]


def estimate(recipe: Recipe, plans: Plans, path: str) -> list[ProcessMemory]:
    """Every process and the host memory that it takes, the one that drives the run first.

    Empty where the model's size is not known, or where it is on GPUs.

    Args:
        recipe: the run.
        plans: its parts.
        path: of its model, which exists.
    """
    devices = {trainer.config.device for _, trainer in plans.trainers()}
    if isinstance(plans.engine, Plan):
        devices.add(plans.engine.config.device)
    if not all(_is_cpu(device) for device in devices):
        return []
    size = model_size(path)
    if size is None:
        return []
    ppo, rollout = recipe.ppo, recipe.rollout
    step = Step(
        samples=(ppo.mini_batch_size or ppo.train_batch_size) * rollout.n,
        group=rollout.n,
        prompt=_longest_prompt(recipe, plans, path),
        response=rollout.max_tokens,
        decoding=max(ppo.train_batch_size * rollout.n, recipe.evaluation.prompts),
    )
    homes: defaultdict[Hashable, list[tuple[str, Part, int]]] = defaultdict(list)
    names: dict[Hashable, tuple[str, int]] = {DRIVER: (DRIVER, 1)}
    for section, trainer in plans.trainers():
        home = _home(trainer.config)
        names.setdefault(home, (f"a rank of {section}", trainer.config.world_size))
        homes[home].append((section, trainer_part(size, trainer.spec, trainer.config, step), trainer.spec.process_mib))
    home, name, part, code = _engine(recipe, plans, size, path, step)
    names.setdefault(home, name)
    homes[home].append((ENGINE, part, code))
    return list(_processes(names, homes))


def _is_cpu(device: str) -> bool:
    if device != "auto":
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def _longest_prompt(recipe: Recipe, plans: Plans, path: str) -> int:
    """Of the first prompts, in tokens; a stream is not touched."""
    if recipe.data.streams:
        return recipe.data.max_prompt_tokens
    prompts, _ = open_prompts(
        recipe.data, load_tokenizer(path), seed=recipe.seed, held_out=recipe.evaluation.prompts, task=plans.task
    )
    try:
        return max(len(prompt.token_ids) for prompt in islice(prompts, LOOKED_AT))
    finally:
        prompts.close()


def _engine(
    recipe: Recipe, plans: Plans, size: ModelSize, path: str, step: Step
) -> tuple[Hashable, tuple[str, int], Part, int]:
    """Where the engine runs, what its processes are called, and what one of them takes."""
    copies = recipe.pipeline.engines if recipe.pipeline else 1
    if not isinstance(plans.engine, Plan):  # on the trainer's own weights, which other ranks' are gathered for
        config = EngineConfig(**{k: v for k, v in plans.engine.items() if k in EngineConfig.model_fields})
        part = engine_part(size, config, step)
        whole = part.lasting["weights"] if plans.actor.config.world_size > 1 else 0
        return _home(plans.actor.config), ("", 0), Part({}, part.working + whole), 0
    spec, config = plans.engine.spec, plans.engine.config
    facts = Facts(role="inference", config=config, options=plans.engine.options, model=read_model_config(path))
    part = engine_part(size, config, step, None if spec.cache_bytes is None else spec.cache_bytes(facts))
    apart = spec.own_processes and (config.mode == "async" or config.world_size > 1)
    ranks = plans.engine_ranks()
    if not apart and (ranks is None or _home(ranks) == DRIVER):
        return DRIVER, (DRIVER, 1), part, spec.process_mib
    return "engine", ("a rank of engine", config.world_size * copies), part, spec.process_mib


def _home(config: Any) -> Hashable:
    """What parts that share a process have in common, as `WorkerPool` keeps ranks."""
    if choose_executor(config.world_size, config.execution) == "inline":
        return DRIVER
    return config.world_size, config.device, config.execution


def _processes(
    names: dict[Hashable, tuple[str, int]], homes: dict[Hashable, list[tuple[str, Part, int]]]
) -> Iterator[ProcessMemory]:
    for home, (name, count) in names.items():
        its = homes.get(home, [])
        told = {"process": PROCESS + (max((code for *_, code in its), default=0) << 20)}
        told["process"] += 0 if home == DRIVER else WORKER
        for section, part, _ in its:
            told |= {f"{section} {what}": size for what, size in part.lasting.items()}
        # trainers take turns in one another's room; the engine's cache comes back in pieces that a micro-batch does not fit
        trainers = max((part.working for section, part, _ in its if section != ENGINE), default=0)
        told["working"] = trainers + sum(part.working for section, part, _ in its if section == ENGINE)
        yield ProcessMemory(name, count, told)
