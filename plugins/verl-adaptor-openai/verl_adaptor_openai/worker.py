"""What vLLM's own server is given with ``--worker-extension-cls verl_adaptor_openai.worker.PolicyWorker``."""

from __future__ import annotations

from typing import Any

from verl_adaptor.backends.vllm.sampler import SEED, TEMPERATURE
from verl_adaptor.backends.vllm.worker import WorkerExtension

_OTHER_RUNNER = (
    "vLLM's second model runner does not tell its sampler the requests; start the server with "
    "VLLM_USE_V2_MODEL_RUNNER=0"
)
_AHEAD = (
    "with asynchronous scheduling the place of a token is not known when it is sampled; start the server with "
    "--no-async-scheduling"
)


class PolicyWorker(WorkerExtension):
    """Mixed into vLLM's worker class; its methods are called over HTTP, by ``/collective_rpc``."""

    vllm_config: Any

    def openai_install(self, vocabulary: int, seed: int) -> dict[str, str]:
        """Sample as verl-adaptor means it: log-probs are the tempered policy's, a seed repeats its sample in any batch.

        Args:
            vocabulary: ids from here on are never sampled.
            seed: for requests that bring none.

        Returns:
            Under which names a request brings its ``seed`` and ``temperature``, or why it is ``refused``.
        """
        if not hasattr(self.model_runner, "input_batch"):
            return {"refused": _OTHER_RUNNER}
        if self.vllm_config.scheduler_config.async_scheduling:
            return {"refused": _AHEAD}
        self.adaptor_install(vocabulary, seed)
        return {"seed": SEED, "temperature": TEMPERATURE}
