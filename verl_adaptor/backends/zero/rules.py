"""What the zero trainer refuses before DeepSpeed is imported. Each rule is handed a `preflight.Facts`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_adaptor.backends.zero.options import ZeroOptions, zero_stage


def offload_has_a_stage(facts: Any) -> Iterator[str]:
    """Only what is sharded can be kept in host memory."""
    options = facts.options if isinstance(facts.options, ZeroOptions) else ZeroOptions()
    stage = zero_stage(facts.config)
    if options.offload_optimizer != "none" and stage == 0:
        yield f"offload_optimizer={options.offload_optimizer!r} needs zero_stage 1, 2 or 3; zero_stage=0 was given."
    if options.offload_parameters != "none" and stage != 3:
        yield f"offload_parameters={options.offload_parameters!r} needs zero_stage=3; zero_stage={stage} was given."
