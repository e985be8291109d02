"""Trainer checkpoints: a folder that is there whole or not at all (law T5, C12).

    actor/
        manifest.json       format, head, policy version, optimizer steps, world size, layout; size of each other file
        model.safetensors   float32 master weights, under the module's own names
        optimizer.pt        AdamW's averages and the position in the schedule, by parameter name

A backend with a format of its own writes its files in place of the last two, under a manifest of the same kind. The
position in the data belongs to the run, which keeps it beside this folder (`verl_adaptor.ppo.checkpoints`).

No random state is saved, because training draws no random number: dropout is 0 and a value head is seeded when made.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl_adaptor.backends.world import World
from verl_adaptor.errors import CheckpointError

_WITNESS = ".seen-by-all-ranks"
MANIFEST = "manifest.json"
"""Written last; a folder without it is no checkpoint."""
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.pt"


@contextmanager
def new(folder: Path, facts: Mapping[str, Any], world: World) -> Iterator[Path]:
    """Yield an empty folder that all ranks write into; the first adds the manifest with `facts`, last of all.

    Raises:
        CheckpointError: `folder` exists and is no checkpoint, or a rank could not write.
    """
    with whole_folder(folder, marker=MANIFEST, world=world) as partial:
        with world.together():
            yield partial
        if world.is_first:
            files = {file.relative_to(partial).as_posix(): file.stat().st_size for file in _files(partial)}
            manifest = json.dumps({**facts, "files": files}, indent=1)
            (partial / MANIFEST).write_text(manifest, encoding="utf-8")


@contextmanager
def whole_folder(folder: Path, *, marker: str, world: World | None = None) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; at the end it is on disk and takes the place of `folder`.

    With several ranks all enter and leave together; the first makes and renames.

    Raises:
        CheckpointError: `folder` exists and is not one of ours (no file `marker` in it): it is not overwritten.
    """
    world, folder = world or World(), folder.absolute()
    token = world.broadcast(os.getpid())
    partial, old = (folder.with_name(f".{folder.name}.{kind}-{token}") for kind in ("partial", "old"))
    try:
        with world.together():
            if world.is_first:
                _make(partial, folder, marker)
                (partial / _WITNESS).touch()
        with world.together():
            if not (partial / _WITNESS).exists():
                raise CheckpointError(
                    f"host {socket.gethostname()} does not see {partial}, which the first rank made; save to a file system "
                    "that all hosts share."
                )
        with world.together():
            if world.is_first:
                (partial / _WITNESS).unlink()
        with world.together():
            yield partial
        with world.together():
            if world.is_first:
                _put_in_place(partial, folder, old)
    finally:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)


def _make(partial: Path, folder: Path, marker: str) -> None:
    if folder.exists() and not (folder / marker).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and holds something else (no {marker}); save to a new folder.")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _put_in_place(partial: Path, folder: Path, old: Path) -> None:
    """Wait until the disk has it (a rename may outlive a power cut that the data does not), then rename."""
    for path in (*partial.rglob("*"), partial):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Weights under the module's own names."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def write_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """Optimizer state of tensors and plain Python values only: it is read with ``weights_only``."""
    torch.save(dict(state), folder / OPTIMIZER)


def write_sharded(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """``model.safetensors`` as transformers writes it; above 5 GB in several files with an index."""
    plan = split_torch_state_dict_into_shards(dict(tensors))
    for file, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def read_manifest(folder: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, after checking that every file is there in full and that `expected` facts hold (C11, C12).

    Raises:
        CheckpointError: no checkpoint, half of one, one with files that it does not list, or of another kind.
    """
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}: it is no checkpoint, or half of one; give another folder."
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error!r}); use an older checkpoint.") from error
    for key, value in expected.items():
        if manifest.get(key) != value:
            raise CheckpointError(
                f"{folder} has {key}={manifest.get(key)!r}; this trainer needs {value!r}: load it where it was made."
            )
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise CheckpointError(
                f"{folder / name} is {'missing' if found is None else f'{found} bytes'} where {size} bytes were written; "
                "use an older checkpoint."
            )
    foreign = sorted({file.relative_to(folder).as_posix() for file in _files(folder)} - {MANIFEST, *files})
    if foreign:
        raise CheckpointError(f"{folder} holds {foreign[0]}, which its {MANIFEST} does not list; remove it.")
    return manifest


def read_tensors(folder: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The saved tensors, on the CPU, after checking names, shapes and types against the model's."""
    try:
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read ({error}); use an older checkpoint.") from error
    wrong = sorted(wanted.keys() ^ saved.keys()) or [
        name for name, t in wanted.items() if (saved[name].shape, saved[name].dtype) != (t.shape, t.dtype)
    ]
    if wrong:
        raise CheckpointError(f"{folder} is of another model: {', '.join(wrong[:3])} ({len(wrong)} in all) do not fit.")
    return saved


def read_optimizer(folder: Path) -> dict[str, Any]:
    """The saved optimizer state, on the CPU."""
    if not (folder / OPTIMIZER).is_file():
        raise CheckpointError(f"{folder} was saved with trainable=false: no optimizer state to resume from.")
    try:
        return torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        raise CheckpointError(f"{folder / OPTIMIZER} cannot be read ({error}); use an older checkpoint.") from error
