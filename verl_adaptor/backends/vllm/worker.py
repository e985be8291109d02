"""What an engine asks of each of its vLLM workers, in this process or in others."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Any

from torch import Tensor

from verl_adaptor.backends.vllm.loading import loader_for
from verl_adaptor.backends.vllm.sampler import PolicySampler
from verl_adaptor.weights import Layout, attach, digests, read


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); each method is called on all workers at once."""

    model_runner: Any
    device: Any

    def adaptor_install(self, vocabulary: int, seed: int) -> None:
        """Sample as this project means it, and be ready for new weights."""
        runner = self.model_runner
        self.adaptor_sampler = runner.sampler = PolicySampler(runner, vocabulary, seed)
        self.adaptor_loader = loader_for(runner.model, runner.model_config, self.device)

    def adaptor_end_with(self, driver: int) -> None:
        """End this worker and the engine core that it belongs to when that process ends, in whatever way."""
        if driver != os.getpid():
            threading.Thread(target=_end_with, args=(driver,), daemon=True).start()

    def adaptor_score_at(self, temperature: float) -> None:
        """From now on log-probs of prompts are at this temperature."""
        self.adaptor_sampler.score_temperature = temperature

    def adaptor_begin(self) -> None:
        """New weights come."""
        self.adaptor_loader.begin()

    def adaptor_load(self, bucket: dict[str, Tensor]) -> None:
        """Some of them, fused groups whole."""
        self.adaptor_loader.load(bucket)

    def adaptor_attach(self, path: str, size: int) -> None:
        """Buckets come through this shared memory from now on."""
        self.adaptor_memory = attach(path, size)

    def adaptor_detach(self) -> None:
        """No more of them: let the memory go."""
        del self.adaptor_memory

    def adaptor_load_shared(self, layout: Layout, digest: bool) -> dict[str, int]:
        """Load what lies there; the digests of what was read, if asked for."""
        bucket = read(self.adaptor_memory, layout)
        found = digests(bucket) if digest else {}
        self.adaptor_loader.load(bucket)
        return found

    def adaptor_finish(self) -> None:
        """All were loaded."""
        self.adaptor_loader.finish()


def _end_with(driver: int) -> None:
    """Wait for the process to end; then nobody is left to end these."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(driver)], [], [])
    core = os.getppid()
    if core != driver:
        os.kill(core, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
