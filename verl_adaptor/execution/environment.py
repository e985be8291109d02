"""What a rank's process takes over from the one that starts it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from verl_adaptor.errors import BackendNotInstalled, ConfigError

LOOPBACK = "127.0.0.1"
PASSED_ON = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "VERL_ADAPTOR_", "TORCH", "NCCL_", "GLOO_", "DS_", "OMP_", "MKL_")
"""Variables that begin so are set on every rank as they are here, on whatever machine it is."""


QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Unless they are set here: one progress bar a rank is noise."""


def passed_on(cpus_per_worker: float) -> dict[str, str]:
    """Those variables; without OMP_NUM_THREADS, a rank takes as many threads as it has CPUs."""
    threads = {"OMP_NUM_THREADS": str(max(1, int(cpus_per_worker)))}
    return QUIET | threads | {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


class Place(NamedTuple):
    """Where a rank's process was put."""

    node: str
    address: str
    """The node's, as others reach it."""
    gpus: tuple[str, ...]
    """Reserved for this rank."""
    port: int
    """A free one."""


def rank_environments(places: Sequence[Place], cpus_per_worker: float) -> list[dict[str, str]]:
    """What torchrun would set, a rank each; and each rank sees the GPUs of all ranks on its node, as under torchrun.

    Where all are on one node nothing has to listen to the network.
    """
    master = LOOPBACK if len({place.node for place in places}) == 1 else places[0].address
    environments = []
    for rank, place in enumerate(places):
        here = [other for other, there in enumerate(places) if there.node == place.node]
        gpus = dict.fromkeys(gpu for other in here for gpu in places[other].gpus)
        environments.append(
            passed_on(cpus_per_worker)
            | {"RANK": str(rank), "WORLD_SIZE": str(len(places))}
            | {"LOCAL_RANK": str(here.index(rank)), "LOCAL_WORLD_SIZE": str(len(here))}
            | {"MASTER_ADDR": master, "MASTER_PORT": str(places[0].port)}
            | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
        )
    return environments


def interface(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where the system does not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    return None


def user_paths() -> list[str]:
    """Where Python finds the user's own modules: its search path without what belongs to an installation."""
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    folders = dict.fromkeys(str(Path(entry or ".").absolute()) for entry in sys.path)
    return [f for f in folders if not any(Path(f).resolve().is_relative_to(prefix) for prefix in installed)]


def check_python(executable: str) -> None:
    """That another environment can run ranks: it has this package, and Ray in this version.

    An interpreter that is not on this machine is left to Ray.

    Raises:
        ConfigError: no such program, or another version of Ray or Python.
        BackendNotInstalled: verl-adaptor or Ray is missing there.
    """
    import ray

    found = shutil.which(executable)
    if found is None:
        raise ConfigError(f"python_executable={executable!r} is no program here; give the path of a venv's bin/python.")
    ask = (
        "import importlib.metadata as m, sys; print(*sys.version_info[:2], sep='.'); "
        "[print(m.version(p)) for p in sys.argv[1:]]"
    )
    done = subprocess.run(
        [found, "-c", ask, "ray", "verl-adaptor"], capture_output=True, text=True, timeout=60, check=False
    )
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    match done.stdout.split():
        case [there, version, _] if (there, version) != (python, ray.__version__):
            raise ConfigError(
                f"python_executable={executable!r} has Python {there} and Ray {version}, and this process Python {python} and "
                f"Ray {ray.__version__}; both must be the same: {executable} -m pip install ray=={ray.__version__}"
            )
        case [_, _, _]:
            return
    missing = "verl-adaptor" if len(done.stdout.split()) == 2 else f"ray=={ray.__version__} verl-adaptor"
    raise BackendNotInstalled(
        f"python_executable={executable!r} lacks what runs a rank; install it there: {executable} -m pip install {missing}"
    )


@contextmanager
def process_as_found() -> Iterator[None]:
    """Ray sets variables and a SIGTERM handler in the process that imports and starts it; put them back (law I10)."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
