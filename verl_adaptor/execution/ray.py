"""Ranks as Ray actors in a placement group, on this machine or over a cluster."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_adaptor.config import ExecutionConfig
from verl_adaptor.errors import ConfigError, WorkerDied, WorkerError, WorkerTimeout
from verl_adaptor.execution.environment import (
    LOOPBACK,
    Place,
    check_python,
    interface,
    process_as_found,
    rank_environments,
    user_paths,
)
from verl_adaptor.execution.group import Answer, Died, Outcome, Raised, Silent, Workers, grace, outcome
from verl_adaptor.execution.resources import gpus_per_worker, no_room, places
from verl_adaptor.execution.worker import Request, Worker

PLACEMENT_S = 10.0
"""Resources that another group has just given back take Ray a moment to count; longer than that they are in use."""
PING_S = 5.0
"""A process that lives answers another thread's question within this time."""
STOP_S = 15.0
"""Longest that the end of the ranks waits for a call that is under way."""


class RayWorker(Worker):
    """A rank as an actor: the same worker, and what placing it needs."""

    @ray.method(concurrency_group="control")
    def locate(self) -> str:
        """`doing`, from a thread of its own, whatever the rank is in."""
        return self.doing()

    def place(self) -> Place:
        """Where this rank is."""
        self._held = held_port()
        port: int = self._held.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), tuple(map(str, ray.get_gpu_ids())), port)

    def bind(self, environment: dict[str, str], paths: Sequence[str]) -> None:
        """`start`, with gloo on the network that MASTER_ADDR is in reach of: the host's name may lead elsewhere."""
        alone = environment["MASTER_ADDR"] == LOOPBACK
        network = interface(LOOPBACK if alone else ray.util.get_node_ip_address())
        self.start(({"GLOO_SOCKET_IFNAME": network} if network else {}) | environment, paths)


def held_port() -> socket.socket:
    """A free port that stays free while the socket lives: nobody else is given it, and torch's store may listen on it, because
    both allow reuse and this one does not listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


class RayWorkers(Workers):
    """Actors, one a rank.

    Args:
        world_size: how many.
        execution: resources and waits.
        device: the trainer's, ``auto`` takes GPUs where Ray has some.
        label: what their output and error sentences call them.
    """

    def __init__(self, world_size: int, execution: ExecutionConfig, device: str, label: str) -> None:
        self.world_size = world_size
        self.label = label
        self._execution = execution
        self._device = device
        self._actors: list[Any] = []
        self._bundles: PlacementGroup | None = None
        self._connected = False
        self._running = threading.Lock()
        """Held while a call waits for the ranks."""
        self._stopping = threading.RLock()

    def start(self) -> None:
        """Connect or start Ray, reserve, and start the actors."""
        if self._execution.python_executable:
            check_python(self._execution.python_executable)
        _session.join(self._execution, self.world_size)
        self._connected = True
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        deadline = time.monotonic() + self._execution.start_timeout_s
        self._bundles = self._reserve()
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        if self._execution.python_executable:
            options["runtime_env"] = {"py_executable": self._execution.python_executable}
        remote: Any = ray.remote  # its stubs lack the argument
        actor = remote(concurrency_groups={"control": 1})(RayWorker)
        self._actors = [
            actor.options(
                num_cpus=self._execution.cpus_per_worker,
                num_gpus=self._gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, bundle),
                **options,
            ).remote(rank, self.label)
            for rank, bundle in enumerate(_by_node(self._bundles))
        ]
        found = self._ask("place", [()] * self.world_size, deadline)
        self.share_memory = found[0].node == ray.get_runtime_context().get_node_id()
        environments = rank_environments(found, self._execution.cpus_per_worker)
        self._ask("bind", [(environment, user_paths()) for environment in environments], deadline)

    def _reserve(self) -> PlacementGroup:
        self._gpus = gpus_per_worker(self._execution, self._device, ray.cluster_resources().get("GPU", 0) > 0)
        bundle = {"CPU": self._execution.cpus_per_worker} | ({"GPU": self._gpus} if self._gpus else {})
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if places(nodes, bundle) < self.world_size:
            raise ConfigError(no_room(self.world_size, bundle, nodes))
        bundles = placement_group([bundle] * self.world_size, strategy="PACK")
        if not bundles.wait(PLACEMENT_S):
            remove_placement_group(bundles)
            raise ConfigError(no_room(self.world_size, bundle, nodes, free=ray.available_resources()))
        return bundles

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]], deadline: float) -> list[Any]:
        """One call on each actor while they start; raises where one does not come up."""
        refs = [getattr(a, method).remote(*args) for a, args in zip(self._actors, arguments, strict=True)]
        try:
            return ray.get(refs, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError as error:
            late = [str(rank) for rank, ref in enumerate(refs) if not ray.wait([ref], timeout=0)[0]]
            raise WorkerTimeout(
                f"rank {', '.join(late)} of {self.world_size} did not start within start_timeout_s="
                f"{self._execution.start_timeout_s:g}; raise it, or look at Ray's logs in /tmp/ray/session_latest/logs."
            ) from error
        except RayActorError as error:
            raise WorkerDied(f"a rank died while it started: {_first_line(error)}") from error
        except RayError as error:
            raise WorkerError(f"the ranks cannot be started: {_first_line(error)}") from error

    # -- calls ---------------------------------------------------------------------------------------------------

    def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """One object-store entry for all ranks; the first failure gives the others the grace."""
        with self._running:
            return self._run(request, timeout_s)

    def _run(self, request: Request, timeout_s: float) -> list[Outcome]:
        shared = ray.put(request)
        refs = [actor.run.remote(shared) for actor in self._actors]
        outcomes: dict[int, Outcome] = {}
        deadline, pending = time.monotonic() + timeout_s + grace(timeout_s), list(refs)
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = ray.wait(pending, timeout=left)
            for ref in done:
                outcomes[refs.index(ref)] = found = _result(ref)
                if type(found) is not Answer:
                    deadline = min(deadline, time.monotonic() + grace(timeout_s))
        late = [rank for rank in range(self.world_size) if rank not in outcomes]
        return [outcomes[rank] for rank in range(self.world_size)] if not late else self._with_late(outcomes, late)

    def _with_late(self, outcomes: dict[int, Outcome], late: Sequence[int]) -> list[Outcome]:
        """Ask the ranks that have not answered where they are."""
        asked = {rank: self._actors[rank].locate.remote() for rank in late}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=PING_S)
        for rank, ref in asked.items():
            answer = _result(ref, wrap=Silent) if ref in ready else Silent("")
            outcomes[rank] = answer
        return [outcomes[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Kill the actors, give the reservation back, and leave Ray, which ends if it was started here."""
        with self._stopping:
            self.interrupt()
            # a call of another thread ends with its ranks; Ray itself must not end under it
            if self._running.acquire(timeout=STOP_S):
                self._running.release()
            self._actors = []
            if self._bundles is not None and self._connected and ray.is_initialized():
                remove_placement_group(self._bundles)
            self._bundles = None
            if self._connected:
                self._connected = False
                _session.leave()

    def interrupt(self) -> None:
        """Kill the actors."""
        if self._connected and ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)


def _result(ref: Any, wrap: Any = outcome) -> Outcome:
    try:
        return wrap(ray.get(ref))
    except RayActorError:
        return Died("its process is gone: killed, out of memory, or crashed")
    except RayError as error:  # its arguments or its result could not be moved
        return Raised("", f"{type(error).__name__}: {_first_line(error)}", str(error))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")


def _by_node(bundles: PlacementGroup) -> list[int]:
    """Bundles in the order of ranks: those of one node in a row, because neighbouring ranks talk the most; this process's
    node first, because the first rank hands results over."""
    node_of: dict[int, str] = placement_group_table(bundles)["bundles_to_node_id"]
    nodes = list(dict.fromkeys([ray.get_runtime_context().get_node_id(), *(node_of[b] for b in sorted(node_of))]))
    return sorted(node_of, key=lambda bundle: (nodes.index(node_of[bundle]), bundle))


class _Session:
    """This process's connection to Ray: made with the first group, and, if made here, ended with the last."""

    def __init__(self) -> None:
        self._groups = 0
        self._ours: str | None = None
        self._lock = threading.Lock()
        self._starter: ThreadPoolExecutor | None = None

    def join(self, execution: ExecutionConfig, world_size: int) -> None:
        """Connect if need be. Raises `ConfigError` for a cluster other than the one this process is in."""
        with self._lock:
            wanted = execution.ray_address
            if not ray.is_initialized():
                self._ours = wanted or os.environ.get("RAY_ADDRESS") or "local"
                if self._ours == "local":
                    here = {"CPU": float(os.cpu_count() or 1)}
                    if places([here], {"CPU": execution.cpus_per_worker}) < world_size:
                        raise ConfigError(no_room(world_size, {"CPU": execution.cpus_per_worker}, [here]))
                self._from_a_lasting_thread(_connect, self._ours)
            elif wanted not in (None, "auto", self._ours, ray.get_runtime_context().gcs_address):
                raise ConfigError(
                    f"ray_address={wanted!r}, but this process is connected to {ray.get_runtime_context().gcs_address}; "
                    "one process can be in one Ray cluster only: leave ray_address out, or close the other trainers first."
                )
            self._groups += 1

    def _from_a_lasting_thread(self, start: Callable[[str], None], address: str) -> None:
        """Linux ends Ray's processes, and Ray then this one, with the thread that has started them: so one that stays."""
        if threading.current_thread() is threading.main_thread():
            return start(address)
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, thread_name_prefix="ray-start")
        return self._starter.submit(start, address).result()

    def leave(self) -> None:
        """One group fewer."""
        with self._lock:
            self._groups -= 1
            if not self._groups and self._ours is not None:
                self._ours = None
                ray.shutdown()


def _connect(address: str) -> None:
    quiet: dict[str, Any] = {"configure_logging": False, "logging_level": "ERROR"}
    if address == "local":
        quiet |= {"include_dashboard": False}
    with process_as_found():
        os.environ.setdefault(
            "RAY_worker_niceness", "0"
        )  # by default ranks yield to every other process of the machine
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"ray_address={address!r} cannot be reached: {_first_line(error)}.") from error


_session = _Session()
