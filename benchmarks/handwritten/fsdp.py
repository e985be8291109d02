"""transformers and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from handwritten import task


def build(path: str, data: Mapping[str, Tensor]) -> task.Step:
    """Each layer sharded, then the rest; resharded after forward, gradients reduced in the last micro-batch's backward pass."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, fused=True)

    def step() -> tuple[float, float]:
        tokens, total = data["response_mask"].sum(), torch.zeros(())
        micros = list(task.micro_batches(data, rank=rank, ranks=ranks))
        for micro in micros:
            model.set_requires_gradient_sync(micro is micros[-1])
            model.set_is_last_backward(micro is micros[-1])
            logits = model(**micro.inputs, logits_to_keep=micro.predictors, use_cache=False).logits
            loss = task.policy_loss(logits, micro, tokens)
            (loss * ranks).backward()  # FSDP takes the mean over ranks
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), task.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    return step
