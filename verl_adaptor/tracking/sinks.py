"""Where metrics go besides ``metrics.jsonl``. A sink's package is imported only when the sink is asked for."""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from verl_adaptor.errors import BackendNotInstalled
from verl_adaptor.tracking.records import write_atomically


class Sink(Protocol):
    """Takes the metrics of one step after another."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""

    def close(self, *, finished: bool) -> None:
        """Flush and let go. finished is False where the run was interrupted or failed."""


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """What a sink is told about the run."""

    folder: Path
    project: str
    resume_step: int | None
    """The run goes on after this step; None for a new run."""

    def run_id(self, service: str, make: Callable[[], str]) -> str:
        """The service's id of this run: kept in the folder, so that a resumed run is the same run there."""
        path = self.folder / f"{service}_run_id"
        if self.resume_step is None or not path.exists():
            write_atomically(path, make().encode())
        return path.read_text()


class TensorBoardSink:
    """Event files in ``DIR/tensorboard``; on resume TensorBoard is told to forget the steps that will come again."""

    def __init__(self, module: ModuleType, context: SinkContext) -> None:
        resumed = context.resume_step
        self._writer = module.SummaryWriter(
            str(context.folder / "tensorboard"), purge_step=None if resumed is None else resumed + 1
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # a killed run resumes from its checkpoint: what came before must be on disk

    def close(self, *, finished: bool) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """Weights & Biases. It ignores steps it has already seen; with one seed the steps that come again are equal."""

    def __init__(self, module: ModuleType, context: SinkContext) -> None:
        self._run = module.init(
            project=context.project,
            name=context.folder.name,
            dir=str(context.folder),
            id=context.run_id("wandb", lambda: uuid.uuid4().hex),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, *, finished: bool) -> None:
        """Finish the run; an exit code other than 0 marks it as failed there."""
        self._run.finish(exit_code=0 if finished else 1)


class MLflowSink:
    """MLflow, by its client: the fluent interface would change the process's active run.

    MLflow appends and never overwrites. The newest step is therefore kept as a tag, and steps up to it are not sent
    again after a resume.
    """

    LAST_STEP = "verl_adaptor.last_step"

    def __init__(self, module: ModuleType, context: SinkContext) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = module.MlflowClient()
        self._run_id = context.run_id("mlflow", lambda: self._create_run(context))
        tags = self._client.get_run(self._run_id).data.tags
        self._last_step = int(tags.get(self.LAST_STEP, -1))
        self._client.update_run(self._run_id, status="RUNNING")

    def _create_run(self, context: SinkContext) -> str:
        experiment = self._client.get_experiment_by_name(context.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(context.project)
        return str(self._client.create_run(experiment_id, run_name=context.folder.name).info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step, unless MLflow has it."""
        if step <= self._last_step:
            return
        now = time.time_ns() // 1_000_000  # milliseconds
        rows = [self._entities.Metric(key, value, now, step) for key, value in metrics.items()]
        tag = self._entities.RunTag(self.LAST_STEP, str(step))
        self._client.log_batch(self._run_id, metrics=rows, tags=[tag])
        self._last_step = step

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, status="FINISHED" if finished else "KILLED")


@dataclass(frozen=True)
class _Kind:
    module: str
    needs: str
    """An attribute the module must have: a folder of the same name beside the script imports without one."""
    install: str
    make: Callable[[ModuleType, SinkContext], Sink]


_KINDS = {
    "tensorboard": _Kind(
        "torch.utils.tensorboard", "SummaryWriter", "pip install 'tensorboard>=2.17'", TensorBoardSink
    ),
    "wandb": _Kind("wandb", "init", "pip install 'verl-adaptor[wandb]'", WandbSink),
    "mlflow": _Kind("mlflow", "MlflowClient", "pip install 'verl-adaptor[mlflow]'", MLflowSink),
}


def load_sinks(names: tuple[str, ...]) -> list[Callable[[SinkContext], Sink]]:
    """Import what the sinks need and return their makers, so that a missing package is known before any work.

    Raises `BackendNotInstalled` with the command that installs the first missing one.
    """
    return [_load(name) for name in dict.fromkeys(names)]


def _load(name: str) -> Callable[[SinkContext], Sink]:
    kind = _KINDS[name]
    missing = (
        f"tracking.sinks asks for {name!r}, which is not installed: {kind.install}, or drop it from tracking.sinks."
    )
    try:
        module: Any = importlib.import_module(kind.module)
    except ImportError as error:
        raise BackendNotInstalled(missing) from error
    if not hasattr(module, kind.needs):
        raise BackendNotInstalled(f"{missing} (A folder named {kind.module} was imported in its place.)")
    return lambda context: kind.make(module, context)
