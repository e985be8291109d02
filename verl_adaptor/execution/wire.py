"""What crosses between processes: NumPy arrays and built-ins, so that two environments need not hold the same torch.

==================== =======================================================================
here                 on the wire
==================== =======================================================================
tensor               its bytes as an array, and its dtype by name (NumPy has no bfloat16)
TensorDict           its tensors and its batch size
records of ours      class name and fields: LogProbs, Denominators, TensorMeta, LossOutput
path                 the absolute one, because the other process has another working directory
losses, backend spec pickled, by reference where a module holds them
==================== =======================================================================
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

TENSOR, BATCH, RECORD, PATH, PICKLE = "\0tensor", "\0batch", "\0record", "\0path", "\0pickle"
"""First elements of the tuples that stand for something else; no tuple of a caller begins so."""


def encode(value: Any) -> Any:
    """`value` as NumPy arrays and built-ins; containers are walked."""
    if value is None or type(value) in (bool, int, float, str, bytes, np.ndarray):
        return value
    if type(value) in (list, tuple):
        return type(value)(encode(item) for item in value)
    if type(value) is dict:
        return {encode(key): encode(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return PATH, str(value.absolute())
    return _encode_record(value)


def _encode_record(value: Any) -> Any:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if type(value).__module__.startswith("verl_adaptor.") and not callable(value):
        if isinstance(value, tuple):  # a NamedTuple
            return RECORD, name, [encode(item) for item in value]
        if dataclasses.is_dataclass(value) and all(field.init for field in dataclasses.fields(value)):
            fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return RECORD, name, fields
    return _encode_tensors(value)


def _encode_tensors(value: Any) -> Any:
    import torch
    from tensordict import TensorDict

    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if isinstance(value, TensorDict):
        return BATCH, {str(key): encode(item) for key, item in value.items()}, tuple(value.batch_size)
    if isinstance(value, Mapping) and not callable(value):
        return encode(dict(value))
    import cloudpickle

    return PICKLE, cloudpickle.dumps(value)


def _encode_tensor(tensor: torch.Tensor) -> tuple[str, Any, str]:
    import torch

    plain = tensor.detach().cpu().contiguous()
    try:
        array = plain.numpy()
    except TypeError:  # bfloat16, float8: as integers of the same width
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
        array = plain.view(width).numpy()
    return TENSOR, array, str(tensor.dtype).removeprefix("torch.")


def decode(value: Any) -> Any:
    """What `encode` was given; tensors are on the CPU, in memory of their own."""
    if type(value) is tuple and value and type(value[0]) is str and value[0] in _DECODERS:
        return _DECODERS[value[0]](*value[1:])
    if type(value) in (list, tuple):
        return type(value)(decode(item) for item in value)
    if type(value) is dict:
        return {decode(key): decode(item) for key, item in value.items()}
    return value


def _decode_tensor(array: Any, dtype: str) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.array(array)).view(getattr(torch, dtype))  # a copy: an object store is read-only


def _decode_batch(tensors: dict[str, Any], batch_size: tuple[int, ...]) -> Any:
    from tensordict import TensorDict

    return TensorDict({key: decode(tensor) for key, tensor in tensors.items()}, batch_size=list(batch_size))


def _decode_record(name: str, fields: Any) -> Any:
    module, _, attribute = name.partition(":")
    record = getattr(importlib.import_module(module), attribute)
    return record(*decode(fields)) if isinstance(fields, list) else record(**decode(fields))


def _decode_pickle(data: bytes) -> Any:
    import pickle

    return pickle.loads(data)


_DECODERS: dict[str, Callable[..., Any]] = {
    TENSOR: _decode_tensor,
    BATCH: _decode_batch,
    RECORD: _decode_record,
    PATH: Path,
    PICKLE: _decode_pickle,
}
