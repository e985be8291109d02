"""The megatron trainer: Megatron's models, schedules and optimizers under this package's contract."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from verl_adaptor import memory
from verl_adaptor.backends.causal_lm import load_config
from verl_adaptor.backends.heads import VALUE_HEAD_FILE
from verl_adaptor.backends.megatron import shim
from verl_adaptor.backends.world import World, check_world_size, ensure_process_group, offload, rank_device
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import ConfigError, ModelError, TrainerError, UnsupportedCapability
from verl_adaptor.protocols.engine import InferenceEngine
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, TrainerBackend
from verl_adaptor.samples import WeightUpdate

with shim.quiet():  # Megatron's modules warn when they are imported
    from verl_adaptor.backends.megatron import layout, saving
    from verl_adaptor.backends.megatron.layout import Layout
    from verl_adaptor.backends.megatron.model import build_chunks, expert_count, head_dim, transformer_config
    from verl_adaptor.backends.megatron.names import FAMILIES, parameters
    from verl_adaptor.backends.megatron.optimizer import MegatronOptimizer
    from verl_adaptor.backends.megatron.options import MegatronTrainerOptions
    from verl_adaptor.backends.megatron.schedule import Schedule
    from verl_adaptor.backends.megatron.weights import Source, Weights

P = ParamSpec("P")
R = TypeVar("R")


def _pretending(
    method: Callable[Concatenate[MegatronTrainer, P], R],
) -> Callable[Concatenate[MegatronTrainer, P], R]:
    """The method runs inside the CPU shim."""

    @wraps(method)
    def inside(self: MegatronTrainer, *args: P.args, **kwargs: P.kwargs) -> R:
        with shim.active():
            return method(self, *args, **kwargs)

    return inside


class MegatronTrainer(TrainerBackend):
    """One rank of a model that Megatron spreads over all ranks of the world.

    Master weights and optimizer state are float32; ``dtype="bfloat16"`` keeps a copy of the weights in bfloat16 and
    computes with that; norms, attention's softmax and, without Transformer Engine, the residual stream stay float32.

    Raises:
        ConfigError: trainers of another layout are open in this process, or the world has another size.
        ModelError: the folder holds no model that is mapped here.
    """

    _away: memory.Offloaded | None = None

    def __init__(self, path: str, config: TrainerConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        own = options if isinstance(options, MegatronTrainerOptions) else MegatronTrainerOptions()
        self.layout = Layout.of(config.parallel, own)
        self.device = rank_device(config.device, config.parallel.world_size)
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                f"device={config.device!r}: Megatron takes the GPU wherever there is one; use 'auto' or 'cuda', or hide the GPUs "
                "with CUDA_VISIBLE_DEVICES=''."
            )
        check_world_size(config.parallel.world_size)
        ensure_process_group(self.device, config.execution.call_timeout_s)
        self.world = World(dist.get_rank(), dist.get_world_size())
        with shim.active():
            layout.acquire(self.layout, config.execution.call_timeout_s)
            try:
                self._build()
            except BaseException:
                layout.release()
                raise

    def _build(self) -> None:
        source = Source(self.path)
        self.model = load_config(self.path, self.config.trust_remote_code).get_text_config()
        if self.model.model_type not in FAMILIES:
            raise ModelError(
                f"{self.path}: megatron has no name mapping for {self.model.model_type}; it has {', '.join(FAMILIES)}."
            )
        settings = transformer_config(self.model, self.config, self.layout)
        with torch.random.fork_rng(devices=[]):
            self.chunks = build_chunks(self.model, self.config, settings, self.device)
        for chunk in self.chunks:
            chunk.requires_grad_(self.config.trainable).eval()
        self.optimizer = MegatronOptimizer(self.chunks, settings, self.config) if self.config.trainable else None
        self.weights = self._weights(source)
        for parameter, value in self.weights.read(source):
            self.assign(parameter, "param", value)
        for parameter, value in self._value_head(source.folder):
            self.assign(parameter, "param", value)
        self.schedule = Schedule(self.chunks, self.optimizer, self.model, self.config, self.device)

    def _weights(self, source: Source) -> Weights:
        value = self.config.head == "value"
        wanted = parameters(
            FAMILIES[self.model.model_type],
            layers=self.model.num_hidden_layers,
            experts=expert_count(self.model),
            head=self.config.head,
            tied=bool(self.model.tie_word_embeddings),
        )
        own_head = {"value_head.weight": (1, self.model.hidden_size), "value_head.bias": (1,)} if value else {}
        names = {name for what in wanted.values() for name in what.names} - own_head.keys()
        shapes = {name: source.shape(name) for name in names}
        return Weights(wanted, self.chunks, shapes | own_head, head_dim(self.model), expert_count(self.model))

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, kind: str, value: Tensor) -> None:
        """Set a weight (``param``), or an average of the optimizer's, of this rank. Undoes `whole`."""
        if value.shape != parameter.shape:
            raise ModelError(
                f"{self.path}: a weight of shape {tuple(value.shape)} stands where config.json asks for "
                f"{tuple(parameter.shape)}; copy the folder again."
            )
        if self.optimizer is None:
            parameter.copy_(value)
        else:
            self.optimizer.assign(parameter, kind, value)

    def whole(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """The float32 master of a weight of this rank, or its average; see `MegatronOptimizer.whole`."""
        if kind == "param":
            return self._master(parameter)
        if self.optimizer is None:
            raise TrainerError(f"this trainer was made with trainable=False and has no {kind}; make it trainable.")
        return self.optimizer.whole(parameter, kind)

    def _value_head(self, folder: Path) -> list[tuple[nn.Parameter, Tensor]]:
        """The value head's parameters on the last stage, saved or drawn as every backend draws them."""
        own = {name: p for name, p in self.weights.own.items() if name.startswith("value_head.")}
        if not own:
            return []
        shapes = self.weights.shapes
        generator = torch.Generator().manual_seed(self.config.seed)
        spread = getattr(self.model, "initializer_range", 0.02)
        weight = torch.empty(shapes["value_head.weight"]).normal_(std=spread, generator=generator)
        values = {"value_head.weight": weight, "value_head.bias": torch.zeros(1)}
        saved = folder / VALUE_HEAD_FILE
        if saved.is_file():
            values = {f"value_head.{name}": tensor for name, tensor in load_file(saved).items()}
        if values.keys() != own.keys():
            raise ModelError(f"{saved} holds {', '.join(values)}; a value head has a weight and a bias.")
        return [(own[name], values[name]) for name in own]

    # -- forward -------------------------------------------------------------------------------------------------

    @_pretending
    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        outputs = self.schedule.forward(batch, ("log_probs", "entropy"))
        return LogProbs(outputs["log_probs"], outputs["entropy"])

    @_pretending
    def _compute_values(self, batch: TensorDict) -> Tensor:
        return self.schedule.forward(batch, ("values",))["values"]

    # -- training ------------------------------------------------------------------------------------------------

    @_pretending
    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        return self.schedule.forward_backward(batch, loss, over)

    @_pretending
    def _optimizer_step(self) -> dict[str, float]:
        if self.optimizer is None:
            raise TrainerError("this trainer was made with trainable=False and has no optimizer; make it trainable.")
        return self.optimizer.step(lambda: self.weights.own)

    # -- weights -------------------------------------------------------------------------------------------------

    def _export_weights(self) -> WeightUpdate:
        version = self._version
        return self.weights.update(version, self._tied(), self._master, lambda: self.check_exported(version))

    def _tied(self) -> Mapping[str, str]:
        tied = self.model.tie_word_embeddings and self.config.head == "policy"
        return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}

    def _master(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().float() if self.optimizer is None else self.optimizer.master(parameter)

    # -- saving --------------------------------------------------------------------------------------------------

    def whole_weights(self) -> Iterator[dict[str, Tensor]]:
        """All weights under Hugging Face names, bucket by bucket; a collective on all ranks."""
        return self.weights.update(0, self._tied(), self._master, lambda: None).buckets()

    @property
    def architecture(self) -> str:
        """The transformers class of what is saved: a critic's backbone has no language-model head."""
        kinds = AutoModelForCausalLM if self.config.head == "policy" else AutoModel
        kind: Any = kinds._model_mapping[type(self.model)]
        return str(kind.__name__)

    @property
    def changed_since_export(self) -> bool:
        """Whether the weights are newer than `policy_version`."""
        return self._changed

    def resume(self, manifest: Mapping[str, Any]) -> None:
        """Take up the versions, and the place in the schedule, of a checkpoint whose tensors are loaded."""
        self._version, self._changed = int(manifest["policy_version"]), bool(manifest["changed_since_export"])
        if self.optimizer is not None:
            self.optimizer.place_at(int(manifest["optimizer_steps"]))
            self.optimizer.zero_grad()

    @_pretending
    def _save_checkpoint(self, folder: Path) -> None:
        saving.save_checkpoint(folder, self)

    @_pretending
    def _load_checkpoint(self, folder: Path) -> None:
        saving.load_checkpoint(folder, self)

    @_pretending
    def save_pretrained(self, folder: Path) -> None:
        """A folder that plain transformers opens, written by the first rank; a value head lies beside it.

        Raises:
            CheckpointError: `folder` exists and is no model folder.
        """
        self._check_open()
        saving.save_pretrained(Path(folder), self)

    # -- memory and views ----------------------------------------------------------------------------------------

    def reference(self) -> TrainerBackend:
        """See `TrainerBackend.reference`."""
        self._check_open()
        if self.config.head != "policy":
            raise UnsupportedCapability("a critic has no reference policy; ask the actor for one.")
        frozen = self.config.parallel.replace(zero_stage=None)
        config = self.config.replace(trainable=False, activation_checkpointing=False, parallel=frozen)
        return type(self)(self.path, config, self.options, self.spec)

    def _rollout_engine(self, config: EngineConfig, settings: Mapping[str, Any]) -> InferenceEngine:
        from verl_adaptor.backends.megatron.engine import ShardEngine  # which stands on this module

        if config.dtype != self.config.dtype:
            raise ConfigError(
                f"dtype={config.dtype!r}: the engine computes with the trainer's {self.config.dtype} shards."
            )
        return ShardEngine(self, config, self.spec)

    def _offload(self, tier: str) -> None:
        self._away = offload(self.world, self._state_tensors(), tier)

    def _onload(self) -> None:
        if self._away is not None:
            with self.world.together():
                self._away.restore()
            self._away = None

    def _state_tensors(self) -> Iterator[Tensor]:
        """All that this rank holds between two calls."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()
        if self.optimizer is not None:
            yield from self.optimizer.tensors()

    # -- life ----------------------------------------------------------------------------------------------------

    @_pretending
    def _release(self) -> None:
        if self._away is not None:
            self._away.close()
        del self.schedule, self.weights, self.chunks
        self.optimizer = None
        layout.release()
        gc.collect()  # chunks, their gradient buffers and hooks refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
