"""The two heads as modules: a batch's sequences in, log-probs or values of the response tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl_adaptor.backends.adapters import Adapters, require_peft
from verl_adaptor.backends.causal_lm import load_backbone, load_causal_lm, token_log_probs_and_entropy
from verl_adaptor.backends.sequences import Sequences, packed, padded
from verl_adaptor.backends.ulysses import sliced
from verl_adaptor.backends.world import Axis
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import ModelError

VALUE_HEAD_FILE = "value_head.safetensors"
"""Lies beside the backbone of a saved critic."""


class Head(nn.Module):
    """A transformers model and what reads its output. Weights are float32; autocast computes in `compute_dtype`."""

    outputs: tuple[str, ...]
    """Names of what forward returns."""
    context = Axis()
    """The ranks that share each sequence; `probe.share_sequences` sets it."""
    multiple = 1
    """Sequences are padded to a multiple of this, so that ranks can share them evenly."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        super().__init__()
        self.model = model
        self._computes_on = model.device.type  # later its weights may rest elsewhere
        self.adapters: Adapters | None = None
        self.packing = config.packing
        self.compute_dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32

    def lay_out(self, batch: TensorDict) -> Sequences:
        """The layout that the config asks for; where ranks share the sequences, this rank's slice of it."""
        whole = packed(batch, self.model.config) if self.packing else padded(batch)
        return sliced(whole.widened(self.multiple), self.context)

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 matrices where asked for."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._computes_on, dtype=self.compute_dtype)


class PolicyHead(Head):
    """A causal LM: ``log_probs`` and ``entropy`` [b, R], float32, at each row's temperature."""

    outputs = ("log_probs", "entropy")
    read_logits: Callable[..., tuple[Tensor, Tensor]] = staticmethod(token_log_probs_and_entropy)
    """(logits, ids, temperature) -> log-probs and entropy; ranks that share the vocabulary read their slices of the logits."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        super().__init__(model, config)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """Only the positions before response tokens go through the vocabulary matrix, where the model can do that."""
        sequences = self.lay_out(batch)
        keep = {"logits_to_keep": sequences.predictors} if self._keeps_logits else {}
        with self.autocast():
            logits = self.model(**sequences.inputs, **keep, use_cache=False).logits
        if not self._keeps_logits:
            logits = logits[:, sequences.predictors]
        log_probs, entropy = self.read_logits(logits, sequences.targets, sequences.temperature)
        return {"log_probs": sequences.restore(log_probs), "entropy": sequences.restore(entropy)}


class ValueHead(Head):
    """The backbone and one linear layer: ``values`` [b, R], float32, of the state before each response token."""

    outputs = ("values",)

    def __init__(self, model: PreTrainedModel, config: TrainerConfig) -> None:
        super().__init__(model, config)
        settings = model.config.get_text_config()
        self.value_head = nn.utils.skip_init(nn.Linear, settings.hidden_size, 1)
        generator = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            self.value_head.weight.normal_(std=getattr(settings, "initializer_range", 0.02), generator=generator)
            self.value_head.bias.zero_()
        self.value_head.to(model.device)

    def forward(self, batch: TensorDict) -> dict[str, Tensor]:
        """The last layer is computed in float32: a critic's targets need more than bfloat16's three digits."""
        sequences = self.lay_out(batch)
        with self.autocast():
            hidden = self.model(**sequences.inputs, use_cache=False).last_hidden_state
        values = self.value_head(hidden[:, sequences.predictors].float())[..., 0]
        return {"values": sequences.restore(values)}


def load_head(path: str, config: TrainerConfig, device: torch.device) -> Head:
    """The head that `config` asks for, float32, on `device`; a value head is read from the folder if it holds one.

    With ``lora_rank`` the model is frozen and gets adapters to train; a value head is trained in full.
    """
    if config.lora_rank is not None:
        require_peft()
    settings: dict[str, Any] = {"dtype": torch.float32, "device": device, "trust_remote_code": config.trust_remote_code}
    if config.head == "policy":
        head: Head = PolicyHead(load_causal_lm(path, **settings), config)
    else:
        head = ValueHead(load_backbone(path, **settings), config)
        saved = Path(path) / VALUE_HEAD_FILE
        if saved.is_file():
            _restore_value_head(head.value_head, saved)
    head.eval().requires_grad_(config.trainable)
    if config.lora_rank is not None:
        head.adapters = Adapters(head.model, config)
    return head


def _restore_value_head(layer: nn.Linear, file: Path) -> None:
    try:
        layer.load_state_dict(load_file(file))
    except Exception as error:  # safetensors has an exception class of its own, torch raises RuntimeError
        raise ModelError(f"{file} does not fit a value head of {layer.in_features} inputs: {error}") from error
