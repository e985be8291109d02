"""transformers and DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Mapping

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from handwritten import task


def build(path: str, data: Mapping[str, Tensor], stage: int) -> task.Step:
    """`stage` 2 shards optimizer state and gradients, 3 parameters too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    accumulated = task.ROWS // ranks // task.MICRO_ROWS
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": task.MICRO_ROWS,
            "gradient_accumulation_steps": accumulated,
            "gradient_clipping": task.MAX_GRAD_NORM,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> tuple[float, float]:
        tokens, total = data["response_mask"].sum(), torch.zeros(())
        for micro in task.micro_batches(data, rank=rank, ranks=ranks):
            logits = engine(**micro.inputs, logits_to_keep=micro.predictors, use_cache=False).logits
            loss = task.policy_loss(logits, micro, tokens)
            engine.backward(loss * ranks * accumulated)  # DeepSpeed takes the mean over ranks and micro-batches
            engine.step()  # steps after the last one
            total += loss.detach()
        dist.all_reduce(total)
        return total.item(), float(engine.get_global_grad_norm())

    return step
