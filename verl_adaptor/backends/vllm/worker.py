"""What an engine asks of each of its vLLM workers, in this process or in others."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from verl_adaptor.backends.vllm.adapters import POLICY
from verl_adaptor.backends.vllm.loading import loader_for
from verl_adaptor.backends.vllm.sampler import PolicySampler
from verl_adaptor.errors import EngineError
from verl_adaptor.weights import Layout, attach, digests, read

_SHARED_MEMORY = Path("/dev/shm")


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); each method is called on all workers at once."""

    model_runner: Any
    add_lora: Any
    update_weights: Any
    device: Any
    adaptor_folder: str | None = None

    def adaptor_install(self, vocabulary: int, seed: int) -> None:
        """Sample as this project means it, and be ready for new weights."""
        runner = self.model_runner
        self.adaptor_sampler = runner.sampler = PolicySampler(runner, vocabulary, seed)
        self.adaptor_loader = loader_for(runner.model, runner.model_config, self.device)
        for segment in _SHARED_MEMORY.glob(f"{os.environ.get('VLLM_DIST_IDENT')}-*-cpushm_*"):
            segment.unlink(
                missing_ok=True
            )  # all tensor-parallel ranks have it open by now, and a killed one removes nothing

    def adaptor_end_with(self, driver: int) -> None:
        """End this worker and the engine core that it belongs to when that process ends, in whatever way."""
        if driver == os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            waits_for = os.pidfd_open(driver)
            core = None if os.getppid() == driver else os.pidfd_open(os.getppid())
            threading.Thread(target=self._adaptor_end_with, args=(waits_for, core), daemon=True).start()

    def adaptor_score_at(self, temperature: float) -> None:
        """From now on log-probs of prompts are at this temperature."""
        self.adaptor_sampler.score_temperature = temperature

    def adaptor_begin(self) -> None:
        """New weights come."""
        self.adaptor_loader.begin()

    def adaptor_load(self, bucket: dict[str, Tensor]) -> None:
        """Some of them, fused groups whole."""
        self.adaptor_loader.load(bucket)

    def adaptor_load_adapters(self, folder: str) -> None:
        """Adapters in place of those that requests run with."""
        if not Path(folder).exists():
            raise EngineError(
                f"a vLLM worker does not see {folder}; set weight_folder to a folder that all of them see."
            )
        self.add_lora(LoRARequest(POLICY.lora_name, POLICY.lora_int_id, folder, load_inplace=True))

    def adaptor_attach(self, path: str, size: int) -> None:
        """Buckets come through this shared memory from now on."""
        self.adaptor_memory = attach(path, size)

    def adaptor_sees(self, path: str) -> bool:
        """Whether this worker has the file or folder too."""
        return Path(path).exists()

    def adaptor_clears(self, folder: str) -> None:
        """Remove this folder with the driver, should that die without doing so."""
        self.adaptor_folder = folder

    def adaptor_load_shared(self, layout: Layout, digest: bool) -> dict[str, int]:
        """Load what lies there; the digests of what was read, if asked for."""
        return self._adaptor_load(read(self.adaptor_memory, layout), digest)

    def adaptor_load_file(self, path: str, digest: bool) -> dict[str, int]:
        """Load a safetensors file; likewise."""
        return self._adaptor_load(load_file(path), digest)

    def _adaptor_load(self, bucket: dict[str, Tensor], digest: bool) -> dict[str, int]:
        found = digests(bucket) if digest else {}
        self.adaptor_loader.load(bucket)
        return found

    def adaptor_update_weights(self, pickled: bytes) -> None:
        """One call of a weight transfer of vLLM's own, from the driver."""
        self.update_weights(pickle.loads(pickled))

    def adaptor_finish(self) -> None:
        """All were loaded."""
        self.adaptor_loader.finish()

    def _adaptor_end_with(self, driver: int, core: int | None) -> None:
        """Wait for the driver to end; then nobody is left to end these. Both are pidfds: another worker may end the core."""
        select.select([driver], [], [])
        if self.adaptor_folder is not None:
            shutil.rmtree(self.adaptor_folder, ignore_errors=True)
        if core is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
