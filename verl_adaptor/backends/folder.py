"""A Hugging Face folder as new weights for a running engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_adaptor.backends.causal_lm import outline
from verl_adaptor.backends.export import weight_update
from verl_adaptor.errors import ModelError
from verl_adaptor.samples import WeightUpdate


def folder_update(path: str, version: int, trust_remote_code: bool = False) -> WeightUpdate:
    """The weights of a folder that ``save_pretrained`` wrote; a bucket is read when it is pulled.

    Raises:
        ModelError: it is no model folder, holds no safetensors, or a file is cut off.
    """
    tied = outline(path, trust_remote_code).tied
    homes: dict[str, Path] = {}
    shapes: dict[str, Tensor] = {}
    with _opened(_files(path)) as files:
        for file, opened in files.items():
            for name in opened.keys():  # noqa: SIM118 - no dictionary
                view = opened.get_slice(name)
                homes[name] = file
                shapes[name] = torch.empty(view.get_shape(), dtype=_dtype(path, view.get_dtype()), device="meta")

    def read(wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with _opened({homes[name] for name in wanted}) as files:
            return {name: files[homes[name]].get_tensor(name) for name in wanted}

    return weight_update(
        {name: shape for name, shape in shapes.items() if name not in tied}, tied, version, gather=read
    )


def _files(path: str) -> list[Path]:
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no *.safetensors; give a folder that save_pretrained wrote.")
    return files


@contextmanager
def _opened(files: Any) -> Iterator[dict[Path, Any]]:
    with ExitStack() as stack:
        opened = {}
        for file in files:
            try:
                opened[file] = stack.enter_context(safe_open(file, "pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read ({error}); write the folder again.") from error
        yield opened


def _dtype(path: str, name: str) -> torch.dtype:
    known = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    if name not in known:
        raise ModelError(f"{path} holds tensors of type {name}; allowed: {', '.join(known)}.")
    return known[name]
