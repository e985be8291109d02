"""Causal language models of transformers: loading, tensor names, log-probs. Shared by engines and trainers.

Engine and trainer must see one and the same policy, so everything random in a forward pass is switched off here, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl_adaptor.errors import ConfigError, ModelError

_CHUNK_ELEMENTS = 1 << 24
"""Logits cast to float32 at a time (64 MiB)."""
_CACHED_ELEMENTS = 1 << 18
"""The same on a CPU: the passes over them then stay in its cache (1 MiB)."""
_RANDOM = re.compile(r"(dropout|pdrop|layerdrop|jitter_noise)(_rate|_prob|_p)?$")
_WEIGHTS = ("*.safetensors", "*.bin")


# -- where and in what type --------------------------------------------------------------------------------------


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where it exists, else the CPU; anything else is taken at its word or refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device; use 'auto', 'cpu', 'cuda' or 'cuda:<index>'.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; use 'auto' or 'cpu', or "
            "install a CUDA build of torch."
        )
    return device


def resolve_dtype(name: str) -> torch.dtype:
    """``float32`` or ``bfloat16`` as torch's type."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"dtype={name!r} is not allowed; use {' or '.join(dtypes)}.")
    return dtypes[name]


# -- loading -----------------------------------------------------------------------------------------------------


def load_causal_lm(
    path: str, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The causal LM in a Hugging Face folder (or of a hub id), in eval mode, deterministic.

    Dropout and router noise are 0 and no auxiliary loss is computed: both sides of the importance ratio must be the
    same function of the weights.

    Raises:
        ModelError: no such folder, no config or weights in it, an unknown architecture, or no causal LM.
    """
    config = load_config(path, trust_remote_code)
    masked = [name for name in config.architectures or () if name.endswith("ForMaskedLM")]
    if config.is_encoder_decoder or masked:
        raise _no_causal_lm(path, config)
    return _load(AutoModelForCausalLM, path, config, dtype, device, trust_remote_code)


def load_backbone(
    path: str, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The same without the language-model head: what a value head stands on. Raises `ModelError` likewise."""
    return _load(AutoModel, path, load_config(path, trust_remote_code), dtype, device, trust_remote_code)


def load_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config, after checking that a local folder is whole. Raises `ModelError`."""
    _check_folder(path)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            cure = "if you trust the Python code in it, set trust_remote_code=true"
        elif Path(path).is_dir():
            cure = "check model_type in config.json; a newer transformers may know it (pip install -U transformers)"
        else:
            cure = "give a folder with config.json and weights, or a hub id that is cached or can be downloaded"
        raise ModelError(
            f"{path}: transformers cannot read its config; {cure}. It said: {_first_line(error)}"
        ) from error


def _check_folder(path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:  # no hub id looks like this
            raise ModelError(f"{path}: no such folder; give a Hugging Face model folder or a hub id like 'owner/name'.")
        return
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ModelError(
            f"{path}: no config.json (the folder holds {found}); give a folder written by save_pretrained."
        )
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        raise ModelError(
            f"{path}: config.json, but no weights ({' or '.join(_WEIGHTS)}); copy the weight files there too."
        )


def _load(
    auto: Any,
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool,
) -> PreTrainedModel:
    for part in (config, config.get_text_config()):
        _silence(part)
    try:
        with _rng_untouched():
            model, report = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                attn_implementation=_attention(config),
            )
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise _no_causal_lm(path, config) from error
        raise ModelError(f"{path}: transformers cannot load it: {_first_line(error)}") from error
    except (OSError, RuntimeError) as error:
        raise ModelError(
            f"{path}: its weights cannot be loaded; copy the folder again. It said: {_first_line(error)}"
        ) from error
    if report["missing_keys"]:  # transformers would start these at random
        names = ", ".join(sorted(report["missing_keys"])[:5])
        raise ModelError(
            f"{path}: {type(model).__name__} needs weights that are not there ({names}); give a folder that was saved as one."
        )
    return _deterministic(model.to(device))


def _attention(config: PreTrainedConfig) -> str | None:
    """PyTorch's fused attention ignores the soft cap of Gemma 2's attention scores, in silence."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def _deterministic(model: Any) -> PreTrainedModel:
    """In eval mode, and without dropout in any other."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    whole: PreTrainedModel = model.eval()
    return whole


def _silence(config: PreTrainedConfig) -> None:
    """Dropout and router noise to 0, router losses off."""
    for name, value in list(vars(config).items()):
        if _RANDOM.search(name) and isinstance(value, float | int):
            setattr(config, name, type(value)(0))
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False


def _no_causal_lm(path: str, config: PreTrainedConfig) -> ModelError:
    architectures = ", ".join(config.architectures or ()) or "architecture not named"
    return ModelError(
        f"{path}: a {config.model_type} model ({architectures}) is no causal language model; give a decoder-only one "
        "(Llama, Qwen, GPT-2, Mixtral, ...)."
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


@contextmanager
def _rng_untouched() -> Iterator[None]:
    """transformers may draw weights (on the CPU) before it overwrites them; give the generator back (law I10)."""
    with torch.random.fork_rng(devices=[]):
        yield


# -- names -------------------------------------------------------------------------------------------------------


def named_tensors(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's parameters and persistent buffers under the names of a Hugging Face checkpoint, and tied aliases.

    Where transformers fuses what a checkpoint keeps apart (the experts of Mixtral), these are views of the fused
    parameter. So everything returned shares memory with the model: reading costs nothing, writing in place writes
    the model. Adapters that peft has put in are left out, and the layers beneath them keep their names.

    Returns:
        (name -> tensor without gradient, each memory once; alias -> name of the tensor it shares memory with).
    """
    own: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    state = {unwrapped(name): tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}
    for name, tensor in state.items():
        twin = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
        if twin == name:
            own[name] = tensor
        else:
            aliases[name] = twin
    tied = {
        checkpoint_names(model, alias, state[alias])[0]: checkpoint_names(model, name, state[name])[0]
        for alias, name in aliases.items()
    }
    return _checkpoint_views(model, own), tied


@dataclass(frozen=True)
class Outline:
    """What a checkpoint holds, without its weights."""

    vocab_size: int
    """Rows of the embedding."""
    tensors: dict[str, tuple[int, ...]]
    """Name -> shape, tied memory once."""
    tied: dict[str, str]
    """Alias -> the name in `tensors` that it shares memory with."""


def skeleton(path: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal LM that `load_causal_lm` would load, on the meta device, deterministic likewise."""
    config = load_config(path, trust_remote_code)
    for part in (config, config.get_text_config()):
        _silence(part)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation=_attention(config)
            )
    except ValueError as error:
        raise _no_causal_lm(path, config) from error
    model.tie_weights()
    return _deterministic(model)


def outline(path: str, trust_remote_code: bool = False) -> Outline:
    """The names and shapes that `load_causal_lm` would find, for engines that load the model by other means."""
    model: Any = skeleton(path, trust_remote_code)
    stand_ins: dict[int, Tensor] = {}
    for module in model.modules():  # tied memory is told by its address, which meta tensors do not have
        for own, kept in ((module._parameters, nn.Parameter), (module._buffers, lambda tensor, **_: tensor)):
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in stand_ins:
                    unreal = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                    stand_ins[id(tensor)] = kept(unreal, requires_grad=False)
                own[name] = tensor if tensor is None else stand_ins[id(tensor)]
    named, tied = named_tensors(model)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return Outline(vocab_size, {name: tuple(tensor.shape) for name, tensor in named.items()}, tied)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of a low-rank adapter that peft has put in."""
    return ".lora_A." in name or ".lora_B." in name


def unwrapped(name: str) -> str:
    """The name that a tensor has where peft has not wrapped its layer."""
    return name.replace(".base_layer.", ".")


def checkpoint_names(model: PreTrainedModel, name: str, tensor: Tensor) -> list[str]:
    """What a Hugging Face checkpoint calls the model's tensor `name`; several where it cuts it up."""
    return list(_checkpoint_views(model, {name: tensor.detach()}))


def _checkpoint_views(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under checkpoint names; raises `ModelError` where that takes more than cutting views."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    with torch.no_grad(), _KeepViews():
        views = revert_weight_conversion(model, dict(tensors))
    copies = [name for name, view in views.items() if view.untyped_storage().data_ptr() not in memory]
    if copies:
        raise ModelError(
            f"{type(model).__name__} stores {copies[0]} in another layout than its checkpoint; such models cannot "
            "exchange weights with an engine here."
        )
    return views


class _KeepViews(TorchFunctionMode):
    """transformers makes every slice contiguous, which copies; leave it the view it is."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


# -- log-probs ---------------------------------------------------------------------------------------------------


def token_log_probs(logits: Tensor, ids: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """log p(id) under softmax(logits / temperature), in nats, float32.

    Args:
        logits: [..., V] of any float type; cast to float32 in pieces, so that no float32 copy of all of them exists.
        ids: [...] int64.
        temperature: a number, or a tensor that broadcasts to [...].
    """
    return _per_token(logits, ids, temperature, False)[0]


def token_log_probs_and_entropy(
    logits: Tensor, ids: Tensor, temperature: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """The same, and the entropy of each distribution. The entropy's gradient costs only if it is asked for."""
    return _per_token(logits, ids, temperature, True)


def _per_token(logits: Tensor, ids: Tensor, temperature: Tensor | float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(ids.shape)
    flat = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1), scale.reshape(-1)
    log_probs, entropy = _TokenLogProbs.apply(*flat, with_entropy)
    return log_probs.view(ids.shape), entropy.view(ids.shape)


class _TokenLogProbs(torch.autograd.Function):
    """[N, V] logits -> [N] log-probs and entropies; the backward pass recomputes the softmax piece by piece.

    With z = logits / T, p = softmax(z) and H the entropy: d log p(i) / dz = onehot(i) - p, dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        log_probs, normaliser, entropy = (torch.zeros_like(temperature) for _ in range(3))
        for rows in pieces(logits):
            z = logits[rows].float() / temperature[rows, None]
            normaliser[rows] = z.logsumexp(-1)
            log_p = z.sub_(normaliser[rows, None])
            log_probs[rows] = log_p.gather(-1, ids[rows, None])[:, 0]
            if with_entropy:  # 0 * -inf is NaN: a token of probability 0 adds nothing
                entropy[rows] = -log_p.exp().mul_(log_p.clamp_(min=-1e30)).sum(-1)
        ctx.save_for_backward(logits, ids, temperature, normaliser, entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, to_log_probs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, ids, temperature, normaliser, entropy = ctx.saved_tensors
        incoming = [None if g is None else g / temperature for g in (to_log_probs, to_entropy)]
        gradient = torch.empty_like(logits)
        for rows in pieces(logits):
            log_p = (logits[rows].float() / temperature[rows, None]).sub_(normaliser[rows, None])
            d_z, at_id = logit_gradient(log_p, entropy[rows], *(None if g is None else g[rows] for g in incoming))
            gradient[rows] = d_z.scatter_add_(-1, ids[rows, None], at_id[:, None])
        return gradient, None, None, None


def logit_gradient(
    log_p: Tensor, entropy: Tensor, to_log_probs: Tensor | None, to_entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of [N, V] logits but for the one-hot part, and [N] what that part adds at each token's id.

    Args:
        log_p: [N, V]; overwritten.
        entropy: [N].
        to_log_probs: [N] gradients of the log-probs; None: there are none.
        to_entropy: [N] likewise.
    """
    p = log_p.exp()
    at_id = torch.zeros_like(entropy) if to_log_probs is None else to_log_probs
    if to_entropy is None:
        return p.mul_(-at_id[:, None]), at_id
    by_entropy = log_p.clamp_(min=-1e30).add_(entropy[:, None]).mul_(to_entropy[:, None])  # clamped: 0 * -inf is NaN
    return p.mul_(by_entropy.add_(at_id[:, None])).neg_(), at_id


def pieces(logits: Tensor) -> Iterator[slice]:
    """Rows of [N, V] logits, a few at a time: so that no float32 copy of all of them exists."""
    elements = _CACHED_ELEMENTS if logits.device.type == "cpu" else _CHUNK_ELEMENTS
    rows = max(1, elements // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
