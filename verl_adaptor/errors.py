"""Every error this package raises on purpose, in one tree.

::

    VerlAdaptorError
    ├── ConfigError                 a setting is wrong (also a ValueError)
    │   └── UnknownKey              a key nobody reads; names the nearest ones
    ├── BackendError
    │   ├── UnknownBackend          no such name; names the nearest ones
    │   ├── DuplicateBackend        two distributions claim one name
    │   ├── BrokenPlugin            a plug-in was found but could not be loaded
    │   ├── BackendNotInstalled     the framework is missing (also an ImportError)
    │   └── BackendVersionError     the framework's version is outside the measured range
    ├── UnsupportedCapability       the backend cannot do it, and says which can
    ├── ModelError                  a model folder is missing, incomplete or of a kind we cannot drive
    ├── DataError                   prompts cannot be read (file, column, type)
    ├── BatchError                  a training batch lacks a key or has a wrong shape (also a ValueError)
    ├── RewardError                 rewards failed: a function raised, a service gave none, or a count or value is wrong
    ├── EngineError
    │   ├── InvalidRequest          one request is refused; the others live on (also a ValueError)
    │   ├── EngineClosed            used after close()
    │   ├── EnginePaused            a call would wait for ever on a paused or sleeping engine
    │   ├── RolloutTimeout          rollouts were not finished in time; the engine may be well
    │   └── WeightUpdateError       names, shapes or values of a weight update are wrong
    └── TrainerError
        ├── TrainerClosed           used after close()
        ├── MissingGradient         a trainable parameter got no gradient
        ├── NonFiniteGradient       a NaN or Inf gradient, with ``non_finite="raise"``
        ├── WorkerError             a rank failed; names rank and operation
        │   ├── WorkerDied          its process is gone
        │   └── WorkerTimeout       it did not answer in time
        └── CheckpointError         a checkpoint is missing, half-written or of another layout

Each message says what was given, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class VerlAdaptorError(Exception):
    """Root of the tree: catch this to catch whatever the package raises on purpose."""


class ConfigError(VerlAdaptorError, ValueError):
    """A setting is wrong: the message names the key, the value, what is allowed and the cure.

    `findings` are the records (`findings.Finding`) that the message was made of, where rules found it.
    """

    def __init__(self, message: str = "", *, findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


class UnknownKey(ConfigError):
    """A key that nobody reads. Refused, because a swallowed option looks like one that works."""


class BackendError(VerlAdaptorError):
    """A backend cannot be found, loaded or used."""


class UnknownBackend(BackendError, LookupError):
    """No backend has this name in the asked role."""


class DuplicateBackend(BackendError):
    """Two distributions register one name or alias (law R2)."""


class BrokenPlugin(BackendError):
    """The backend's distribution is installed, but its entry point failed to load (law R1)."""


class BackendNotInstalled(BackendError, ImportError):
    """The framework behind a backend, or an optional extra, is missing."""


class BackendVersionError(BackendError):
    """The installed framework is outside the version range that was measured to work."""


class UnsupportedCapability(VerlAdaptorError, NotImplementedError):
    """The backend does not do this; the message says why and names the backends that do, where known."""


class ModelError(VerlAdaptorError):
    """A model folder is missing, incomplete, or of a kind that cannot be driven."""


class DataError(VerlAdaptorError):
    """A prompt source cannot be read."""


class BatchError(VerlAdaptorError, ValueError):
    """A training batch lacks a key, or one has the wrong shape or type."""


class RewardError(VerlAdaptorError):
    """A reward function raised, a reward service gave no answer, or the answer is not one finite number for each trajectory."""


class EngineError(VerlAdaptorError):
    """An inference engine failed."""


class InvalidRequest(EngineError, ValueError):
    """One request cannot be served; it alone is refused (law I8)."""


class EngineClosed(EngineError):
    """The engine was used after close() (law I9)."""


class EnginePaused(EngineError):
    """A call would wait for ever, because the engine is paused or asleep."""


class RolloutTimeout(EngineError):
    """Rollouts were not finished in time; what hangs may be a tool, and the engine may be well."""


class WeightUpdateError(EngineError):
    """A weight update does not fit the engine's model; nothing was written (law I6)."""


class TrainerError(VerlAdaptorError):
    """A trainer backend failed."""


class TrainerClosed(TrainerError):
    """The trainer was used after close()."""


class MissingGradient(TrainerError):
    """A trainable parameter got no gradient, or only zeros, where it gets one without activation checkpointing."""


class NonFiniteGradient(TrainerError):
    """A gradient is NaN or infinite; the weights were not touched (law T7)."""


class WorkerError(TrainerError):
    """A rank of a worker group failed; the message names rank, operation and the last metrics."""


class WorkerDied(WorkerError):
    """The process of a rank is gone."""


class WorkerTimeout(WorkerError):
    """A rank did not answer within the timeout."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, half-written, foreign or of another layout."""


class PipelineError(VerlAdaptorError):
    """A stage of the asynchronous pipeline died, or stands still. `stage` says which."""

    def __init__(self, message: str, *, stage: str = "") -> None:
        super().__init__(message)
        self.stage = stage


def kind_of(error: BaseException) -> str:
    """Name of the nearest class of this module that `error` is; empty if none. With the sentence it is all that crosses
    between processes."""
    return next((kind.__name__ for kind in type(error).__mro__ if globals().get(kind.__name__) is kind), "")


def nearest(given: str, allowed: Iterable[str], *, most: int = 3) -> str:
    """The tail of an error sentence: the names nearest to a mistyped one, or all when none is near.

    >>> nearest("vlm", ["hf", "vllm"])
    "did you mean 'vllm'? Known: hf, vllm"
    """
    known = sorted(set(allowed))
    close = difflib.get_close_matches(given, known, n=most, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    return f"{hint}Known: {', '.join(known) or '(none)'}"
