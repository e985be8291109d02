"""The two contracts: `InferenceEngine` and `TrainerBackend`.

Their base classes own what must be the same everywhere (validation, versions, request ids, close, the sync / async /
stream trio, the checks around an update); a backend writes the few primitives beneath.
"""

from verl_adaptor.protocols.engine import InferenceEngine, InFlight, Served
from verl_adaptor.protocols.requests import EngineModel, PromptLike, SampleRequest
from verl_adaptor.protocols.trainer import Denominators, LogProbs, Loss, LossOutput, TrainerBackend

__all__ = [
    "Denominators",
    "EngineModel",
    "InFlight",
    "InferenceEngine",
    "LogProbs",
    "Loss",
    "LossOutput",
    "PromptLike",
    "SampleRequest",
    "Served",
    "TrainerBackend",
]
