"""From prompts to trajectories. `single_turn` is the default; a function of your own makes it multi-turn or tool-using.

A rollout is ``async def rollout(engine, prompt, params) -> Trajectory``. It is called once a sample, all samples of a
step at once, so that an engine decodes them as a batch however many turns each takes. ``examples/calculator.py`` is a
two-turn one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from verl_adaptor.config import RolloutConfig
from verl_adaptor.errors import ConfigError, VerlAdaptorError
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
) -> list[Trajectory]:
    """n trajectories of each prompt, consecutive, in input order.

    Every sample gets a seed made of `seed`, its prompt's place and its own: a resumed step samples what the
    interrupted one did. The first failure cancels the rest and is raised.

    Raises:
        ConfigError: `params` change the sampling distribution, so that no trainer could reproduce the log-probs.
    """
    if params.changes_distribution:
        raise ConfigError(
            f"{params} changes the sampling distribution (penalties, logit_bias or min_tokens): its log-probs are not the "
            "policy's. Leave them out of training rollouts; evaluation may use them."
        )
    seeds = [mix_seed(mix_seed(seed, place), sample) for place in range(len(prompts)) for sample in range(n)]
    repeated = [prompt for prompt in prompts for _ in range(n)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_checked(rollout, engine, prompt, params.replace(seed=its)))
                for prompt, its in zip(repeated, seeds, strict=True)
            ]
    except* Exception as failures:
        raise _first(failures) from None
    return [task.result() for task in tasks]


async def _checked(rollout: Rollout, engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    trajectory = await rollout(engine, prompt, params)
    if not isinstance(trajectory, Trajectory):
        name = getattr(rollout, "__qualname__", repr(rollout))
        raise ConfigError(f"rollout {name} returned {type(trajectory).__name__}; it must return one Trajectory.")
    return trajectory


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
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
