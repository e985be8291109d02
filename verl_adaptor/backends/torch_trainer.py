"""What trainers on a transformers model have in common: all of `TrainerBackend`, for a head that this process holds.

The pieces: `sequences` lays rows out, `heads` runs the model, `optimizer` steps, `export` hands weights out,
`checkpoint` saves, `probe` tries at start-up what would fail in silence.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from transformers import GenerationConfig

from verl_adaptor import batch as batches
from verl_adaptor.backends import checkpoint, export
from verl_adaptor.backends.causal_lm import load_config, load_tokenizer, named_tensors, resolve_device
from verl_adaptor.backends.heads import VALUE_HEAD_FILE, Head, load_head
from verl_adaptor.backends.optimizer import Optimizer
from verl_adaptor.backends.probe import check_gradients, check_packing
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, TrainerConfig
from verl_adaptor.errors import TrainerError
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, LossOutput, TrainerBackend
from verl_adaptor.samples import WeightUpdate


class TorchTrainer(TrainerBackend):
    """One whole model in this process.

    Master weights and optimizer state are float32; ``dtype="bfloat16"`` computes under autocast.
    """

    def __init__(self, path: str, config: TrainerConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self.device = resolve_device(config.device)
        self.head: Head = load_head(path, config, self.device)
        if config.packing:
            check_packing(self.head)
        self.optimizer: Optimizer | None = None
        if config.trainable:
            if config.activation_checkpointing:
                check_gradients(self.head)
            self.optimizer = Optimizer(dict(self.head.named_parameters()), config)

    # -- forward -------------------------------------------------------------------------------------------------

    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        outputs = self._forward(batch)
        return LogProbs(outputs["log_probs"], outputs["entropy"])

    def _compute_values(self, batch: TensorDict) -> Tensor:
        return self._forward(batch)["values"]

    @torch.no_grad()
    def _forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """All outputs, [B, R] on the batch's device, rows in input order."""
        results = {name: torch.zeros(batch["responses"].shape) for name in self.head.outputs}
        for rows in self._split(batch):
            for name, value in self.head(batch[rows].to(self.device)).items():
                results[name][rows] = value.cpu()
        return {name: value.to(batch["responses"].device) for name, value in results.items()}

    def _split(self, batch: TensorDict) -> list[Tensor]:
        """Row indices of the micro-batches: the same for log-probs and updates (C20)."""
        return batches.split_rows(
            batch,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.max_tokens_per_micro_batch,
        )

    # -- training ------------------------------------------------------------------------------------------------

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        total = 0.0
        sums: dict[str, tuple[float, float]] = {}
        self.head.train()  # activation checkpointing works in this mode only; there is no dropout
        try:
            for rows in self._split(batch):
                micro = batch[rows].to(self.device)
                result = self._loss(loss, micro)
                share = self._aggregate(result.per_token, micro["response_mask"], over)
                share.backward()
                total += share.item()
                for name, (value, weight) in result.metrics.items():
                    old_value, old_weight = sums.get(name, (0.0, 0.0))
                    sums[name] = old_value + float(value.detach()), old_weight + float(weight)
        except BaseException:
            self._optimizer.zero_grad()  # half a mini-batch must not leak into the next step
            raise
        finally:
            self.head.eval()
        return {"loss": total} | {name: value / weight if weight else 0.0 for name, (value, weight) in sums.items()}

    def _loss(self, loss: Loss, micro: TensorDict) -> LossOutput:
        result = loss(self.head(micro), micro)
        expected = micro["responses"].shape
        if result.per_token.shape != expected or not result.per_token.requires_grad:
            raise TrainerError(
                f"the loss returned per_token of shape {tuple(result.per_token.shape)}, requires_grad="
                f"{result.per_token.requires_grad}; it must be {tuple(expected)}, one loss a response token, and depend on "
                f"{' or '.join(self.head.outputs)}."
            )
        return result

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
        return export.weight_update(tensors, tied, self._version, check=partial(self._check_exported, self._version))

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Everything under Hugging Face names, a value head under its own."""
        tensors, tied = named_tensors(self.head.model)
        return tensors | self._value_head(prefix="value_head."), tied

    def _value_head(self, prefix: str = "") -> dict[str, Tensor]:
        """The value head's tensors; none for a policy."""
        layer = self.head.get_submodule("value_head") if self.config.head == "value" else None
        return {} if layer is None else {prefix + name: tensor for name, tensor in layer.state_dict().items()}

    def _check_exported(self, version: int) -> None:
        self._check_open()
        if self._changed or self._version != version:
            raise TrainerError(
                f"the weights of version {version} are gone: the trainer has gone on. Call export_weights() again, and pull "
                "its buckets before the next optimizer step."
            )

    # -- saving --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, folder: Path) -> None:
        facts = {
            "head": self.config.head,
            "world_size": 1,
            "policy_version": self._version,
            "changed_since_export": self._changed,
        }
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        checkpoint.write(folder, self._own_tensors(), optimizer, facts)

    def _load_checkpoint(self, folder: Path) -> None:
        manifest = checkpoint.read_manifest(folder, {"head": self.config.head, "world_size": 1})
        own = self._own_tensors()
        saved = checkpoint.read_tensors(folder, own)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(checkpoint.read_optimizer(folder))
            self.optimizer.zero_grad()
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        self._version = int(manifest["policy_version"])
        self._changed = bool(manifest["changed_since_export"])

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the module's own names, tied memory once."""
        parameters = {name: p.detach() for name, p in self.head.named_parameters()}
        kept = self.head.state_dict().keys()
        return parameters | {name: buffer for name, buffer in self.head.named_buffers() if name in kept}

    def save_pretrained(self, folder: Path) -> None:
        """A folder that plain transformers opens, with tokenizer and generation config; a value head lies beside it.

        Raises:
            CheckpointError: `folder` exists and is no model folder.
        """
        self._check_open()
        tensors, _ = named_tensors(self.head.model)
        with checkpoint.whole_folder(Path(folder), marker="config.json") as partial_folder:
            self._write_pretrained(partial_folder, tensors, self._value_head())

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

    # -- life ----------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        del self.head
        self.optimizer = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
