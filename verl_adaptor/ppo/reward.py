"""Who scores responses: a function of yours, a reward model, a service, or the task's own scorer. All are a `Reward`."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verl_adaptor.config import RewardConfig
from verl_adaptor.errors import ConfigError, RewardError
from verl_adaptor.objects import check_arguments, load_callable
from verl_adaptor.samples import Trajectory
from verl_adaptor.threads import in_daemon_thread

if TYPE_CHECKING:
    from verl_adaptor.tasks import Task

Scores = list[float | list[float]]
"""For each trajectory one reward, which lands on its last sampled token, or one for each of its sampled tokens."""


class Reward(Protocol):
    """What the loop asks for rewards."""

    async def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The rewards of the trajectories, in their order.

        Raises:
            RewardError: they cannot be computed, or are no finite numbers.
        """
        ...


class RewardFunction:
    """A function as a `Reward`: called once for all trajectories, its answer checked.

    ``async def`` functions run on the event loop. Others run in a thread, so that a slow one delays nobody and a hanging one
    can be noticed; one that needs the main thread (``signal.alarm``, as some verifiers use) must therefore be async.

    Args:
        function: ``(trajectories, **args) -> list[float] | list[list[float]]``, sync or async; NumPy arrays and tensors
            will do, and booleans count as 0 and 1.
        args: its keyword arguments.
        name: what errors call it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.args = dict(args or {})
        self.name = name or str(getattr(function, "__qualname__", repr(function)))
        check_arguments(function, self.args, key="reward.args", positional=1)

    async def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The function's rewards, checked."""
        try:
            async with asyncio.timeout(self.timeout_s) as timer:
                answer = await self._call(trajectories)
        except Exception as error:
            if timer.expired():
                raise RewardError(
                    f"reward function {self.name} has not answered within {self.timeout_s:.0f} s for {len(trajectories)} "
                    "trajectories; make it faster, or raise reward.timeout_s."
                ) from error
            raise RewardError(f"reward function {self.name} raised {type(error).__name__}: {error}") from error
        return check_scores(answer, trajectories, self.name)

    async def _call(self, trajectories: Sequence[Trajectory]) -> Any:
        call = getattr(self.function, "__call__", None)  # noqa: B004  an object with an async __call__ is async too
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call):
            return await self.function(trajectories, **self.args)
        answer: Any = await in_daemon_thread(lambda: self.function(trajectories, **self.args), "reward")
        return await answer if isinstance(answer, Awaitable) else answer


def check_scores(
    answer: Any, trajectories: Sequence[Trajectory], name: str, *, kind: str = "reward function", first: int = 0
) -> Scores:
    """The answer of a reward function as plain floats.

    Args:
        answer: one reward a trajectory, or a list of them for its sampled tokens.
        trajectories: what was scored.
        name: whose answer it is, for errors.
        kind: what that is.
        first: number of the first trajectory, where these are a part of more.

    Raises:
        RewardError: it is no sequence, has the wrong length, or holds something that is no finite number; the message
            names the trajectory.
    """
    rewards = _plain(answer)
    if not isinstance(rewards, list | tuple):
        raise RewardError(
            f"{kind} {name} returned a {type(answer).__name__}; it must return a list with one reward a trajectory."
        )
    if len(rewards) != len(trajectories):
        raise RewardError(f"{kind} {name} returned {len(rewards)} rewards for {len(trajectories)} trajectories.")
    return [
        _check_one(_plain(reward), trajectory, f"{kind} {name}, trajectory {index}")
        for index, (reward, trajectory) in enumerate(zip(rewards, trajectories, strict=True), first)
    ]


def _check_one(reward: Any, trajectory: Trajectory, where: str) -> float | list[float]:
    if not isinstance(reward, list | tuple):
        return _number(reward, where)
    sampled = sum(trajectory.response_mask)
    if len(reward) != sampled:
        raise RewardError(
            f"{where}: {len(reward)} token rewards for {sampled} sampled tokens; give one for each 1 in response_mask."
        )
    return [_number(_plain(value), f"{where}, token {token}") for token, value in enumerate(reward)]


def _number(value: Any, where: str) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{where}: {value!r} is a {type(value).__name__}; a reward is one finite number.")
    if not math.isfinite(value):
        raise RewardError(f"{where}: the reward is {float(value)}; a reward must be finite, or it ends in the weights.")
    return float(value)


def _plain(value: Any) -> Any:
    """NumPy arrays and tensors as lists and numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def load_reward(config: RewardConfig, task: Task | None) -> Reward:
    """The reward that `config` names; with nothing named, the task's own scorer.

    Raises:
        ConfigError: nothing scores, the function does not exist or does not take its arguments.
        ModelError: the reward model cannot be used.
        BackendNotInstalled: what asks a service is not installed.
    """
    if config.function is not None:
        return RewardFunction(
            load_callable(config.function, key="reward.function"),
            config.args,
            name=config.function,
            timeout_s=config.timeout_s,
        )
    if config.args:
        raise ConfigError(f"reward.args={config.args} are for reward.function, which is not set; delete them.")
    if config.model is not None:
        from verl_adaptor.ppo.reward_model import SequenceClassificationReward

        return SequenceClassificationReward(
            config.model, batch_size=config.model_batch_size, timeout_s=config.timeout_s
        )
    if config.url is not None:
        from verl_adaptor.ppo.reward_http import RewardService

        return RewardService(config)
    if task is not None:
        return RewardFunction(task.score, name=f"{type(task).__name__}.score", timeout_s=config.timeout_s)
    raise ConfigError(
        "nothing scores the responses: set reward.function ('module:function'), reward.model, reward.url, or a data.task that "
        "has a scorer."
    )
