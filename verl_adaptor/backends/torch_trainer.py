"""What trainers on a transformers model have in common: all of `TrainerBackend`, for the ranks of a `World`.

The pieces: `sequences` lays rows out, `heads` runs the model, `optimizer` steps, `export` hands weights out,
`checkpoint` saves, `probe` tries at start-up what would fail in silence. As it stands every rank holds the whole model
and sees its data-parallel share of the rows; a backend that shards overrides `_parallelize`, `_backward` and the few
methods that touch tensors.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from transformers import GenerationConfig

from verl_adaptor import batch as batches
from verl_adaptor import memory
from verl_adaptor.backends import adapters, checkpoint, export
from verl_adaptor.backends.causal_lm import load_config, named_tensors
from verl_adaptor.backends.heads import VALUE_HEAD_FILE, Head, load_head
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.backends.probe import check_gradients, check_packing
from verl_adaptor.backends.rollout import RolloutEngine
from verl_adaptor.backends.sums import Sums
from verl_adaptor.backends.world import join, offload, rank_device
from verl_adaptor.capabilities import BackendSpec, Capability
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import TrainerError, UnsupportedCapability, VerlAdaptorError
from verl_adaptor.protocols.engine import InferenceEngine
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, LossOutput, TrainerBackend
from verl_adaptor.samples import WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer


class TorchTrainer(TrainerBackend):
    """One whole model in this process, or on every data-parallel rank.

    Master weights and optimizer state are float32; ``dtype="bfloat16"`` computes under autocast.
    """

    _away: memory.Offloaded | None = None
    _meets_in_every_backward = True
    """Whether the backward pass of every micro-batch waits for other ranks. Then all have to know before it if the loss of one
    has failed. Where ranks run free, to wait for each other there cost a tenth of a step (measured: DDP, gloo)."""

    def __init__(self, path: str, config: TrainerConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self.device = rank_device(config.device, config.parallel.world_size)
        self.world = join(config.parallel, self.device, config.execution.call_timeout_s)
        self.head: Head = load_head(path, config, self.device)
        if config.packing:
            check_packing(self.head)
        if config.trainable and config.activation_checkpointing:
            check_gradients(self.head)
        self._parallelize()
        self.optimizer = self._make_optimizer() if config.trainable else None

    def _parallelize(self) -> None:
        """Shard or wrap `self.head`, which is whole and on every rank the same."""

    def _make_optimizer(self) -> Optimizer:
        trainable = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        return Optimizer(trainable, self.config)

    # -- forward -------------------------------------------------------------------------------------------------

    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        outputs = self._forward(batch)
        return LogProbs(outputs["log_probs"], outputs["entropy"])

    def _compute_values(self, batch: TensorDict) -> Tensor:
        return self._forward(batch)["values"]

    @torch.no_grad()
    def _forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """All outputs, [B, R] on the batch's device, rows in input order: each rank computes its rows and all get all."""
        shape = (len(self.head.outputs), *batch["responses"].shape)
        results = torch.zeros(shape, device=self.device)
        for rows in self._split(batch):
            outputs = self._run(self._micro(batch, rows))
            for index, name in enumerate(self.head.outputs if len(rows) else ()):
                results[index, rows] = outputs[name]
        self.world.data.sum(results)
        return dict(zip(self.head.outputs, results.to(batch["responses"].device), strict=True))

    def _split(self, batch: TensorDict) -> list[Tensor]:
        """Row indices of this rank's micro-batches: the same for log-probs and updates (C20)."""
        return batches.micro_batches(
            batch,
            rank=self.world.data.rank,
            ranks=self.world.data.size,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens_per_micro_batch,
        )

    def _micro(self, batch: TensorDict, rows: Tensor) -> TensorDict:
        return (batch[rows] if len(rows) else batches.idle(batch)).to(self.device)

    def _run(self, micro: TensorDict) -> dict[str, Tensor]:
        """The head's outputs; where the head is wrapped, through the wrapper."""
        outputs: dict[str, Tensor] = self.head(micro)
        return outputs

    # -- training ------------------------------------------------------------------------------------------------

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        sums = Sums()
        self.head.train()  # activation checkpointing works in this mode only; there is no dropout
        try:
            parts = self._split(batch)
            for number, rows in enumerate(parts):
                with self._micro_step(last=number == len(parts) - 1):
                    micro = self._micro(batch, rows)
                    result = self._loss(loss, micro, sums)
                    if self._meets_in_every_backward:
                        sums.check(self.world.everyone, self.device)
                    share = self._aggregate(result.per_token, micro["response_mask"], over)
                    self._backward(share)
                sums.add(share, result.metrics)
            sums.check(self.world.everyone, self.device)
            return sums.total(self.world.data)
        except BaseException:
            self._abandon()
            raise
        finally:
            self.head.eval()

    def _abandon(self) -> None:
        """After a failure in the middle: half a mini-batch must not leak into the next step."""
        self._zero_grad()

    def _micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; `last` in its call: here gradients may be synchronised."""
        return nullcontext()

    def _backward(self, share: Tensor) -> None:
        """Add the gradients of this rank's share of the loss; the shares of all data-parallel ranks add up to it."""
        share.backward()

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def _loss(self, loss: Loss, micro: TensorDict, sums: Sums) -> LossOutput:
        """What the loss function says of one micro-batch; if it fails, a loss of 0, for the ranks that wait for this one."""
        outputs = self._run(micro)
        try:
            return loss(outputs, micro)
        except VerlAdaptorError as error:
            sums.failed(error)
            return LossOutput(0 * torch.stack(list(outputs.values())).sum(0))

    def _aggregate(self, per_token: Tensor, mask: Tensor, over: Denominators) -> Tensor:
        return batches.aggregate(
            per_token, mask, self.config.loss_aggregation, over, scale=self.config.loss_scale_factor
        )

    def _optimizer_step(self) -> dict[str, float]:
        return self._optimizer.step()

    @property
    def _optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise TrainerError("this trainer was made with trainable=False and has no optimizer; make it trainable.")
        return self.optimizer

    # -- weights -------------------------------------------------------------------------------------------------

    def _export_weights(self) -> WeightUpdate:
        tensors, tied = self._tensors()
        check = partial(self.check_exported, self._version)
        update = export.weight_update(tensors, tied, self._version, check=check, gather=self._exported)
        adapters = self.head.adapters
        if adapters is None or self.config.head == "value":
            return update
        base = export.weight_update(tensors, tied, 0, check=check, gather=self._gather)
        return dataclasses.replace(
            update, adapters=adapters.update(base, self._version, check=check, gather=self._gather)
        )

    def _exported(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some of `_tensors` as an engine wants them: whole, adapters merged. A collective on all ranks."""
        whole = self._gather(tensors)
        return whole if self.head.adapters is None else self.head.adapters.merged(whole, self._gather)

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make parameters whole, under the names they are given; here they are. A collective on all ranks."""
        return dict(tensors)

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything under Hugging Face names, a value head under its own."""
        tensors, tied = named_tensors(self.head.model)
        return tensors | self._value_head(prefix="value_head."), tied

    def _value_head(self, prefix: str = "") -> dict[str, Tensor]:
        """The value head's tensors; none for a policy."""
        layer = self.head.get_submodule("value_head") if self.config.head == "value" else None
        return {} if layer is None else {prefix + name: tensor for name, tensor in layer.state_dict().items()}

    def lent_parameters(self) -> dict[str, Tensor] | None:
        """The model's own parameters by its own names, where they are whole on this rank and are what is exported."""
        return None if self.head.adapters is not None else dict(self.head.model.named_parameters())

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, folder: Path) -> None:
        with checkpoint.new(folder, self._facts(), self.world) as partial:
            self._write_state(partial)

    def _load_checkpoint(self, folder: Path) -> None:
        with self.world.together():
            manifest = checkpoint.read_manifest(folder, self._kind())
        with self.world.together():  # only now: reading may be a collective
            self._read_state(folder)
        self._version = int(manifest["policy_version"])
        self._changed = bool(manifest["changed_since_export"])

    checkpoint_format = "verl_adaptor.trainer/2"
    """Changes when another reader could misunderstand a checkpoint."""

    def _kind(self) -> dict[str, Any]:
        """What a checkpoint and the trainer that loads it must have in common; with adapters, their base too."""
        adapters = None if self.head.adapters is None else self.head.adapters.facts
        return {"format": self.checkpoint_format, "head": self.config.head, "adapters": adapters}

    def _facts(self) -> dict[str, Any]:
        """What the manifest says besides the list of files. No random state: training draws no random number."""
        return {
            **self._kind(),
            "policy_version": self._version,
            "changed_since_export": self._changed,
            "optimizer_steps": 0 if self.optimizer is None else self.optimizer.steps,
            "world_size": self.world.size,
            "layout": self.config.parallel.model_dump(exclude_defaults=True),
        }

    def _write_state(self, folder: Path) -> None:
        """Weights and optimizer state; here the first rank's, because all ranks hold the same."""
        if self.world.is_first:
            checkpoint.write_tensors(folder, self._own_tensors())
            if self.optimizer is not None:
                checkpoint.write_optimizer(folder, self.optimizer.state_dict())

    def _read_state(self, folder: Path) -> None:
        """Undo `_write_state`, whatever the number of ranks that wrote it."""
        own = self._own_tensors()
        with self.world.together():  # no rank changes anything unless all could read
            saved = checkpoint.read_tensors(folder, own)
            averages = None if self.optimizer is None else checkpoint.read_optimizer(folder)
        if self.optimizer is not None and averages is not None:
            self.optimizer.load_state_dict(averages)
            self.optimizer.zero_grad()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the module's own names, tied memory once; without an adapters' base."""
        parameters = {name: p.detach() for name, p in self.head.named_parameters()}
        kept = self.head.state_dict().keys()
        tensors = parameters | {name: buffer for name, buffer in self.head.named_buffers() if name in kept}
        return tensors if self.head.adapters is None else adapters.without_base(tensors)

    def save_pretrained(self, folder: Path) -> None:
        """A folder that plain transformers opens, with tokenizer and generation config; a value head lies beside it.

        Raises:
            CheckpointError: `folder` exists and is no model folder.
        """
        self._check_open()
        tensors, value_head = self._whole_tensors()
        with checkpoint.whole_folder(Path(folder), marker="config.json", world=self.world) as partial_folder:
            if self.world.is_first:
                self._write_pretrained(partial_folder, tensors, value_head)

    def _whole_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's tensors under Hugging Face names, adapters merged, and the value head's; needed on the first rank."""
        return self._exported(named_tensors(self.head.model)[0]), self._value_head()

    def _write_pretrained(self, folder: Path, tensors: Mapping[str, Tensor], value_head: Mapping[str, Tensor]) -> None:
        """Weights in float32; config, tokenizer and code as in the folder that the model came from."""
        checkpoint.write_sharded(folder, tensors)
        if value_head:
            save_file(dict(value_head), folder / VALUE_HEAD_FILE)
        config = load_config(self.path, self.config.trust_remote_code)
        config.architectures = [type(self.head.model).__name__]
        config.dtype = torch.float32
        config.save_pretrained(folder)
        tokenizer = load_tokenizer(self.path, self.config.trust_remote_code)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        generation = getattr(self.head.model, "generation_config", None)
        if isinstance(generation, GenerationConfig):  # not its save_pretrained: that refuses what it once loaded
            generation.to_json_file(folder / "generation_config.json", use_diff=True)
        if self.config.trust_remote_code and Path(self.path).is_dir():
            for code in Path(self.path).glob("*.py"):
                shutil.copy2(code, folder)

    def _save_adapter(self, folder: Path) -> None:
        own = self.head.adapters
        if own is None:
            raise self._unsupported(Capability.LORA)
        tensors, value_head = self._gather(own.tensors()), self._value_head()
        with checkpoint.whole_folder(folder, marker=adapters.MARKER, world=self.world) as partial_folder:
            if self.world.is_first:
                own.write(partial_folder, tensors, self.path)
                if value_head:
                    save_file(dict(value_head), partial_folder / VALUE_HEAD_FILE)

    # -- memory and views ----------------------------------------------------------------------------------------

    def reference(self) -> TrainerBackend:
        """See `TrainerBackend.reference`."""
        self._check_open()
        if self.config.head != "policy":
            raise UnsupportedCapability("a critic has no reference policy; ask the actor for one.")
        if self.head.adapters is not None:
            return adapters.ReferenceView(self, self.head.adapters)
        config = self.config.replace(trainable=False, activation_checkpointing=False)
        return type(self)(self.path, config, self.options, self.spec)

    def _rollout_engine(self, config: EngineConfig, settings: Mapping[str, Any]) -> InferenceEngine:
        return RolloutEngine(self, config)

    def _offload(self, tier: str) -> None:
        self._away = offload(self.world, self._state_tensors(), tier)

    def _onload(self) -> None:
        if self._away is not None:
            with self.world.together():
                self._away.restore()
            self._away = None

    def _state_tensors(self) -> Iterator[Tensor]:
        """All that this rank holds between two calls: parameters, gradients, buffers, optimizer state."""
        for parameter in self.head.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.head.buffers()
        if self.optimizer is not None:
            yield from self.optimizer.parameters.values()  # where these are not the head's own, they share its memory
            for averages in self.optimizer.state_dict()["state"].values():
                yield from averages.values()

    # -- life ----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        if self._away is not None:
            self._away.close()
        del self.head
        self.optimizer = None
        gc.collect()  # shards, hooks and optimizer refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
