"""DeepSpeed's checkpoint format inside our manifest's folder, read without trusting what is in it.

    actor/
        manifest.json                                              ours, written last
        zero/mp_rank_00_model_states.pt                            weights, where the stage keeps them whole
        zero/zero_pp_rank_<rank>_mp_rank_00_*_states.pt            a rank's shards and AdamW's averages
        zero_to_fp32.py, zero_to_torch.py                          DeepSpeed's own converters

DeepSpeed unpickles these files whatever they hold (``torch.load(weights_only=False)``), which lets a foreign file run any
code. So this package reads them first, with ``weights_only`` and a list of the few plain classes that DeepSpeed writes, and
hands DeepSpeed the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_adaptor.backends.world import World
from verl_adaptor.errors import CheckpointError

TAG = "zero"
"""DeepSpeed's name of the folder within the folder."""


def write(engine: Any, folder: Path, steps: int) -> None:
    """All ranks together; `steps` is the position in the learning-rate schedule. The base of adapters is left out."""
    engine.save_checkpoint(
        str(folder),
        tag=TAG,
        client_state={"optimizer_steps": steps},
        save_latest=False,
        exclude_frozen_parameters=engine.module.adapters is not None,
    )


def read(engine: Any, folder: Path, world: World) -> int:
    """Undo `write`; returns `steps`. All ranks read their files before the first changes anything.

    Raises:
        CheckpointError: a file is missing or broken, or holds what DeepSpeed does not write.
    """
    with world.together():
        files = _Files(engine, folder)
    unsafe, engine.checkpoint_engine = engine.checkpoint_engine, files
    try:
        _, client_state = engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=engine.module.adapters is None
        )
    finally:
        engine.checkpoint_engine = unsafe
    return int(client_state["optimizer_steps"])


class _Files:
    """This rank's files, read; it answers DeepSpeed's checkpoint engine's `load` from memory, and nothing else."""

    def __init__(self, engine: Any, folder: Path) -> None:
        paths = [*engine._get_all_ckpt_names(str(folder), TAG)]
        if engine.zero_optimization():
            paths.append(engine._get_zero_ckpt_name(str(folder), TAG))
        self._states = {Path(path).resolve(): _read(Path(path)) for path in paths}

    def load(self, path: str, map_location: Any = None) -> Any:
        """The state in this file."""
        return self._states[Path(path).resolve()]


def _read(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a broken file leads it to
        raise CheckpointError(
            f"{path} cannot be read ({error}); use an older checkpoint, and only one that this backend wrote."
        ) from error


def _plain_classes() -> list[Any]:
    """What DeepSpeed writes besides tensors and built-ins: values without behaviour of their own."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, ZeroStageEnum, fragment_address]
