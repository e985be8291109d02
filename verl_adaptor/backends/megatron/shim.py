"""Megatron on a machine without CUDA: all that is pretended there, in one place.

megatron-core asks for CUDA devices, streams and random states by name. `active` answers for them with what the CPU has,
for as long as one public call runs and on the thread that made it. Where CUDA exists it does nothing at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """``device="cuda"`` is the CPU, ``tensor.cuda()`` is the tensor, and type names say what Megatron compares with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _NoStream:
    """A stream or an event where all work is already in order; what a stream records is an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _random_state(*_: Any, **__: Any) -> Tensor:
    """No layer draws random numbers here, so that there is no state to keep for a recomputation."""
    return torch.empty(0)


def _as_array(tensor: Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's own leaves a tensor that is on the CPU already as it is; collectives take no tensor for a count."""
    return tensor.numpy() if isinstance(tensor, Tensor) and as_numpy else tensor


_REPLACED: dict[str, Any] = {
    "torch.cuda.current_device": lambda: _CPU,
    "torch.cuda.synchronize": _nothing,
    "torch.cuda.current_stream": _NoStream,
    "torch.cuda.default_stream": _NoStream,
    "torch.cuda.stream": _NoStream,
    "torch.cuda.Stream": _NoStream,
    "torch.cuda.Event": _NoStream,
    "megatron.core.tensor_parallel.random._get_cuda_rng_state": _random_state,
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _nothing,
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _as_array,
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": None,  # 0.16 reads it, defined or not
}


@contextmanager
def active() -> Iterator[None]:
    """Pretend for as long as the context lasts; nested contexts are fine."""
    if torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        for name, replacement in _REPLACED.items():
            stack.enter_context(mock.patch(name, replacement, create=True))
        stack.enter_context(_CudaMeansCpu())
        # its fused element-wise functions are compiled otherwise, for minutes
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(quiet())
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings that Apex, Transformer Engine and CUDA are missing: where there is no GPU, that is known."""
    with warnings.catch_warnings():
        if not torch.cuda.is_available():
            warnings.simplefilter("ignore")
        yield
