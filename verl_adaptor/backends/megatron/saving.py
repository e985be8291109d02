"""Checkpoints in Megatron's distributed format, and Hugging Face folders.

A checkpoint is what ``megatron.core.dist_checkpointing`` writes: every rank its share, under names that do not depend on
the layout, so that it loads at another tensor, pipeline or data-parallel size. Beside it lies the manifest that every
backend writes, last::

    actor/
        manifest.json           head, versions, optimizer steps, layout; size of each other file
        .metadata               which part of which tensor lies where  (pickled)
        __0_0.distcp ...        the tensors, read with ``weights_only``
        common.pt, metadata.json

``.metadata`` is a pickle that PyTorch reads without restrictions. So it is first read here by an unpickler that knows
PyTorch's own metadata classes and nothing else, and may name tensors only: a file that would call anything is refused
before it is opened a second time. ``common.pt`` is read with ``weights_only``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import GenerationConfig

from verl_adaptor.backends import checkpoint
from verl_adaptor.backends.causal_lm import load_config
from verl_adaptor.backends.heads import VALUE_HEAD_FILE
from verl_adaptor.errors import CheckpointError
from verl_adaptor.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from verl_adaptor.backends.megatron.trainer import MegatronTrainer

FORMAT = "verl_adaptor.megatron/1"
"""Changes when another reader could misunderstand a checkpoint."""


# -- checkpoints -------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, trainer: MegatronTrainer) -> None:
    """All ranks write their shares."""
    with checkpoint.new(folder, _facts(trainer), trainer.world) as partial:
        dist_checkpointing.save(_state(trainer), str(partial), _InThisProcess("torch_dist", 1))


class _InThisProcess(TorchDistSaveShardedStrategy):
    """Megatron's own writer starts processes that import the main script again: nothing that a trainer may do to one."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors, in the format that Megatron reads."""
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )
        for file in Path(checkpoint_dir).glob(f"__{dist.get_rank()}_*.distcp"):
            if not file.stat().st_size:  # another data-parallel rank has written all that this one holds
                file.unlink()


def load_checkpoint(folder: Path, trainer: MegatronTrainer) -> None:
    """Undo `save_checkpoint`, at the same or another layout. Raises `CheckpointError` on all ranks alike."""
    with trainer.world.together():
        manifest = checkpoint.read_manifest(folder, _kind(trainer))
        if trainer.optimizer is not None and not manifest["trainable"]:
            raise CheckpointError(f"{folder} was saved with trainable=false: no optimizer state to resume from.")
        _check_pickle(folder / ".metadata")
    with trainer.world.together():
        try:
            loaded = dist_checkpointing.load(_state(trainer, copied=True), str(folder))
        except (Exception, CheckpointException) as error:  # the second is a BaseException; a broken file leads to any
            raise CheckpointError(f"{folder} cannot be loaded ({error!r}); use an older checkpoint.") from error
    for key, entry in _entries(trainer).items():
        for kind in _kinds(trainer):
            trainer.assign(entry.data, kind, loaded[f"{key}.{kind}"])
    trainer.resume(manifest)


def _kind(trainer: MegatronTrainer) -> dict[str, Any]:
    return {"format": FORMAT, "head": trainer.config.head}


def _facts(trainer: MegatronTrainer) -> dict[str, Any]:
    optimizer = trainer.optimizer
    return {
        **_kind(trainer),
        "policy_version": trainer.policy_version,
        "changed_since_export": trainer.changed_since_export,
        "optimizer_steps": 0 if optimizer is None else optimizer.steps,
        "trainable": optimizer is not None,
        "world_size": trainer.world.size,
        "layout": trainer.config.parallel.model_dump(exclude_defaults=True),
    }


def _state(trainer: MegatronTrainer, *, copied: bool = False) -> ShardedStateDict:
    """This rank's share of the weights and AdamW's averages, float32, under names of the whole model.

    Weights and averages of a parameter have one shape and are stored alike, whoever holds which part of them: so it does
    not matter whether one of the two trainers shares its optimizer among ranks, or computes in bfloat16.

    Args:
        trainer: whose.
        copied: to read into: a file that breaks off half-way must not have changed the trainer.
    """

    def tensor(parameter: nn.Parameter, kind: str) -> Tensor:
        whole = trainer.whole(parameter, kind).contiguous()
        return whole.clone() if copied else whole

    return {
        f"{key}.{kind}": make_sharded_optimizer_tensor(entry, tensor(entry.data, kind), kind)
        for key, entry in _entries(trainer).items()
        for kind in _kinds(trainer)
    }


def _kinds(trainer: MegatronTrainer) -> tuple[str, ...]:
    return ("param",) if trainer.optimizer is None else ("param", "exp_avg", "exp_avg_sq")


def _entries(trainer: MegatronTrainer) -> ShardedStateDict:
    """Each parameter of this rank, with the place that Megatron gives it in the whole model."""
    return {
        f"{number}.{name}": entry
        for number, chunk in enumerate(trainer.chunks)
        for name, entry in chunk.sharded_state_dict().items()
        if not name.endswith("_extra_state")  # of layers: it is empty, and would be pickled
    }


# -- what may be unpickled ---------------------------------------------------------------------------------------

_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},  # a name -> that layout
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


class _MetadataOnly(pickle.Unpickler):
    """Knows the classes that describe tensors, and torch's types; anything else is not looked up."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of those."""
        if name in _ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _check_pickle(file: Path) -> None:
    """Raise `CheckpointError` unless the file describes tensors and nothing else."""
    try:
        with file.open("rb") as stream:
            described = _MetadataOnly(stream).load().state_dict_metadata
    except Exception as error:  # a broken pickle raises whatever it leads to
        raise CheckpointError(f"{file} is no description of tensors ({error}); use an older checkpoint.") from error
    others = [name for name, what in described.items() if not isinstance(what, TensorStorageMetadata)]
    if others:
        raise CheckpointError(
            f"{file} names {others[0]}, which is no tensor and would be unpickled; use an older checkpoint."
        )


# -- Hugging Face folders ----------------------------------------------------------------------------------------


def save_pretrained(folder: Path, trainer: MegatronTrainer) -> None:
    """All ranks gather; the first keeps what comes and writes."""
    tensors: dict[str, Tensor] = {}
    for bucket in trainer.whole_weights():
        if trainer.world.is_first:
            tensors |= {name: tensor.cpu() for name, tensor in bucket.items()}
    with checkpoint.whole_folder(folder, marker="config.json", world=trainer.world) as partial:
        if trainer.world.is_first:
            _write_pretrained(partial, tensors, trainer)


def _write_pretrained(folder: Path, tensors: dict[str, Tensor], trainer: MegatronTrainer) -> None:
    """Weights in float32; config, tokenizer and code as in the folder that the model came from."""
    trust, path = trainer.config.trust_remote_code, trainer.path
    prefix = "value_head."
    head = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    checkpoint.write_sharded(folder, {n: tensor for n, tensor in tensors.items() if not n.startswith(prefix)})
    if head:
        save_file(head, folder / VALUE_HEAD_FILE)
    config = load_config(path, trust)
    config.architectures = [trainer.architecture]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    tokenizer = load_tokenizer(path, trust)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the model has none
        return
    generation.to_json_file(folder / "generation_config.json", use_diff=True)
