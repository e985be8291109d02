"""transformers and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from handwritten import task


def build(path: str, data: Mapping[str, Tensor]) -> task.Step:
    """One replica a rank; gradients are summed during the last micro-batch's backward pass."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, fused=True)

    def step() -> tuple[float, float]:
        tokens, total = data["response_mask"].sum(), torch.zeros(())
        micros = list(task.micro_batches(data, rank=rank, ranks=ranks))
        for micro in micros:
            with nullcontext() if micro is micros[-1] else model.no_sync():
                logits = model(**micro.inputs, logits_to_keep=micro.predictors, use_cache=False).logits
                loss = task.policy_loss(logits, micro, tokens)
                (loss * ranks).backward()  # DDP takes the mean over ranks
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), task.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item(), norm.item()

    return step
