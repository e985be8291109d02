"""Sharded state in the format of torch.distributed.checkpoint (DCP): each rank writes its shards, any layout reads them.

    actor/
        .metadata              DCP's table: name -> shape, type, and where each shard lies
        __0_0.distcp, ...      the shards, one file a rank
        manifest.json          see `verl_adaptor.backends.checkpoint`

DCP pickles its table. It is read here with an unpickler that knows the dozen classes such a table is made of and nothing
else; DCP itself reads the shards with ``weights_only``. A table that holds anything but tensors is refused, because DCP
would unpickle the rest freely.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from verl_adaptor.backends.fsdp import shards
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.errors import CheckpointError

WEIGHT, AVERAGE, STEPS = "weight", "optimizer", "optimizer.steps"
"""First parts of the names in the table: ``weight/NAME``, ``optimizer/KEY/NAME``."""


def write(
    folder: Path, tensors: Mapping[str, Tensor], optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Save in `folder`, which is empty; a collective.

    Args:
        tensors: shards, and tensors that are the same on all ranks, by the module's own names.
        optimizer: over the local parts of `parameters`; None saves no optimizer state.
        parameters: by the same names, the shards that the optimizer's are the local parts of.
    """
    state = {f"{WEIGHT}/{name}": tensor.detach() for name, tensor in tensors.items()}
    if optimizer is not None:
        state |= _averages(optimizer.state_dict()["state"], parameters)
        state[STEPS] = torch.tensor(optimizer.steps)
    with _our_errors(folder):
        save(state, storage_writer=Shelf(folder, sync_files=False))  # our caller syncs them all


def read(
    folder: Path, tensors: Mapping[str, Tensor], optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Undo `write`, in place and in any layout; a collective. Nothing changes unless everything could be read.

    Raises:
        CheckpointError: of another model, without the optimizer state that is needed, or unreadable.
    """
    table = Table(folder)
    names = _names(table, folder)
    state = {f"{WEIGHT}/{name}": _empty(tensor) for name, tensor in tensors.items()}
    if optimizer is not None:
        if STEPS not in names:
            raise CheckpointError(f"{folder} was saved with trainable=false: no optimizer state to resume from.")
        state |= _empty_averages(names, optimizer, parameters)
        state[STEPS] = torch.tensor(0)
    _check_names(folder, names, state, all_averages=optimizer is not None)
    with _our_errors(folder):
        load(state, storage_reader=table)
    if optimizer is not None:
        optimizer.load_state_dict({"steps": int(state[STEPS]), "state": _local_averages(state, optimizer)})
        optimizer.zero_grad()
    with torch.no_grad():
        for name, tensor in tensors.items():
            shards.local(tensor).copy_(shards.local(state[f"{WEIGHT}/{name}"]))


# -- optimizer state ---------------------------------------------------------------------------------------------


def _averages(state: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's averages as shards of the same layout as their parameter's."""
    return {
        f"{AVERAGE}/{key}/{name}": _like(parameters[name], value) if value.ndim else value
        for name, values in state.items()
        for key, value in values.items()
    }


def _empty_averages(
    names: Mapping[str, torch.Size], optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Room for the averages that were saved; a parameter that had no gradient yet has none."""
    room: dict[str, Tensor] = {}
    for name, size in names.items():
        kind, _, rest = name.partition("/")
        owner = rest.partition("/")[2]
        if kind == AVERAGE and owner in optimizer.parameters:
            room[name] = _empty(parameters[owner]) if len(size) else torch.zeros(())
    return room


def _local_averages(state: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    averages: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        kind, _, rest = name.partition("/")
        key, _, owner = rest.partition("/")
        if kind == AVERAGE:
            averages.setdefault(owner, {})[key] = shards.local(value)
    return averages


def _empty(tensor: Tensor) -> Tensor:
    """Room for the same shard."""
    return _like(tensor, torch.empty_like(shards.local(tensor)))


def _like(layout: Tensor, part: Tensor) -> Tensor:
    """`part`, this rank's, as a shard of the same layout as `layout`."""
    if not isinstance(layout, DTensor):
        return part
    mesh, placements = layout.device_mesh, layout.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=layout.shape, stride=layout.stride())


# -- the table ---------------------------------------------------------------------------------------------------


class Shelf(FileSystemWriter):
    """DCP's writer, whose table does not say where it was written: a path is pickled differently by each Python."""

    def storage_meta(self) -> StorageMeta:
        """What identifies the checkpoint."""
        return StorageMeta(save_id=self.save_id)


class Table(FileSystemReader):
    """DCP's reader, but for the way it reads its table."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table. Raises `CheckpointError` if it is made of anything that a table of tensors needs not."""
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                metadata: Metadata = _Unpickler(stream).load()
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # the unpickler raises whatever a broken file leads it to
            raise CheckpointError(f"{file} cannot be read ({error}); use another checkpoint.") from error
        return metadata


_DCP = "torch.distributed.checkpoint."
_CLASSES = {
    "torch.Size",
    "torch.serialization._get_layout",
    f"{_DCP}filesystem._StorageInfo",
    *(
        f"{_DCP}metadata.{name}"
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's table of tensors, torch's types, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _CLASSES and not (
            module == "torch" and isinstance(_torch_type(name), torch.dtype)
        ):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return super().find_class(module, name)


def _torch_type(name: str) -> Any:
    return vars(torch).get(name)


def _names(table: Table, folder: Path) -> dict[str, torch.Size]:
    """Name -> shape of the whole tensor, of all that was saved."""
    metadata = table.read_metadata()
    entries, files = metadata.state_dict_metadata, {Path(info.relative_path) for info in metadata.storage_data.values()}
    if not all(isinstance(entry, TensorStorageMetadata) for entry in entries.values()):
        raise CheckpointError(f"{folder} holds more than tensors; use a checkpoint that this backend wrote.")
    if any(file.name != str(file) for file in files):
        raise CheckpointError(f"{folder}: its table points outside; use a checkpoint that this backend wrote.")
    return {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _check_names(
    folder: Path, names: Mapping[str, torch.Size], wanted: Mapping[str, Tensor], *, all_averages: bool
) -> None:
    """What is wanted must be there in its shape, and nothing else; optimizer state may stay unread without an optimizer."""
    saved = {name for name in names if all_averages or name.startswith(f"{WEIGHT}/")}
    wrong = sorted(saved ^ wanted.keys()) or [name for name, t in wanted.items() if names[name] != t.shape]
    if wrong:
        raise CheckpointError(f"{folder} is of another model: {', '.join(wrong[:3])} ({len(wrong)} in all) do not fit.")


@contextmanager
def _our_errors(folder: Path) -> Iterator[None]:
    """DCP gathers what went wrong on any rank into one exception of its own."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{folder}: shards of some rank cannot be read or written ({first!r}).") from error
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: shards cannot be read or written ({error}).") from error
