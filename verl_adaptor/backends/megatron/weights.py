"""Weights between Hugging Face files and Megatron's parameters; each rank reads and holds only its share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from verl_adaptor.backends import export
from verl_adaptor.backends.megatron import layout
from verl_adaptor.backends.megatron.names import Parameter, pack, unpack, whole_model_name
from verl_adaptor.backends.world import Axis
from verl_adaptor.errors import ModelError, WeightUpdateError
from verl_adaptor.samples import TensorMeta, WeightUpdate


class Source:
    """The tensors of a Hugging Face folder, or of a hub id: shapes at once, values by the slice.

    Raises:
        ModelError: there are no safetensors, or one cannot be read.
    """

    def __init__(self, path: str) -> None:
        found = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=["*.safetensors*"]))
        self.folder = found
        self._path = path

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.folder / file for name, file in named.items()}
        whole = self.folder / "model.safetensors"
        if not whole.is_file():
            raise ModelError(
                f"{self._path}: no model.safetensors; the megatron backend reads nothing else. Save the model again with "
                "transformers (save_pretrained)."
            )
        with self._open(whole) as file:
            return dict.fromkeys(file.keys(), whole)

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read ({error}); copy the folder again.") from error

    def _find(self, name: str) -> str:
        """The name in the files: a folder may hold a language model, or the bare backbone of one."""
        for known in (name, f"model.{name}", name.removeprefix("model.")):
            if known in self._files:
                return known
        raise ModelError(
            f"{self._path}: its weights lack {name}; give a folder that was saved from a model with such a layer."
        )

    def _slices(self, name: str) -> Any:
        found = self._find(name)
        return self._open(self._files[found]).get_slice(found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._slices(name).get_shape())

    def cut(self, name: str, dim: int | None, axis: Axis) -> Tensor:
        """This rank's share along `dim`, float32; ranks beyond the end of a vocabulary get zeros."""
        whole = self._slices(name)
        return cut(whole, whole.get_shape(), dim, axis)


def cut(whole: Any, shape: Sequence[int], dim: int | None, axis: Axis) -> Tensor:
    """This rank's share along `dim` of a tensor, or of a file's slice, of that shape, float32."""
    if dim is None:
        return whole[:].float()
    each = -(-shape[dim] // axis.size)
    start, stop = min(axis.rank * each, shape[dim]), min((axis.rank + 1) * each, shape[dim])
    part = (whole[start:stop] if dim == 0 else whole[:, start:stop]).float()
    return part if stop - start == each else _filled(part, each)


def _filled(part: Tensor, rows: int) -> Tensor:
    full = part.new_zeros(rows, *part.shape[1:])
    full[: len(part)] = part
    return full


class Weights:
    """Which of the model's parameters are here, and how to bring them in and out.

    Args:
        parameters: all of the model, by Megatron name.
        chunks: this rank's.
        shapes: Hugging Face name -> shape of the whole tensor.
        head_dim: width of an attention head.
        experts: in each layer.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        chunks: Sequence[nn.Module],
        shapes: Mapping[str, tuple[int, ...]],
        head_dim: int,
        experts: int,
    ) -> None:
        self.parameters = parameters
        self.shapes = shapes
        self._head_dim = head_dim
        self._experts_here = experts // layout.expert_axis().size
        self.own = {name: p for chunk in chunks for name, p in self._named(chunk)}
        unknown = self.own.keys() - parameters.keys()
        if unknown:
            raise ModelError(f"megatron made a parameter that no Hugging Face tensor fills: {min(unknown)}.")
        self._stage = self._stages()

    def _named(self, chunk: Any) -> Iterator[tuple[str, nn.Parameter]]:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        first_expert = layout.expert_axis().rank * self._experts_here
        for name, parameter in chunk.named_parameters():
            yield whole_model_name(name, numbers, first_expert), parameter

    def _stages(self) -> dict[str, int]:
        """Parameter name -> the first pipeline rank that holds it."""
        pipeline = layout.pipeline_axis()
        held: list[list[str]] = [[] for _ in range(pipeline.size)]
        if pipeline.group is None:
            held[0] = list(self.own)
        else:
            dist.all_gather_object(held, list(self.own), group=pipeline.group)
        return {name: stage for stage in reversed(range(pipeline.size)) for name in held[stage]}

    # -- in ------------------------------------------------------------------------------------------------------

    def read(self, source: Source) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter of this rank with its float32 value; a value head that the file lacks is left out."""
        for name, own in self.own.items():
            what = self.parameters[name]
            if name.startswith("value_head."):
                continue
            parts = [source.cut(part, what.axis, self._axis(what)) for part in what.names]
            yield own, pack(parts, what.packing, self._head_dim)

    def cut(self, bucket: Mapping[str, Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter of this rank that these whole tensors fill, with its float32 value.

        Raises:
            WeightUpdateError: a tensor came without another that Megatron keeps in the same parameter.
        """
        for name in dict.fromkeys(own for part in bucket for own in self._filled_by.get(part, ())):
            what = self.parameters[name]
            missing = [part for part in what.names if part not in bucket]
            if missing:
                raise WeightUpdateError(
                    f"{missing[0]} did not arrive with the rest of what Megatron keeps in one matrix ({', '.join(what.names)}); "
                    "such groups travel in one bucket: see WeightUpdate.fused_groups."
                )
            parts = [cut(bucket[part], bucket[part].shape, what.axis, self._axis(what)) for part in what.names]
            yield self.own[name], pack(parts, what.packing, self._head_dim)

    @cached_property
    def _filled_by(self) -> dict[str, list[str]]:
        """Hugging Face name -> this rank's parameters that hold it; a tied embedding may be in two."""
        found: dict[str, list[str]] = {}
        for name in self.own:
            for part in self.parameters[name].names:
                found.setdefault(part, []).append(name)
        return found

    @staticmethod
    def _axis(what: Parameter) -> Axis:
        return layout.tensor_axis() if what.expert is None else Axis()

    # -- out -----------------------------------------------------------------------------------------------------

    def update(
        self, version: int, tied: Mapping[str, str], master: Callable[[nn.Parameter], Tensor], check: Callable[[], None]
    ) -> WeightUpdate:
        """All weights under Hugging Face names. Every rank must pull the buckets, and each gets all of them.

        Args:
            version: policy version.
            tied: alias -> name.
            master: this rank's float32 copy of one of its parameters.
            check: called before each bucket; raises if the weights are no longer those of `version`.
        """
        of = {hf: name for name, what in self.parameters.items() if not what.tied for hf in what.names}
        sizes = {hf: 4 * torch.Size(self.shapes[hf]).numel() for hf in of}
        plan = export.bucketed(sizes)

        def buckets() -> Iterator[dict[str, Tensor]]:
            for names in plan:
                check()
                whole: dict[str, Tensor] = {}
                for name in dict.fromkeys(of[hf] for hf in names):
                    whole |= self._gathered(name, master)
                yield {hf: whole[hf] for hf in names}

        return WeightUpdate(
            version=version,
            tensors=tuple(TensorMeta(name=hf, shape=self.shapes[hf], dtype="float32") for hf in sizes),
            buckets=buckets,
            tied=dict(tied),
            fused_groups=export.fused_groups(sizes),
        )

    @torch.no_grad()
    def _gathered(self, name: str, master: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """The whole tensors of one parameter, on every rank: from its stage, its expert's rank, and all cuts of it."""
        what = self.parameters[name]
        pipeline, expert, tensor = layout.pipeline_axis(), layout.expert_axis(), self._axis(what)
        owner = what.expert // self._experts_here if what.expert is not None else expert.rank
        device = next(iter(self.own.values())).device
        own = self.own.get(name)
        cut = torch.empty(self._cut_shape(what, tensor.size), device=device) if own is None else master(own)
        if pipeline.group is not None and owner == expert.rank:
            dist.broadcast(cut, group=pipeline.group, group_src=self._stage[name])
        if expert.group is not None and what.expert is not None:
            dist.broadcast(cut, group=expert.group, group_src=owner)
        return dict(zip(what.names, self._whole(what, cut, tensor), strict=True))

    def _cut_shape(self, what: Parameter, size: int) -> tuple[int, ...]:
        shapes = [list(self.shapes[name]) for name in what.names]
        if what.axis is not None:
            for shape in shapes:
                shape[what.axis] = -(-shape[what.axis] // size)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _whole(self, what: Parameter, cut: Tensor, axis: Axis) -> list[Tensor]:
        cuts = [cut]
        if what.axis is not None and axis.group is not None:
            cuts = [torch.empty_like(cut) for _ in range(axis.size)]
            dist.all_gather(cuts, cut.contiguous(), group=axis.group)
        if what.axis is None:
            return [cut]
        rows = [self.shapes[name][0] // axis.size for name in what.names] if what.axis == 0 else [len(cut)]
        parts = [unpack(one, what.packing, rows, self._head_dim) for one in cuts]
        whole = [torch.cat(pieces, dim=what.axis) for pieces in zip(*parts, strict=True)]
        return [tensor[: self.shapes[name][0]] for name, tensor in zip(what.names, whole, strict=True)]
