"""From prompts to trajectories. `single_turn` is the default; a function of your own makes it multi-turn or tool-using.

A rollout is ``async def rollout(engine, prompt, params) -> Trajectory``. It is called once a sample, all samples of a
step at once, so that an engine decodes them as a batch however many turns each takes. ``examples/calculator.py`` is a
two-turn one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from verl_adaptor.config import RolloutConfig
from verl_adaptor.errors import ConfigError, RolloutTimeout, VerlAdaptorError
from verl_adaptor.protocols.engine import InferenceEngine
from verl_adaptor.protocols.requests import mix_seed
from verl_adaptor.samples import Prompt, SamplingParams, Trajectory

Rollout = Callable[[InferenceEngine, Prompt, SamplingParams], Awaitable[Trajectory]]


async def single_turn(engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    """One response to one prompt; every response token was sampled by the policy."""
    [completion] = await engine.agenerate(prompt, params)
    return Trajectory.from_completion(completion, prompt, temperature=params.temperature or 1.0)


def sampling_params(config: RolloutConfig) -> SamplingParams:
    """The parameters of one training sample; seeds are set a sample by `rollout_all`."""
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
    )


async def rollout_all(
    rollout: Rollout,
    engine: InferenceEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    seed: int,
    timeout_s: float,
    first: int = 0,
) -> list[Trajectory]:
    """n trajectories of each prompt, consecutive, in input order.

    Every sample gets a seed made of `seed`, its prompt's place (the first one's is `first`) and its own: a resumed step
    samples what the interrupted one did. The first failure cancels the rest and is raised.

    Raises:
        ConfigError: `params` change the sampling distribution, so that no trainer could reproduce the log-probs.
    """
    if params.changes_distribution:
        raise ConfigError(
            f"{params} changes the sampling distribution (penalties, logit_bias or min_tokens): its log-probs are not the "
            "policy's. Leave them out of training rollouts; evaluation may use them."
        )
    places = range(first, first + len(prompts))
    seeds = [mix_seed(mix_seed(seed, place), sample) for place in places for sample in range(n)]
    grouped = [
        p if p.group_id else replace(p, group_id=f"place:{place}") for place, p in zip(places, prompts, strict=True)
    ]
    repeated = [prompt for prompt in grouped for _ in range(n)]
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_checked(rollout, engine, prompt, params.replace(seed=its)))
                for prompt, its in zip(repeated, seeds, strict=True)
            ]
    except TimeoutError as error:
        unfinished = sum(not task.done() or task.cancelled() for task in tasks)
        raise RolloutTimeout(
            f"{unfinished} of {len(tasks)} rollouts were not finished within {timeout_s:.0f} s; look for a tool that hangs, or "
            "raise rollout.timeout_s."
        ) from error
    except ExceptionGroup as failures:
        raise first_failure(failures) from None
    return [task.result() for task in tasks]


async def _checked(rollout: Rollout, engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    trajectory = await rollout(engine, prompt, params)
    name = getattr(rollout, "__qualname__", repr(rollout))
    if not isinstance(trajectory, Trajectory):
        raise ConfigError(f"rollout {name} returned {type(trajectory).__name__}; it must return one Trajectory.")
    sampled_at = params.temperature or 1.0
    if trajectory.temperature != sampled_at:
        raise ConfigError(
            f"rollout {name} returned a trajectory with temperature={trajectory.temperature}, sampled at {sampled_at}: its "
            "log-probs would mean something else to the trainer; give Trajectory(temperature=params.temperature)."
        )
    if trajectory.group_id not in ("", prompt.group_id):
        raise ConfigError(
            f"rollout {name} returned group_id={trajectory.group_id!r} for a prompt of group {prompt.group_id!r}; samples "
            "of one prompt are compared by it: give Trajectory(group_id=prompt.group_id)."
        )
    if not any(trajectory.response_mask):
        raise ConfigError(f"rollout {name} returned a trajectory without a sampled token; response_mask is all 0.")
    return trajectory if trajectory.group_id else replace(trajectory, group_id=prompt.group_id)


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf, one of our own kind before others."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, VerlAdaptorError)), leaves[0])
