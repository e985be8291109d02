"""What a backend can do, said once and read by everyone.

Run-time checks, the conformance suite, the documentation and the matrix all read `BackendSpec`. Nothing asks for a
backend's name; it asks for a capability.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_adaptor.findings import Rule

Role = Literal["inference", "training"]


class Capability(enum.StrEnum):
    """One ability that some backends have and others lack. The comment is what a listing shows."""

    # inference
    STREAM = "stream"  # async iterator of deltas
    ABORT = "abort"  # stop one request and free its place
    SCORE = "score"  # log-probs of given tokens
    UPDATE_WEIGHTS = "update_weights"  # new weights without a restart
    ADAPTER_SYNC = "adapter_sync"  # take low-rank adapters without their base
    IN_FLIGHT_KEEP = "in_flight_keep"  # go on with running requests after a weight update
    SLEEP = "sleep"  # give memory back and take it again
    SERVE = "serve"  # an OpenAI-compatible HTTP server on the engine
    PENALTIES = "penalties"  # penalties, logit bias, min_tokens (evaluation only)
    # training
    VALUE_HEAD = "value_head"  # train a critic
    PACKING = "packing"  # several sequences in one row
    TOKEN_BUDGET = "token_budget"  # micro-batches by tokens instead of rows
    ACTIVATION_CHECKPOINTING = "activation_checkpointing"  # recompute activations in the backward pass
    BF16 = "bf16"  # bfloat16 compute, float32 master weights
    EXACT_RESUME = "exact_resume"  # checkpoints resume bit for bit
    SAVE_PRETRAINED = "save_pretrained"  # a Hugging Face folder
    OFFLOAD = "offload"  # move weights and optimizer state to another tier and back
    LORA = "lora"  # train adapters only
    REFERENCE = "reference"  # a reference policy on the trainer's own weights (adapters off)
    ROLLOUT_ENGINE = "rollout_engine"  # generate on the trainer's own shards
    # parallel strategies
    DATA_PARALLEL = "data_parallel"
    TENSOR_PARALLEL = "tensor_parallel"
    PIPELINE_PARALLEL = "pipeline_parallel"
    SEQUENCE_PARALLEL = "sequence_parallel"
    CONTEXT_PARALLEL = "context_parallel"
    EXPERT_PARALLEL = "expert_parallel"


class SupportLevel(enum.StrEnum):
    """How far a capability goes."""

    FULL = "full"
    SINCE = "since"
    ONLY = "only"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not implemented"


@dataclass(frozen=True)
class Support:
    """One of five answers to 'can it?'. Make one with `FULL`, `since`, `only`, `unsupported` or `not_implemented`."""

    level: SupportLevel
    detail: str = ""
    """SINCE: the version. ONLY: the device (``cuda``), the role (``training``) or a mode. UNSUPPORTED: why.
    NOT_IMPLEMENTED: a link."""
    why: str = ""
    """ONLY: why it is limited to that device or mode."""

    def __bool__(self) -> bool:
        """True where it works here and now as far as the level alone tells (FULL and SINCE)."""
        return self.level in (SupportLevel.FULL, SupportLevel.SINCE)

    def __str__(self) -> str:
        tail = " ".join(part for part in (self.detail, f"({self.why})" if self.why else "") if part)
        return f"{self.level}{f': {tail}' if tail else ''}"


FULL = Support(SupportLevel.FULL)


def since(version: str) -> Support:
    """Works from this version of the framework on."""
    return Support(SupportLevel.SINCE, version)


def only(where: str, why: str) -> Support:
    """Works only on this device or in this mode, and why."""
    return Support(SupportLevel.ONLY, where, why)


def unsupported(why: str) -> Support:
    """The framework cannot do it, and why; calling it must raise `UnsupportedCapability`."""
    return Support(SupportLevel.UNSUPPORTED, why)


def not_implemented(link: str) -> Support:
    """It could be done and is not yet; where that is tracked."""
    return Support(SupportLevel.NOT_IMPLEMENTED, link)


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """All that is known about a backend before its framework is imported. Making one imports nothing heavy.

    >>> BackendSpec(name="mine", engine="my_package.engine:MyEngine").roles
    ('inference',)
    """

    name: str
    """What a user types."""
    aliases: tuple[str, ...] = ()
    summary: str = ""
    """One phrase for listings."""
    engine: str | None = None
    """``package.module:Class`` of the `InferenceEngine`, imported at first use; None if it does not generate."""
    trainer: str | None = None
    """``package.module:Class`` of the `TrainerBackend`; None if it does not train."""
    distribution: str = ""
    """The framework's distribution on the package index; several, separated by ``|``, are alternatives."""
    version_range: str = ""
    """The measured range as a PEP 440 specifier, e.g. ``>=5.0,<5.20``; empty admits all."""
    install: str = ""
    """The command that installs what is missing."""
    engine_options: str | None = None
    """``package.module:Model`` of the pydantic model of this engine's own options."""
    trainer_options: str | None = None
    capabilities: Mapping[Capability, Support] = field(default_factory=dict)
    """What is absent counts as UNSUPPORTED."""
    own_processes: bool = False
    """The engine starts the processes of its ranks and replicas itself; else a worker group does."""
    process_mib: int = 0
    """Host memory of its framework's code in a process, beside torch's and transformers', in MiB, as measured."""
    cache_bytes: Callable[[Any], int | None] | None = None
    """(`preflight.Facts`) -> what its engine holds for keys and values all the time, in bytes; None: only what runs needs."""
    default_zero_stage: int = 0
    """What its trainer takes where `zero_stage` is left out."""
    zero_stages: tuple[int, ...] = ()
    """Values of `zero_stage` that the trainer honours; the factory refuses all others."""
    gradient_syncs: tuple[str, ...] = ()
    """Values of `gradient_sync` that the trainer honours; the factory refuses all others."""
    preflight: Sequence[Rule] = ()
    """Rules about this framework alone, run before anything loads: each is handed a `preflight.Facts`."""
    process_effects: tuple[str, ...] = ()
    """What it changes in the process and cannot undo (law I10), a phrase each."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles this backend can play."""
        roles: list[Role] = []
        if self.engine:
            roles.append("inference")
        if self.trainer:
            roles.append("training")
        return tuple(roles)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    def support(self, capability: Capability) -> Support:
        """The declared support; UNSUPPORTED where nothing is declared."""
        return self.capabilities.get(capability, unsupported("not declared by this backend"))
