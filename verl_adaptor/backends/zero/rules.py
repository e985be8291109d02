"""What the zero trainer refuses before DeepSpeed is imported. Each rule is handed a `preflight.Facts`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_adaptor.backends.zero.options import ZeroOptions, zero_stage
from verl_adaptor.findings import rule


@rule()
def offload_has_a_stage(facts: Any) -> Iterator[tuple[str, str]]:
    """Only what is sharded can be kept in host memory."""
    options = facts.options if isinstance(facts.options, ZeroOptions) else ZeroOptions()
    stage = zero_stage(facts.config)
    if options.offload_optimizer != "none" and stage == 0:
        yield f"offload_optimizer={options.offload_optimizer!r} with zero_stage=0", "it needs zero_stage 1, 2 or 3"
    if options.offload_parameters != "none" and stage != 3:
        yield f"offload_parameters={options.offload_parameters!r} with zero_stage={stage}", "it needs zero_stage=3"
