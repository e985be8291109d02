"""`TrainerBackend`: what every trainer does, and the checks around it."""

from __future__ import annotations

import abc
import dataclasses
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from verl_adaptor.capabilities import BackendSpec, Capability, Support
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import (
    ConfigError,
    TrainerClosed,
    TrainerError,
    UnsupportedCapability,
    VerlAdaptorError,
    nearest,
)
from verl_adaptor.samples import UpdatePart, WeightUpdate
from verl_adaptor.weights import digests as digests_of

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from verl_adaptor.protocols.engine import InferenceEngine


class LogProbs(NamedTuple):
    """Per response token, at the batch's temperature, in nats, float32."""

    log_probs: Tensor
    """[B, R] log p(token | before)."""
    entropy: Tensor
    """[B, R] entropy of the distribution each token was drawn from."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns for one micro-batch of b rows."""

    per_token: Tensor
    """[b, R] loss of each response token; masked positions are ignored."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name -> (sum, weight), of one element each: added up over micro-batches and ranks, then divided. So no split can
    change a metric. The names in `OWN_METRICS` are taken."""


OWN_METRICS = ("loss", "grad_norm", "learning_rate", "skipped")
"""What `TrainerBackend.update` itself returns."""

ROLLOUT_SETTINGS = ("max_model_len", "max_batch_size", "max_prefill_tokens", "dtype", "seed")
"""What a trainer's rollout engine can be told; all else is the trainer's."""

TIERS = ("host", "disk")
"""Where `TrainerBackend.offload` can move a trainer's state."""

Loss = Callable[[Mapping[str, "Tensor"], "TensorDict"], LossOutput]
"""A pure, picklable function of ({log_probs, entropy} or {values}, micro-batch)."""


@dataclass(frozen=True)
class Denominators:
    """What a loss is divided by: taken over the GLOBAL mini-batch before its first micro-batch (C06)."""

    tokens: float
    """Response tokens with mask 1."""
    sequences: float
    """Rows with at least one such token."""
    response_length: int
    """R of the mini-batch: the divisor of seq-mean-token-sum-norm unless the config sets one."""


@dataclass(frozen=True)
class CheckedLoss:
    """A loss whose every failure is an error of ours, which all ranks can raise alike."""

    loss: Loss

    def __call__(self, outputs: Mapping[str, Tensor], micro: TensorDict) -> LossOutput:
        """As the loss. Raises TrainerError for an error that is not ours, or if what it returns is no `LossOutput`."""
        try:
            result = self.loss(outputs, micro)
        except VerlAdaptorError:
            raise
        except Exception as error:
            raise TrainerError(f"the loss function raised {type(error).__name__}: {error}") from error
        self._check(result, outputs, micro)
        return result

    def _check(self, result: LossOutput, outputs: Mapping[str, Tensor], micro: TensorDict) -> None:
        from torch import Tensor

        if not isinstance(result, LossOutput) or not isinstance(result.per_token, Tensor):
            raise TrainerError(
                f"the loss returned {type(result).__name__}; it must be LossOutput(per_token [b, R], metrics)."
            )
        expected = micro["responses"].shape
        if result.per_token.shape != expected or not result.per_token.requires_grad:
            raise TrainerError(
                f"the loss returned per_token of shape {tuple(result.per_token.shape)}, requires_grad="
                f"{result.per_token.requires_grad}; it must be {tuple(expected)}, one loss a response token, and depend on "
                f"{' or '.join(outputs)}."
            )
        for name, pair in result.metrics.items():
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(_is_number(value) for value in pair):
                raise TrainerError(
                    f"the loss returned metric {name!r}={pair!r}; it must be a pair (sum, weight) of one element each."
                )
            if name in OWN_METRICS:
                raise TrainerError(
                    f"the loss returned a metric {name!r}, which the trainer itself returns; give it another name."
                )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "numel", lambda: 0)() == 1


class TrainerBackend(abc.ABC):
    """Trains one model. Every call is handed the global batch and returns the global result in input order.

    A backend implements the abstract methods; the public ones check first, then call them.
    """

    def __init__(self, path: str, config: TrainerConfig, options: Config | None, spec: BackendSpec) -> None:
        self.path = path
        self.config = config
        self.options = options
        self.spec = spec
        self._closed = False
        self._source = uuid.uuid4().hex
        self._version = 0
        self._changed = False
        self._tier: str | None = None

    # -- forward -------------------------------------------------------------------------------------------------

    def compute_log_probs(self, batch: TensorDict) -> LogProbs:
        """Log-probs and entropy of the response tokens; no gradient.

        Args:
            batch: needs input_ids, attention_mask, position_ids [B, T], responses [B, R], temperature [B].

        Raises:
            BatchError: a key is missing or misshapen.
            UnsupportedCapability: the head is ``value``.
        """
        self._check(batch, head="policy")
        return self._compute_log_probs(batch)

    def compute_values(self, batch: TensorDict) -> Tensor:
        """[B, R] float32 values of the state before each response token; no gradient. Needs ``head="value"``."""
        self._check(batch, head="value")
        return self._compute_values(batch)

    # -- training ------------------------------------------------------------------------------------------------

    def update(self, batch: TensorDict, loss: Loss) -> dict[str, float]:
        """One optimizer step over one mini-batch.

        Args:
            batch: the global mini-batch; response_mask [B, R] says which tokens count, the rest is what `loss` reads.
            loss: see `Loss`.

        Returns:
            ``loss``, ``grad_norm`` (before clipping), ``learning_rate``, ``skipped`` (1 if a non-finite gradient was
            dropped, law T7), and the loss's own metrics.

        Raises:
            NonFiniteGradient: with ``non_finite="raise"``; the weights were not touched.
            TrainerError: `loss` failed; no gradient of this mini-batch is left. An error of ours that it raised stays what it is.
        """
        from verl_adaptor.batch import denominators

        metrics = self.forward_backward(batch, loss, denominators(batch))
        return metrics | self.optimizer_step()

    def forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        """Add the gradients of one (part of a) mini-batch whose denominators are `over`. Returns loss and metrics."""
        self._check(batch, head=self.config.head, also=("response_mask",))
        self._check_trainable()
        return self._forward_backward(batch, CheckedLoss(loss), over)

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, clear the gradients. Returns grad_norm, learning_rate, skipped."""
        self._check_trainable()
        metrics = self._optimizer_step()
        self._changed |= not metrics["skipped"]
        return metrics

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Version of the weights exported last; 0 is the model as loaded."""
        return self._version

    def export_weights(self, *, digests: bool = False) -> WeightUpdate:
        """The weights under their Hugging Face names, in buckets; the version advances if they changed (law T4).

        Args:
            digests: take a digest of each tensor first, so that the engine can tell whether what arrives is what was sent.
                It takes another pass over the weights.
        """
        self._check_open()
        if self._changed:
            self._version += 1
            self._changed = False
        return self._signed(self._export_weights(), digests=digests)

    def _signed(self, update: WeightUpdate, part: UpdatePart = "merged", *, digests: bool) -> WeightUpdate:
        """With this trainer as its source, and with digests if they are asked for; its adapters likewise."""
        adapters = update.adapters and dataclasses.replace(
            update.adapters,
            base=self._signed(update.adapters.base, "base", digests=digests),
            weights=self._signed(update.adapters.weights, "adapters", digests=digests),
        )
        return dataclasses.replace(
            update,
            source=(self._source, update.version),
            digests=self._digests(update, part) if digests else {},
            adapters=adapters,
        )

    def _digests(self, update: WeightUpdate, part: UpdatePart) -> dict[str, int]:
        return {name: digest for bucket in update.buckets() for name, digest in digests_of(bucket).items()}

    # -- saving --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: Path) -> None:
        """Everything an exact resume needs (law T5). Written beside `folder`, then renamed: never half there."""
        self._check_open()
        self._save_checkpoint(Path(folder))

    def load_checkpoint(self, folder: Path) -> None:
        """Go back to a saved state, bit for bit. Raises `CheckpointError` for a missing, half-written or foreign one."""
        self._check_open()
        self._load_checkpoint(Path(folder))

    @abc.abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """A folder that plain transformers opens (the value head, where there is one, lies beside it)."""

    def save_adapter(self, folder: Path) -> None:
        """The adapters alone (``lora_rank=...``): a folder that ``peft.PeftModel.from_pretrained`` opens over the base.

        Raises:
            UnsupportedCapability: the backend has no adapters.
            TrainerError: this trainer was made without ``lora_rank``.
            CheckpointError: `folder` exists and holds no adapters.
        """
        self._check_open()
        if self.spec.support(Capability.LORA) and self.config.lora_rank is None:
            raise TrainerError(
                "this trainer trains all weights and has no adapters; set lora_rank, or save_pretrained()."
            )
        self._save_adapter(Path(folder))

    # -- memory and views ----------------------------------------------------------------------------------------

    def offload(self, tier: str) -> None:
        """Move weights, gradients and optimizer state away and give their memory back, until `onload` (law T6).

        Meanwhile every call but `offload`, `onload` and `close` is refused. The same tier again does nothing.

        Args:
            tier: ``host``: the machine's memory; what is there already, on a CPU device, stays. ``disk``: an unnamed
                file in the folder for temporary files (set ``TMPDIR`` where that one lies in memory), gone after
                `onload`, `close` or the end of the process, however it ends.

        Raises:
            ConfigError: an unknown tier.
            TrainerError: the disk is full; nothing was moved.
        """
        self._check_alive()
        if tier not in TIERS:
            raise ConfigError(f"tier={tier!r} is unknown; {nearest(tier, TIERS)}.")
        if tier != self._tier:
            self.onload()
            self._offload(tier)
            self._tier = tier

    def onload(self) -> None:
        """Undo `offload`, bit for bit; does nothing where nothing was offloaded."""
        self._check_alive()
        if self._tier is not None:
            self._onload()
            self._tier = None

    def rollout_engine(self, **settings: Any) -> InferenceEngine:
        """An engine on the trainer's own weights, over the same ranks: nothing is copied to another framework.

        It serves what was exported last: after an update of the trainer it refuses until ``engine.update_weights`` is handed
        the next export, which moves no bytes. It takes exports of no other trainer, and ends with this one.

        Args:
            settings: `EngineConfig`'s max_model_len, max_batch_size, max_prefill_tokens, dtype (the trainer's unless told
                otherwise) and seed.

        Raises:
            UnsupportedCapability: the backend has none, or the head is ``value``.
            ConfigError: another setting.
        """
        self._check_open()
        if not self.spec.support(Capability.ROLLOUT_ENGINE):
            raise self._unsupported(Capability.ROLLOUT_ENGINE)
        if self.config.head != "policy":
            raise UnsupportedCapability("a critic generates nothing; ask the actor for a rollout engine.")
        foreign = sorted(settings.keys() - set(ROLLOUT_SETTINGS))
        if foreign:
            raise ConfigError(
                f"a rollout engine does not read {', '.join(foreign)}: it is where its trainer is; allowed: "
                f"{', '.join(ROLLOUT_SETTINGS)}."
            )
        whole = {"dtype": self.config.dtype, "trust_remote_code": self.config.trust_remote_code, **settings}
        return self._rollout_engine(EngineConfig(device=self.config.device, **whole), settings)

    def reference(self) -> TrainerBackend:
        """The policy as it was loaded: `compute_log_probs` of it, whatever has been trained since.

        With adapters it is a view on this trainer's weights, adapters off: no copy; it works until this trainer is closed,
        and closing it closes nothing else. Without, it is a frozen copy, loaded again over the same ranks.

        Raises:
            UnsupportedCapability: the backend has none, or the head is ``value``.
        """
        raise self._unsupported(Capability.REFERENCE)

    # -- life ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capabilities(self) -> Mapping[Capability, Support]:
        """What this backend declares."""
        return self.spec.capabilities

    # -- what a backend writes -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _compute_log_probs(self, batch: TensorDict) -> LogProbs: ...

    @abc.abstractmethod
    def _compute_values(self, batch: TensorDict) -> Tensor: ...

    @abc.abstractmethod
    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]: ...

    @abc.abstractmethod
    def _optimizer_step(self) -> dict[str, float]: ...

    @abc.abstractmethod
    def _export_weights(self) -> WeightUpdate: ...

    @abc.abstractmethod
    def _save_checkpoint(self, folder: Path) -> None: ...

    @abc.abstractmethod
    def _load_checkpoint(self, folder: Path) -> None: ...

    @abc.abstractmethod
    def _release(self) -> None:
        """Drop models, processes and files."""

    def _rollout_engine(self, config: EngineConfig, settings: Mapping[str, Any]) -> InferenceEngine:
        """`config` with all that is the trainer's; `settings` as they were given."""
        raise self._unsupported(Capability.ROLLOUT_ENGINE)

    def _save_adapter(self, folder: Path) -> None:
        raise self._unsupported(Capability.LORA)

    def _offload(self, tier: str) -> None:
        """Nothing is offloaded now, and `tier` is one of `TIERS`."""
        raise self._unsupported(Capability.OFFLOAD)

    def _onload(self) -> None:
        raise self._unsupported(Capability.OFFLOAD)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check(self, batch: TensorDict, *, head: str, also: tuple[str, ...] = ()) -> None:
        from verl_adaptor.batch import require, require_prompts

        self._check_open()
        if self.config.head != head:
            raise UnsupportedCapability(
                f"this trainer was made with head={self.config.head!r}; the call needs head={head!r}: make another trainer."
            )
        require(batch, ("input_ids", "attention_mask", "position_ids", "responses", "temperature", *also))
        require_prompts(batch)  # of all rows, so that all ranks refuse alike

    def _check_trainable(self) -> None:
        self._check_open()
        if not self.config.trainable:
            raise TrainerError("this trainer was made with trainable=False and has no optimizer; make it trainable.")

    def check_exported(self, version: int) -> None:
        """Raise `TrainerError` unless this version of the weights is what the trainer holds."""
        self._check_open()
        if self._changed or self._version != version:
            raise TrainerError(
                f"the weights of version {version} are gone: the trainer has gone on. Call export_weights() again, and pull "
                "its buckets before the next optimizer step."
            )

    def _check_open(self) -> None:
        self._check_alive()
        if self._tier is not None:
            raise TrainerError(f"this trainer is offloaded to {self._tier}; call onload() first.")

    def _check_alive(self) -> None:
        if self._closed:
            raise TrainerClosed("this trainer was closed; create a new one.")

    def _unsupported(self, capability: Capability) -> UnsupportedCapability:
        return UnsupportedCapability(f"{self.spec.name}: {capability} is {self.spec.support(capability)}.")
