"""A model's checkpoint, drawn before the model is sharded: which names it has, and which piece of which tensor each is.

Once every rank holds a shard only, neither memory nor shape tells what is tied, fused or padded. So that is recorded
while the model is whole, and later a bucket of tensors at a time is made whole again (law T4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_adaptor.backends.causal_lm import named_tensors
from verl_adaptor.backends.heads import Head


@dataclass(frozen=True)
class Piece:
    """Where a checkpoint's tensor lies in a tensor of the module: all of it, or a cut (one of several fused experts)."""

    owner: str
    """The module's own name of that tensor."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements, from the owner's first."""

    def cut(self, whole: Tensor) -> Tensor:
        """A view of the owner, which is whole and contiguous."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


class Blueprint:
    """The checkpoint of a head whose tensors are still whole."""

    def __init__(self, head: Head) -> None:
        named, self.tied = named_tensors(head.model)
        named |= {name: tensor for name, tensor in head.state_dict().items() if not name.startswith("model.")}
        own = head.state_dict()
        first = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(own.items())}
        self.pieces = {name: _piece(view, first, own) for name, view in named.items()}
        """By Hugging Face name, a value head's under its own; tied memory once."""
        self.tensors = {name: torch.empty_like(view, device="meta") for name, view in named.items()}
        """By the same names, meta tensors: shapes and types."""

    def gather(self, names: Iterable[str], whole: Callable[[list[str]], dict[str, Tensor]]) -> dict[str, Tensor]:
        """These tensors, whole.

        Args:
            names: Hugging Face names.
            whole: names of the module's own tensors -> those tensors, whole and contiguous; called once, with each name once.
        """
        pieces = {name: self.pieces[name] for name in names}
        owners = whole(list(dict.fromkeys(piece.owner for piece in pieces.values())))
        return {name: piece.cut(owners[piece.owner]) for name, piece in pieces.items()}


def _piece(view: Tensor, names: dict[int, str], own: dict[str, Tensor]) -> Piece:
    owner = names[view.untyped_storage().data_ptr()]
    return Piece(owner, tuple(view.shape), view.stride(), int(view.storage_offset() - own[owner].storage_offset()))
