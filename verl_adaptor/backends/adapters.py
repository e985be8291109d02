"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft, and the reference policy that lies beneath them.

A layer with weight W computes W x + s B (A x), s = lora_alpha / lora_rank; only A and B are trained. B starts at 0, so
that the policy starts as its base; A is drawn from a generator of its own, so that every rank draws the same.

peft is imported only where ``lora_rank`` is set.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from verl_adaptor.backends.causal_lm import checkpoint_names, is_adapter, named_tensors, unwrapped
from verl_adaptor.backends.export import weight_update
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import BackendNotInstalled, ConfigError, ModelError, TrainerError, nearest
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, TrainerBackend
from verl_adaptor.samples import AdapterUpdate, WeightUpdate

if TYPE_CHECKING:
    from tensordict import TensorDict

MARKER = "adapter_config.json"
"""What tells a folder of adapters; peft's name."""
_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
"""Of our one adapter a layer, within peft."""
_SAMPLED = 256
"""Values of each tensor that go into a base's fingerprint."""

Gather = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Makes parameters whole that may be sharded."""


def require_peft() -> Any:
    """The module. Raises `BackendNotInstalled` with the install command."""
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise BackendNotInstalled(
            f"lora_rank needs peft, which cannot be imported ({error}); install it with: pip install peft, or leave "
            "lora_rank out to train all weights."
        ) from error


class Adapters:
    """The adapters of one model, put in when this is made: the model's own weights are frozen from then on.

    Raises:
        ConfigError: `lora_target_modules` names no layer, or one that cannot have adapters.
        ModelError: a layer's weight is kept in another layout than its checkpoint's.
    """

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        peft = require_peft()
        fingerprint = _fingerprint(model)
        targets, transposed = _targets(model, config.lora_target_modules)
        self._config = peft.LoraConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha or config.lora_rank,
            target_modules=targets,
            fan_in_fan_out=transposed,
            task_type="CAUSAL_LM" if config.head == "policy" else None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would reach CUDA's generators too
            peft.inject_adapter_in_model(self._config, model, adapter_name=_NAME)
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
        self._weights = {_checkpoint_name(model, name, layer): name for name, layer in self._layers.items()}
        for tensor in self.tensors().values():
            tensor.requires_grad_(config.trainable)
        self.facts = {
            "rank": config.lora_rank,
            "alpha": float(self._config.lora_alpha),
            "layers": len(self._layers),
            "base": fingerprint,
        }
        """What a checkpoint of adapters says about them: it is of use over the same base only."""

    def tensors(self) -> dict[str, nn.Parameter]:
        """A and B of each layer, by the names within the model."""
        return {
            part: layer.get_parameter(part.removeprefix(f"{name}."))
            for name, layer in self._layers.items()
            for part in _parts(name)
        }

    def merged(self, tensors: Mapping[str, Tensor], gather: Gather) -> dict[str, Tensor]:
        """Whole weights under Hugging Face names -> the same with W + s B A in place of W; others are not copied."""
        own = self.tensors()
        layers = {name: self._weights[name] for name in tensors if name in self._weights}
        parts = gather({part: own[part] for layer in layers.values() for part in _parts(layer)})
        return {n: self._merge(layers[n], t, parts) if n in layers else t for n, t in tensors.items()}

    @torch.no_grad()
    def _merge(self, layer: str, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        a, b = (parts[part].to(weight.device).float() for part in _parts(layer))
        change = b @ a * self._layers[layer].scaling[_NAME]
        return weight + (change.T if self._layers[layer].fan_in_fan_out else change).to(weight.dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone computes within this block; for forward passes without gradient."""
        # peft's enable_adapters() would also flip requires_grad, which sharding frameworks read once
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    def update(self, base: WeightUpdate, version: int, *, check: Callable[[], None], gather: Gather) -> AdapterUpdate:
        """What an engine needs that takes adapters without their base; as `export.weight_update`."""
        parts = {_plain_name(part): part for part in self.tensors()}

        def whole(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
            own = self.tensors()
            return gather({name: own[parts[name]] for name in wanted})

        weights = weight_update(self._outline(), {}, version, check=check, gather=whole)
        return AdapterUpdate(rank=self._config.r, alpha=float(self._config.lora_alpha), base=base, weights=weights)

    def _outline(self) -> dict[str, Tensor]:
        """Meta tensors of A and B as they are whole: a parameter may be a shard, which does not tell."""
        outline = {}
        for name, layer in self._layers.items():
            shapes = (self._config.r, layer.in_features), (layer.out_features, self._config.r)
            for part, shape in zip(_parts(name), shapes, strict=True):
                dtype = layer.get_parameter(part.removeprefix(f"{name}.")).dtype
                outline[_plain_name(part)] = torch.empty(shape, dtype=dtype, device="meta")
        return outline

    def write(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Whole `tensors` (as named by `tensors()`) and their config, as ``peft.PeftModel.from_pretrained`` reads them."""
        named = {f"base_model.model.{_plain_name(name)}": t for name, t in tensors.items()}
        save_file({name: t.detach().contiguous() for name, t in named.items()}, folder / _WEIGHTS, {"format": "pt"})
        self._config.base_model_name_or_path = base
        self._config.save_pretrained(folder)


def _parts(layer: str) -> tuple[str, str]:
    """The names of a layer's A and B within the model."""
    return f"{layer}.lora_A.{_NAME}.weight", f"{layer}.lora_B.{_NAME}.weight"


def _plain_name(part: str) -> str:
    """A part's name without peft's name of the adapter."""
    return part.replace(f".{_NAME}.", ".")


def without_base(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors by its own names -> those that differ from the model as it was loaded: adapters, value head."""
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name) or not name.startswith("model.")}


class ReferenceView(TrainerBackend):
    """The policy beneath a trainer's adapters: the same weights, no copy. Closing it leaves the trainer as it is."""

    def __init__(self, trainer: TrainerBackend, adapters: Adapters) -> None:
        config = trainer.config.replace(trainable=False, lora_rank=None, lora_alpha=None, lora_target_modules=None)
        super().__init__(trainer.path, config, trainer.options, trainer.spec)
        self._trainer = trainer
        self._adapters = adapters

    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        with self._adapters.off():
            return self._trainer.compute_log_probs(batch)

    def save_pretrained(self, folder: Path) -> None:
        """Refused, like all that is not `compute_log_probs`."""
        self._refuse()

    def _compute_values(self, batch: TensorDict) -> NoReturn:
        self._refuse()

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> NoReturn:
        self._refuse()

    def _optimizer_step(self) -> NoReturn:
        self._refuse()

    def _export_weights(self) -> WeightUpdate:
        self._refuse()

    def _save_checkpoint(self, folder: Path) -> None:
        self._refuse()

    def _load_checkpoint(self, folder: Path) -> None:
        self._refuse()

    def _save_adapter(self, folder: Path) -> None:
        self._refuse()

    def _offload(self, tier: str) -> None:
        self._refuse()

    def _release(self) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise TrainerError(
            f"a reference only computes log-probs: its weights are those of {self.path}, and the trainer's."
        )


# -- which layers ------------------------------------------------------------------------------------------------


def _targets(model: PreTrainedModel, wanted: tuple[str, ...] | None) -> tuple[list[str], bool]:
    """The layers to adapt, as peft takes them, and whether they keep their weights transposed (GPT-2's do)."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    if wanted is None:
        head = model.get_output_embeddings()
        chosen = {name: module for name, module in linear.items() if module is not head}
        names = _short({name for name, _ in model.named_modules()}, set(chosen))
    else:
        names = sorted(set(wanted))
        chosen = {n: linear[n] for target in names for n in _named(target, model, linear)}
    if not chosen:
        raise ConfigError(f"{type(model).__name__} has no linear layers to adapt; leave lora_rank out.")
    _check_untied(model, chosen)
    transposed = {isinstance(module, Conv1D) for module in chosen.values()}
    if len(transposed) > 1:
        raise ConfigError(f"lora_target_modules={names} mixes two kinds of layers (Linear, Conv1D); name one kind.")
    return names, transposed.pop()


def _short(known: set[str], chosen: set[str]) -> list[str]:
    """The last parts of the chosen names, as one writes them by hand, where those mean the same layers."""
    tails = {name.rpartition(".")[2] for name in chosen}
    same = {name for name in known if name.rpartition(".")[2] in tails} == chosen
    return sorted(tails if same else chosen)


def _named(target: str, model: PreTrainedModel, linear: Mapping[str, nn.Module]) -> list[str]:
    """The layers that `target` names: in full, or by the end of their names."""
    found = [name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")]
    others = [name for name in found if name not in linear]
    if not found or others:
        known = {name.rpartition(".")[2] for name in linear}
        why = f"is no linear layer ({others[0]})" if others else "is no layer of this model"
        raise ConfigError(f"lora_target_modules: {target!r} {why}; {nearest(target, known)}.")
    return found


def _check_untied(model: PreTrainedModel, chosen: Mapping[str, nn.Module]) -> None:
    table = model.get_input_embeddings()
    tied = [name for name, module in chosen.items() if table is not None and module.weight is table.weight]
    if tied:
        raise ConfigError(
            f"lora_target_modules: {tied[0]} shares its weight with the embedding, which an adapter would tear apart; "
            "leave it out."
        )


def _checkpoint_name(model: PreTrainedModel, name: str, layer: nn.Module) -> str:
    """What the checkpoint calls an adapted layer's weight."""
    names = checkpoint_names(model, unwrapped(f"{name}.base_layer.weight"), layer.get_parameter("base_layer.weight"))
    if len(names) != 1:
        raise ModelError(
            f"{type(model).__name__} keeps {', '.join(names)} in one matrix, which adapters cannot be merged into; leave "
            f"{name.rpartition('.')[2]} out of lora_target_modules."
        )
    return names[0]


def _fingerprint(model: PreTrainedModel) -> str:
    """A checksum over the first values of every tensor: two models that were trained apart have two."""
    tensors, _ = named_tensors(model)
    heads = torch.cat([tensor.flatten()[:_SAMPLED].float() for tensor in tensors.values()])
    return f"{zlib.crc32(heads.cpu().numpy().tobytes()):08x}"
