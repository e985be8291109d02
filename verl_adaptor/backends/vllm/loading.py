"""New weights into a model that vLLM has already prepared for its kernels.

On a CPU vLLM packs each matrix for oneDNN when it loads, and throws the plain one away: writing into the parameters
afterwards changes nothing. So a bucket is loaded as a checkpoint is, into fresh plain matrices by the layers' own weight
loaders (which cut tensor-parallel shards and fuse q, k and v), and then those layers are prepared again, and no other.
vLLM's own `reload_weights` does the same for the whole model at once, in three times the time, and not for a CPU's packed
experts; it is what serves layers that are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from verl_adaptor.memory import reusing

Bucket = Mapping[str, Tensor]


class WholeReload:
    """All layers at once, by vLLM's own machinery: for quantized layers, and devices with kernels of their own."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config

    def begin(self) -> None:
        """Every layer back to the form in which checkpoints are loaded."""
        initialize_layerwise_reload(self._model)

    def load(self, bucket: Bucket) -> None:
        """What a bucket holds of a layer is kept by reference until the layer is whole, so it is copied."""
        with without_adapters(self._model):
            self._model.load_weights((name, tensor.clone()) for name, tensor in bucket.items())

    def finish(self) -> None:
        """Every layer prepared for its kernels."""
        finalize_layerwise_reload(self._model, self._model_config)


class Repacking:
    """Layer by layer, bucket by bucket: a fused group travels whole, so the layers that a bucket touches are whole after it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._packed: dict[Any, dict[str, Tensor]] = {
            layer: _plain(layer) for layer in model.modules() if _is_packed(layer)
        }
        self._heads = _heads(model)
        self._touched: dict[Any, None] = {}
        self._lent: set[int] = set()
        """Ids of parameters whose plain matrix is the bucket's own tensor."""
        self._spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    @staticmethod
    def fits(model: nn.Module) -> bool:
        """Whether every layer that holds weights is one whose preparation is known."""
        return all(_is_known(layer) for layer in model.modules())

    def begin(self) -> None:
        """A stand-in without memory for each packed matrix, which turns into a plain one when the first part of it comes."""
        self._touched.clear()
        for layer in self._packed:
            self._stand_in(layer)

    def load(self, bucket: Bucket) -> None:
        """By the model's own names and weight loaders; then the layers touched are packed."""
        with reusing(), without_adapters(self._model):
            self._load(bucket)

    def _load(self, bucket: Bucket) -> None:
        self._model.load_weights(bucket.items())
        touched, self._touched = self._touched, {}
        for layer in touched:
            self._pack(layer)
        self._lent.clear()

    def _pack(self, layer: Any) -> None:
        plain = {name: getattr(layer, name) for name in self._packed[layer]}
        if isinstance(layer, RoutedExperts):
            layer.quant_method.moe_kernel = None  # else vLLM takes the packed experts for plain ones
        _let_go(layer)
        layer.quant_method.process_weights_after_loading(layer)
        for name, weight in plain.items():
            kept = getattr(layer, name).data_ptr() == weight.data_ptr()  # vLLM multiplies with the plain one
            if id(weight) in self._lent:
                if kept:
                    weight.data = weight.data.clone()
            elif not kept and isinstance(layer, LinearBase):  # packed experts may be views
                self._spare.setdefault((weight.shape, weight.dtype), []).append(weight.data)

    def finish(self) -> None:
        """The heads, whose plain matrix stays (it may be the embedding's), are packed from it again."""
        with reusing():
            for layer in self._heads:
                _let_go(layer)
                layer.quant_method.process_weights_after_loading(layer)
        self._spare.clear()

    def _stand_in(self, layer: Any) -> None:
        """Parameters of the plain matrices' shapes and loaders in place of the packed ones."""
        for name, plain in self._packed[layer].items():
            weight: Any = torch.empty(1, dtype=plain.dtype).expand(plain.shape)
            weight.__class__ = plain.__class__
            weight.__dict__ = plain.__dict__.copy()
            weight = restore_layer_refs(weight, layer)
            weight.weight_loader = self._loader(layer, weight.weight_loader)
            setattr(layer, name, weight)

    def _loader(self, layer: Any, load: Callable[..., Any]) -> Callable[..., Any]:
        def fill(param: nn.Parameter, *rest: Any, **kwargs: Any) -> Any:
            self._touched[layer] = None
            if not param.data.is_contiguous():  # a stand-in
                if len(rest) == 1 and not kwargs and _is_same(param, rest[0]):  # nothing to cut or fuse
                    param.data = rest[0]
                    self._lent.add(id(param))
                    return None
                spare = self._spare.get((param.shape, param.dtype))
                param.data = spare.pop() if spare else torch.zeros(param.shape, dtype=param.dtype)  # zeros: padding
            return load(param, *rest, **kwargs)

        return fill


def loader_for(model: nn.Module, model_config: Any, device: torch.device) -> WholeReload | Repacking:
    """The faster one where it is right."""
    if device.type == "cpu" and Repacking.fits(model):
        return Repacking(model)
    return WholeReload(model, model_config)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Layers in place of what vLLM has put around them, within this block: a checkpoint's names are theirs."""
    wrapped = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)]
    try:
        for name, layer in wrapped:
            _put(model, name, layer.base_layer)
        yield
    finally:
        for name, layer in wrapped:
            _put(model, name, layer)


def _put(model: nn.Module, name: str, layer: Any) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def _is_packed(layer: nn.Module) -> bool:
    experts = isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod)
    return experts or (isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod))


def _is_known(layer: nn.Module) -> bool:
    if not any(True for _ in layer.parameters(recurse=False)):
        return True
    if isinstance(layer, VocabParallelEmbedding):
        return isinstance(layer.quant_method, UnquantizedEmbeddingMethod)
    return _is_packed(layer) or getattr(layer, "quant_method", None) is None


def _is_same(param: Tensor, loaded: Tensor) -> bool:
    return param.shape == loaded.shape and param.dtype == loaded.dtype and loaded.is_contiguous()


def _let_go(layer: Any) -> None:
    """Free a layer's packed matrix before the next is made: that gets the same memory, whose pages need no zeroing."""
    if hasattr(layer, "cpu_linear"):
        layer.cpu_linear = None


def _plain(layer: nn.Module) -> dict[str, Tensor]:
    """The matrices as they were before they were packed, on the meta device: shape, class and loader."""
    plain: dict[str, Tensor] = get_layerwise_info(layer).restore_metadata[0]
    return plain


def _heads(model: nn.Module) -> list[Any]:
    """The embeddings that multiply: output heads, and where a model has none of its own, the embedding itself."""
    tables = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    return [layer for layer in tables if isinstance(layer, ParallelLMHead)] or tables
