"""Where records come from. None of these holds more than a batch of its records in memory.

A `Records` reads one epoch from a given record on. How cheap that is decides what a resume costs: a datasets folder and
the row groups of a parquet file are skipped for nothing, the lines of a jsonl file are read but not parsed, and what a
task or generator makes is made again.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl_adaptor.config import DataConfig
from verl_adaptor.errors import BackendNotInstalled, ConfigError, DataError, nearest
from verl_adaptor.objects import check_arguments, load_callable
from verl_adaptor.protocols.requests import mix_seed

if TYPE_CHECKING:
    from verl_adaptor.tasks import Task

Record = Mapping[str, Any]
BATCH = 256
"""Rows decoded at a time from columnar files."""


class Records(Protocol):
    """Something that can be read again and again, from any record on."""

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """``(where, record)`` of each record from number `start` on; `where` names its place in errors."""
        ...


def open_records(config: DataConfig, *, seed: int, task: Task | None = None) -> Records:
    """What `config` names: a path, a task (which the caller has loaded), a generator or a url.

    Raises:
        DataError: a path is missing, or of no known kind.
        BackendNotInstalled: what reads it is not installed.
    """
    if config.url is not None:
        from verl_adaptor.data.served import ServedRecords

        return ServedRecords(config)
    if config.path is not None and config.follow:
        from verl_adaptor.data.streams import FollowedFile

        return FollowedFile(_existing(config.path), config.follow_timeout_s)
    if config.path is not None:
        return open_path(config.path)
    if config.generator is not None:
        return GeneratorRecords(config.generator, config.args)
    if task is None:
        raise ConfigError(f"data.task={config.task!r} is not loaded; pass task=load_task(config.task, config.args).")
    return TaskRecords(task, str(config.task), seed)


def open_path(path: Path) -> Records:
    """The reader for a file or folder.

    Raises:
        DataError: it is missing, or of no known kind.
    """
    if _existing(path).is_dir():
        return FolderRecords(path)
    kinds: dict[str, type[JsonlRecords] | type[ParquetRecords]] = {".jsonl": JsonlRecords, ".parquet": ParquetRecords}
    if path.suffix not in kinds:
        raise DataError(
            f"{path} has the suffix {path.suffix!r}; readable are .jsonl and .parquet files, and folders written by "
            "datasets.save_to_disk."
        )
    return kinds[path.suffix](path)


def _existing(path: Path) -> Path:
    if not path.exists():
        beside = [other.name for other in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataError(f"{path} does not exist; {nearest(path.name, beside[:100])}.")
    return path


class JsonlRecords:
    """One JSON object a line; blank lines do not count."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Lines before `start` are read, not parsed."""
        with self.path.open("rb") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for number, line in itertools.islice(filled, start, None):
                where = f"{self.path}:{number}"
                yield where, parse_line(line, where)


class ParquetRecords:
    """A parquet file, read by row groups and batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parquet = _extra("pyarrow.parquet", "data", str(path))

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Row groups before `start` are not touched."""
        number = 0
        try:
            with self._parquet.ParquetFile(self.path) as file:
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if number + rows <= start:
                        number += rows
                        continue
                    for batch in file.iter_batches(batch_size=BATCH, row_groups=[group]):
                        skip = min(max(0, start - number), batch.num_rows)
                        for at, record in enumerate(batch.slice(skip).to_pylist(), number + skip):
                            yield f"{self.path} row {at}", record
                        number += batch.num_rows
        except importlib.import_module("pyarrow").ArrowException as error:
            raise DataError(f"{self.path} is no readable parquet file: {error}") from error


class FolderRecords:
    """A folder written by `datasets.save_to_disk`, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        splits = path / "dataset_dict.json"
        if splits.exists():
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            raise DataError(
                f"{path} holds several splits; give one of: {', '.join(str(path / name) for name in names)}."
            )
        if not (path / "state.json").exists() or not (path / "dataset_info.json").exists():
            raise DataError(f"{path} is a folder, but not one written by datasets.save_to_disk (it has no state.json).")
        datasets = _extra("datasets", "data", str(path))
        try:
            self._dataset = datasets.load_from_disk(str(path))
        except Exception as error:
            raise DataError(f"{path} cannot be read as a datasets folder: {error}") from error

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Rows before `start` are not touched."""
        for begin in range(start, len(self._dataset), BATCH):
            columns = self._dataset[begin : begin + BATCH]
            for at in range(min(BATCH, len(self._dataset) - begin)):
                yield f"{self.path} row {begin + at}", {name: column[at] for name, column in columns.items()}


class GeneratorRecords:
    """A function that returns an iterable of records; called anew for each epoch, of which one without an end has one."""

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self.path = path
        self.args = args
        self._function = load_callable(path, key="data.generator")
        check_arguments(self._function, args, key="data.args")

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Records before `start` are made and thrown away."""
        made = self._function(**self.args)
        if not isinstance(made, Iterable):
            raise DataError(f"data.generator {self.path} returned {type(made).__name__}; it must return an iterable.")
        yield from _numbered(made, self.path, start)


class TaskRecords:
    """The training records of a task, with another seed in each epoch."""

    def __init__(self, task: Task, name: str, seed: int) -> None:
        self.task = task
        self.name = name
        self.seed = seed

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Records before `start` are made and thrown away."""
        yield from _numbered(self.task.train_records(mix_seed(self.seed, epoch)), f"task {self.name}", start)


def _numbered(records: Iterable[Any], name: str, start: int) -> Iterator[tuple[str, Record]]:
    for number, record in enumerate(itertools.islice(records, start, None), start):
        where = f"{name} record {number}"
        yield where, as_record(record, where)


def parse_line(line: bytes, where: str) -> Record:
    """The record in a line of JSON. Raises `DataError`, which names the place, where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise DataError(f"{where}: not valid JSON: {error}.") from error
    return as_record(record, where)


def as_record(record: Any, where: str) -> Record:
    """The same, which is an object with named fields; else `DataError`."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a record must be an object with named fields, not {type(record).__name__}.")
    return record


def _extra(module: str, extra: str, wanted_for: str) -> Any:
    """Import what an optional extra brings, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendNotInstalled(
            f"{wanted_for} needs {module.partition('.')[0]}, which is not installed ({error}); "
            f"pip install 'verl-adaptor[{extra}]'"
        ) from error
