"""Rules about a whole run, which no single backend can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from verl_adaptor.findings import rule

if TYPE_CHECKING:
    from verl_adaptor.config import ExecutionConfig, PipelineConfig, PPOConfig, RolloutConfig, TrainerConfig

FOUND_OUT_S = 40.0
"""After call_timeout_s the ranks get this long to say how they fared."""


@rule("C29")
def batch_divides(
    ppo: PPOConfig, rollout: RolloutConfig, trainers: Mapping[str, TrainerConfig]
) -> Iterator[tuple[str, str]]:
    """The rows of a mini-batch must spread evenly over data-parallel ranks (C29).

    Args:
        ppo: its mini_batch_size counts prompts.
        rollout: its n makes rows of them.
        trainers: section of the recipe -> its settings.

    >>> from verl_adaptor.config import ParallelConfig, PPOConfig, RolloutConfig, TrainerConfig
    >>> actor = TrainerConfig(parallel=ParallelConfig(data_parallel_size=3))
    >>> [problem] = batch_divides(PPOConfig(mini_batch_size=4), RolloutConfig(n=2), {"trainer": actor})
    >>> str(problem)
    'trainer.data_parallel_size=3 does not divide the 8 rows of a mini-batch (ppo.mini_batch_size=4 x rollout.n=2); \
allowed: 1, 2, 4, 8.'
    """
    prompts = ppo.mini_batch_size or ppo.train_batch_size
    rows = prompts * rollout.n
    for section, config in trainers.items():
        ranks = config.parallel.data_parallel_size
        if rows % ranks:
            allowed = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            given = "mini_batch_size" if ppo.mini_batch_size else "train_batch_size"
            yield (
                f"{section}.data_parallel_size={ranks} does not divide the {rows} rows of a mini-batch (ppo.{given}={prompts} x "
                f"rollout.n={rollout.n})",
                f"allowed: {allowed}",
            )


@rule()
def hangs_are_told_apart(pipeline: PipelineConfig, engine: ExecutionConfig) -> Iterator[tuple[str, str]]:
    """An engine on ranks of its own that hangs is found out, and made anew, before its stage counts as standing still.

    >>> from verl_adaptor.config import ExecutionConfig, PipelineConfig
    >>> [problem] = hangs_are_told_apart(PipelineConfig(stall_timeout_s=60), ExecutionConfig(call_timeout_s=60))
    >>> str(problem)
    'engine.call_timeout_s=60 is not 40 s below pipeline.stall_timeout_s=60, so that an engine that hangs would end the run \
instead of being made anew; lower the first or raise the second.'
    """
    if engine.call_timeout_s + FOUND_OUT_S > pipeline.stall_timeout_s:
        yield (
            f"engine.call_timeout_s={engine.call_timeout_s:g} is not {FOUND_OUT_S:g} s below "
            f"pipeline.stall_timeout_s={pipeline.stall_timeout_s:g}, so that an engine that hangs would end the run instead of "
            "being made anew",
            "lower the first or raise the second",
        )
