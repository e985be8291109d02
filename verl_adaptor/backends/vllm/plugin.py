"""What vLLM's own processes are told of this package: it loads ``vllm.general_plugins`` in each of them."""

from __future__ import annotations

NAME = "verl_adaptor"
_MODULE = "verl_adaptor.backends.vllm.weight_transfer"


def register() -> None:
    """Make ``--weight-transfer-config '{"backend": "verl_adaptor"}'`` known, on vLLM's side and on the trainer's."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if NAME not in WeightTransferEngineFactory._registry:  # vLLM may call this more than once
        WeightTransferEngineFactory.register_engine(NAME, _MODULE, "SharedMemoryEngine")
        WeightTransferTrainerFactory.register_engine(NAME, _MODULE, "SharedMemoryTrainerEngine")
