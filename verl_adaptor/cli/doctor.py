"""``verl-adaptor doctor``: facts about this environment, and what to do about those that bite later.

Each check is a small function that yields findings; a finding of severity ``error`` makes the command exit with 2.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from verl_adaptor.cli.backends import status
from verl_adaptor.cli.findings import show
from verl_adaptor.findings import Finding
from verl_adaptor.preflight.versions import installed
from verl_adaptor.registry import duplicate_sentence, registry

GIB = 2**30


def doctor(*, as_json: bool = False) -> bool:
    """Print the findings; True if none is an error."""
    return show(examine(), as_json=as_json)


def examine() -> list[Finding]:
    """Run all checks."""
    return [finding for check in (*SOFTWARE, *MACHINE) for finding in check()]


# -- software ----------------------------------------------------------------------------------------------------


def python() -> Iterator[Finding]:
    """The interpreter."""
    yield Finding("python", "ok", f"Python {platform.python_version()} at {sys.prefix}")


def frameworks() -> Iterator[Finding]:
    """Each backend's framework against its measured range (C01)."""
    for entry in registry().entries:
        spec, found = entry.spec, installed(entry.spec)
        state = status(spec)
        have = f"{found.distribution} {found.version}" if found else spec.distribution or "no framework of its own"
        fact = f"backend {spec.name}: {have}: {state}"
        if state == "version outside":
            yield Finding("framework", "error", f"{fact} {spec.version_range}", spec.install, ("C01",))
        else:  # one that is not installed is not missed until it is asked for
            yield Finding("framework", "ok", fact, "" if state == "ok" else spec.install)


def pins() -> Iterator[Finding]:
    """What the frameworks demand of each other, against what is installed: pip lets one upgrade break another (C01)."""
    entries = (installed(entry.spec) for entry in registry().entries)
    for framework in sorted({found.distribution for found in entries if found} | {"verl-adaptor"}):
        for line in metadata.requires(framework) or ():
            wanted = Requirement(line)
            have = _version(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if have is not None and applies and not wanted.specifier.contains(have, prereleases=True):
                fact = f"{framework} {metadata.version(framework)} wants {wanted.name}{wanted.specifier}, not {have}"
                cure = f"pip install '{wanted.name}{wanted.specifier}', unless tests passed with this one"
                yield Finding("pins", "warning", fact, cure, ("C01",))


def plugins() -> Iterator[Finding]:
    """Plug-ins that could not be loaded, and names that two claim (laws R1, R2)."""
    for broken in registry().broken:
        cure = f"mend it, or pip uninstall {broken.source.distribution}"
        yield Finding("broken-plugin", "error", str(broken), cure, ("C33",))
    for name, claims in registry().duplicates().items():
        yield Finding("duplicate-name", "error", duplicate_sentence(name, claims))


def torch_build() -> Iterator[Finding]:
    """The build of torch, read from its files, against the GPUs of this machine."""
    origin = getattr(find_spec("torch"), "origin", None)
    if origin is None:
        yield Finding("torch", "error", "torch is not installed", "pip install torch")
        return
    written = (Path(origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", written, re.MULTILINE)
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    fact = f"torch {metadata.version('torch')}, {f'CUDA {found[1]}' if found else 'no CUDA'}, {gpus} NVIDIA device(s)"
    if gpus and not found:
        yield Finding("torch", "warning", fact, "the GPUs lie idle: install a CUDA build of torch")
    else:
        yield Finding("torch", "ok", fact)


def torch_companions() -> Iterator[Finding]:
    """torchvision and its like from another build than torch fail to import, and then break transformers."""
    versions = {d: _version(d) for d in ("torch", "torchvision", "torchaudio", "torchcodec")}
    build = _local(versions.pop("torch"))
    strangers = [d for d, version in versions.items() if version is not None and build and _local(version) != build]
    if strangers:
        fact = f"torch is a +{build} build; {', '.join(strangers)} are not"
        yield Finding("torch-companions", "warning", fact, f"pip uninstall {' '.join(strangers)}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _local(version: str | None) -> str:
    return (version or "").partition("+")[2]


# -- machine -----------------------------------------------------------------------------------------------------


def cpus() -> Iterator[Finding]:
    """CPUs this process may use, against the threads it would start."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus()
    limit = min(usable, quota or usable)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    fact = f"{usable} CPUs" + (f", quota {quota:g}" if quota else "") + f", OMP_NUM_THREADS={threads or 'unset'}"
    wanted = int(threads) if threads.isdigit() else usable
    if wanted > max(limit, 1):
        yield Finding("cpus", "warning", fact, f"more threads than CPUs: export OMP_NUM_THREADS={max(1, int(limit))}")
    else:
        yield Finding("cpus", "ok", fact)


def _cgroup_cpus() -> float | None:
    """CPUs a container may use; None without a quota."""
    file = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = file.read_text().strip().partition(" ") if file.exists() else ("max", "", "")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def memory() -> Iterator[Finding]:
    """Host memory that is free, and the container's limit."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return
    kib = {line.split(":")[0]: int(line.split()[1]) for line in file.read_text().splitlines()}
    total, free = kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024
    limit_file = Path("/sys/fs/cgroup/memory.max")
    limit = limit_file.read_text().strip() if limit_file.exists() else "max"
    fact = f"{free / GIB:.1f} of {total / GIB:.1f} GiB memory free"
    fact += f", container limit {int(limit) / GIB:.1f} GiB" if limit != "max" else ""
    enough = min(free, int(limit) if limit != "max" else free) >= 2 * GIB
    cure = "" if enough else "training needs about 16 bytes a parameter: free memory, or take a smaller model"
    yield Finding("memory", "ok" if enough else "warning", fact, cure)


def shared_memory() -> Iterator[Finding]:
    """/dev/shm: worker processes exchange tensors there, and a full one kills them (C24)."""
    cure = "enlarge it: mount -o remount,size=8G, docker --shm-size=8g"
    yield from _space("shared-memory", Path("/dev/shm"), 1 * GIB, cure, "C24")


def disk() -> Iterator[Finding]:
    """Room for checkpoints in the working folder."""
    yield from _space("disk", Path.cwd(), 5 * GIB, "free some, or let --output point elsewhere")


def _space(id: str, folder: Path, enough: int, cure: str, *reports: str) -> Iterator[Finding]:
    if not folder.exists():
        return
    usage = shutil.disk_usage(folder)
    fact = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {folder}"
    short = usage.free < enough
    yield Finding(id, "warning" if short else "ok", fact, cure if short else "", reports)


def open_files() -> Iterator[Finding]:
    """The limit on open files: each worker, socket and shared tensor takes one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 4096:  # RLIM_INFINITY is negative on some platforms
        yield Finding("open-files", "warning", f"at most {soft} open files", f"ulimit -n {min(hard, 65536)}")
    else:
        yield Finding("open-files", "ok", f"at most {soft} open files")


def numa() -> Iterator[Finding]:
    """Memory nodes: a rank whose threads or GPU are on another node than its memory is slow, and nothing says why."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes > 1:
        cure = "bind each rank to one: numactl --cpunodebind=N --membind=N, or torchrun's --numa-binding=node"
        yield Finding("numa", "warning", f"{nodes} NUMA nodes", cure)


def loopback() -> Iterator[Finding]:
    """A port of this machine: process groups meet on one, and Ray and reward services listen on others."""
    try:
        with socket.socket() as listening, socket.socket() as asking:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            asking.settimeout(2)
            asking.connect(listening.getsockname())
    except OSError as error:
        fact = f"a process cannot reach another over 127.0.0.1: {error}"
        yield Finding("loopback", "error", fact, "allow connections on the loopback interface, and free its ports")
    else:
        yield Finding("loopback", "ok", "processes reach each other over 127.0.0.1")


def ray_resources() -> Iterator[Finding]:
    """What Ray would give to ranks: more than there is waits for ever (C14), so it is refused instead."""
    if (version := _version("ray")) is None:
        cure = "pip install 'ray>=2.50', or start scripts with torchrun"
        yield Finding("ray", "ok", "Ray is not installed: ranks run in this process only", cure)
        return
    where = os.environ.get("RAY_ADDRESS")
    there = f"the cluster at {where}" if where else f"{os.cpu_count()} CPUs of this machine"
    yield Finding("ray", "ok", f"Ray {version}: ranks run on {there}", reports=("C14",))


SOFTWARE: Sequence[Callable[[], Iterator[Finding]]] = (
    python,
    frameworks,
    pins,
    plugins,
    torch_build,
    torch_companions,
)
MACHINE: Sequence[Callable[[], Iterator[Finding]]] = (
    cpus,
    numa,
    memory,
    shared_memory,
    open_files,
    disk,
    loopback,
    ray_resources,
)
