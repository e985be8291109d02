"""Whether the ranks fit, asked before Ray is: it would wait for ever (C14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_adaptor.config import ExecutionConfig

Resources = Mapping[str, float]
"""As Ray counts them: ``{"CPU": 8, "GPU": 2}``."""


def gpus_per_worker(execution: ExecutionConfig, device: str, cluster_has_gpus: bool) -> float:
    """GPUs of one rank: as configured, else 1 where the device is CUDA (``auto``: where the cluster has GPUs)."""
    if execution.gpus_per_worker is not None:
        return execution.gpus_per_worker
    return float(device.startswith("cuda") or (device == "auto" and cluster_has_gpus))


def places(nodes: Sequence[Resources], bundle: Resources) -> int:
    """How many ranks fit, if nothing else runs.

    >>> places([{"CPU": 4}, {"CPU": 3}], {"CPU": 2})
    3
    """
    return sum(min(int(node.get(name, 0) / need + 1e-9) for name, need in bundle.items()) for node in nodes)


def no_room(world_size: int, bundle: Resources, nodes: Sequence[Resources], free: Resources | None = None) -> str:
    """The sentence: what is needed, what there is (and is free), and the cure."""
    need = " and ".join(f"{world_size * amount:g} {name}s" for name, amount in bundle.items())
    have = "; ".join(" and ".join(f"{node.get(name, 0):g} {name}s" for name in bundle) for node in nodes)
    share = next(
        (f"{name.lower()}s_per_worker={int(100 * fits) / 100:g}" for name, fits in _shares(world_size, bundle, nodes)),
        None,
    )
    cure = f"use fewer ranks{f', or let ranks share: {share}' if share else ''}"
    if free is None:
        return (
            f"{world_size} ranks need {need}, and there are {have}{' (a node each)' if len(nodes) > 1 else ''}; {cure}."
        )
    left = " and ".join(f"{free.get(name, 0):g} {name}s" for name in bundle)
    return (
        f"{world_size} ranks need {need}, and {left} of {have} are free: other trainers have the rest; close them, let them "
        "share their ranks (workers=WorkerPool()), or lower cpus_per_worker for each."
    )


def _shares(world_size: int, bundle: Resources, nodes: Sequence[Resources]) -> Sequence[tuple[str, float]]:
    """Resources of which each rank would get a part, if all ranks shared what there is; never a GPU, which NCCL gives to one."""
    totals = {name: sum(node.get(name, 0) for node in nodes) for name in bundle}
    if 0 < totals.get("GPU", 0) < world_size * bundle.get("GPU", 0):
        return []
    return [(name, total / world_size) for name, total in totals.items() if 0 < total < world_size * bundle[name]]
