"""What vLLM reads from its process, and what it changes there."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

LEVEL = "VLLM_LOGGING_LEVEL"
QUIET = {LEVEL: "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Unless they are set here: vLLM tells a screenful at INFO, and its makers how it is used. The last two are for its processes."""
_NOISE = re.compile(rb"Warning: NUMA binding: Using MEMBIND policy")
"""Lines that its C++ prints whatever the level."""
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads of this process are not only vLLM's
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler knows no requests
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one token more than ours: see `engine.py`
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


@contextmanager
def vllm_environment(*, beside: bool = False) -> Iterator[None]:
    """Where vLLM is imported or starts an engine: its settings are in the environment, and all is put back after (law I10)."""
    before, threads = dict(os.environ), torch.set_num_threads
    numbers = torch.get_rng_state(), np.random.get_state(), random.getstate()
    dtype = torch.get_default_dtype()
    if LEVEL not in os.environ:
        logging.getLogger("vllm").setLevel(QUIET[LEVEL])
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(beside)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        torch.set_num_threads = threads  # vLLM makes it do nothing
        torch.set_rng_state(numbers[0])
        np.random.set_state(numbers[1])
        random.setstate(numbers[2])
        torch.set_default_dtype(dtype)


@contextmanager
def without_noise() -> Iterator[None]:
    """What this process prints to its error stream meanwhile, its C++ too, comes after, without lines that are only noise."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        real = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            caught.seek(0)
            for line in caught:
                if not _NOISE.search(line):
                    os.write(2, line)
