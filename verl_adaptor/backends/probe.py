"""Small experiments at start-up, because what they find would otherwise stay silent.

Versions and model classes tell too little about gradients under activation checkpointing (C30), about packing (C17) or
about ranks that share a sequence: so each is tried on a few tokens.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict

from verl_adaptor.backends.heads import Head
from verl_adaptor.backends.ulysses import use_ulysses
from verl_adaptor.backends.world import Axis
from verl_adaptor.batch import collate
from verl_adaptor.errors import MissingGradient, UnsupportedCapability
from verl_adaptor.samples import Trajectory

CHECKPOINTING = {"use_reentrant": False, "preserve_rng_state": False}
"""Reentrant checkpointing loses gradients where inputs need none; and there is no dropout to repeat."""


def switch_checkpointing(head: Head, on: bool) -> None:
    """Turn activation checkpointing on or off. Raises `UnsupportedCapability` where the model has none."""
    if not on:
        head.model.gradient_checkpointing_disable()
        return
    try:
        head.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(CHECKPOINTING))
    except ValueError as error:
        raise UnsupportedCapability(
            f"{type(head.model).__name__} has no activation checkpointing; set activation_checkpointing=false."
        ) from error


def check_gradients(head: Head) -> None:
    """Turn activation checkpointing on, if every gradient that is there without it is there with it, and the same.

    A comparison, so that parameters without a gradient of their own (frozen, idle experts) raise no alarm.

    Raises:
        MissingGradient: some parameters lose their gradient, or get another one; they are named.
    """
    switch_checkpointing(head, False)
    plain = _gradient_norms(head)
    switch_checkpointing(head, True)
    checkpointed = _gradient_norms(head)
    lost = [name for name, norm in plain.items() if norm and not checkpointed[name]]
    wrong = [n for n, norm in plain.items() if norm and n not in lost and abs(checkpointed[n] - norm) > 0.02 * norm]
    if lost or wrong:
        switch_checkpointing(head, False)
        raise MissingGradient(
            f"with activation checkpointing {len(lost)} of {len(plain)} parameters lose their gradient and {len(wrong)} "
            f"get a wrong one ({', '.join((lost + wrong)[:3])}); set activation_checkpointing=false, or upgrade transformers."
        )


def check_packing(head: Head) -> None:
    """Compare packed with padded sequences. Raises `UnsupportedCapability` where the model cannot keep them apart."""
    batch = _tiny_batch(head)
    head.packing = True
    try:
        with torch.no_grad():
            packed = head(batch)
    except UnsupportedCapability:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedCapability(
            f"packing: {type(head.model).__name__} takes no 4-D attention mask ({error}); set packing=false."
        ) from error
    head.packing = False
    with torch.no_grad():
        padded = head(batch)
    head.packing = True
    tolerance = 1e-3 if head.compute_dtype == torch.float32 else 0.3
    off = max(float((packed[name] - padded[name]).abs().max()) for name in head.outputs)
    if not off <= tolerance:
        raise UnsupportedCapability(
            f"packing: packed sequences of {type(head.model).__name__} differ from padded ones by {off:.2g}, so they leak "
            "into each other; set packing=false."
        )


def share_sequences(head: Head, axis: Axis) -> None:
    """Let the ranks of `axis` share each sequence (context parallelism), if `head` then computes what it does alone.

    A collective, while `head` is still whole on every rank. Afterwards every forward pass is one too, and the gradient is
    the sum over the ranks.

    Raises:
        ConfigError: the ranks do not divide the model's attention heads.
        UnsupportedCapability: the model does not keep a sequence together when it is cut.
    """
    batch, compute_dtype = _tiny_batch(head), head.compute_dtype
    head.compute_dtype = torch.float32
    with torch.no_grad():
        alone = head(batch)
    use_ulysses(head.model, axis)
    head.context = axis
    head.multiple *= axis.size
    cut = f"context_parallel_size={axis.size}: {type(head.model).__name__}, its sequences cut among the ranks,"
    try:
        with torch.no_grad():
            together = head(batch)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise UnsupportedCapability(f"{cut} cannot be run ({error}); set context_parallel_size=1.") from error
    head.compute_dtype = compute_dtype
    off = max(float((together[name] - alone[name]).abs().max()) for name in head.outputs)
    if not off <= 1e-3:
        raise UnsupportedCapability(
            f"{cut} is off by {off:.2g}: something besides attention looks at earlier tokens; set context_parallel_size=1."
        )


def _gradient_norms(head: Head) -> dict[str, float]:
    """Name -> gradient norm after one backward pass; 0 where there is none. Leaves no gradient behind."""
    head.train()
    try:
        outputs = head(_tiny_batch(head))
        sum(value.square().sum() for value in outputs.values()).backward()
        named = [(name, p) for name, p in head.named_parameters() if p.requires_grad]
        return {name: 0.0 if p.grad is None else float(p.grad.norm()) for name, p in named}
    finally:
        head.zero_grad(set_to_none=True)
        head.eval()


def _tiny_batch(head: Head) -> TensorDict:
    """Two made-up sequences of 13 and 10 tokens."""
    vocabulary = int(head.model.config.get_text_config().vocab_size)
    ids = [(7 * index + 3) % vocabulary for index in range(23)]
    rows = [_row(ids[:5], ids[5:13]), _row(ids[13:20], ids[20:])]
    return collate(rows, pad_token_id=0).to(head.model.device)


def _row(prompt: list[int], response: list[int]) -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        response_mask=(1,) * len(response),
        rollout_log_probs=(0.0,) * len(response),
        finish_reason="length",
        version_runs=((0, len(response)),),
    )
