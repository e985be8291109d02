"""The reference trainer: transformers and AdamW in one process."""

from __future__ import annotations

from verl_adaptor.backends.torch_trainer import TorchTrainer
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, ParallelConfig, TrainerConfig
from verl_adaptor.errors import UnsupportedCapability


class HFTrainer(TorchTrainer):
    """`TorchTrainer` as it is: one process, one copy of the model, every parallel size 1.

    Raises:
        UnsupportedCapability: another parallel size; packing or activation checkpointing on a model without it.
        ModelError: the folder holds no model that can be trained.
        MissingGradient: activation checkpointing loses gradients of this model.
    """

    def __init__(self, path: str, config: TrainerConfig, options: Config | None, spec: BackendSpec) -> None:
        changed = {k: v for k, v in config.parallel.model_dump().items() if v != getattr(ParallelConfig(), k)}
        if changed:
            given = ", ".join(f"{name}={value}" for name, value in changed.items())
            raise UnsupportedCapability(
                f"{spec.name}: one process holds the whole model, so {given} cannot be; leave it out, or take a backend with "
                "parallel strategies (verl-adaptor backends lists them)."
            )
        super().__init__(path, config, options, spec)
