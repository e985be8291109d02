"""The object a training loop reports to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from verl_adaptor.config import TrackingConfig
from verl_adaptor.errors import ConfigError
from verl_adaptor.tracking.memory import MemoryWatch
from verl_adaptor.tracking.progress import NoteHandler, ProgressDisplay
from verl_adaptor.tracking.records import plain, read_json, read_lines, to_json, write_atomically
from verl_adaptor.tracking.report import require_report
from verl_adaptor.tracking.sinks import Sink, SinkContext, load_sinks

LOGGER = logging.getLogger("verl_adaptor")


class Tracker:
    """Writes a run's files in `folder`, feeds the sinks and shows the progress.

    Making one checks all that could stop the run late: the folder can be written (`ConfigError`), it holds no other
    run, and the packages of the sinks and of the report are there (`BackendNotInstalled`). With `resume_step` the run
    goes on after that step: later lines of ``metrics.jsonl`` are dropped, because their steps will come again.
    Log a step before you save its checkpoint, and no step is lost whenever the process dies.

    >>> with Tracker(TrackingConfig(), "out", total_steps=60) as tracker:  # doctest: +SKIP
    ...     tracker.log(1, {"reward/mean": 0.25, "time/step": 1.5})
    ...     tracker.summary({"reward_before": 0.1, "reward_after": 0.6})
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path | str,
        *,
        total_steps: int,
        resume_step: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(folder).absolute()
        self.metrics_path = self.folder / "metrics.jsonl"
        if config.report:
            require_report()
        makers = load_sinks(config.sinks)
        _check_writable(self.folder)
        self._check_resume(resume_step)
        self._finished = False
        self._memory, self._total_steps = MemoryWatch(), total_steps
        with ExitStack() as stack:  # what was opened is closed again if the next thing fails
            self._open_metrics()
            stack.callback(lambda: self._metrics.close())  # the file of that moment: truncating opens another
            self._display = ProgressDisplay(total_steps, start=resume_step or 0, stream=stream)
            stack.callback(self._display.close)
            self._log_file = self._attach_logging(stack)
            self.truncate_after(-1 if resume_step is None else resume_step)
            context = SinkContext(folder=self.folder, project=config.project, resume_step=resume_step)
            self._sinks = [self._open_sink(make, context, stack) for make in makers]
            self._close = stack.pop_all()

    def _open_sink(self, make: Callable[[SinkContext], Sink], context: SinkContext, stack: ExitStack) -> Sink:
        sink = make(context)
        stack.callback(lambda: sink.close(finished=self._finished))
        return sink

    def _check_resume(self, resume_step: int | None) -> None:
        lines = read_lines(self.metrics_path)
        self._last_step = lines[-1][0] if lines else -1
        if resume_step is None and lines:
            raise ConfigError(
                f"{self.folder} already holds a run of {self._last_step} steps; resume it (--resume), "
                "or choose another folder (--output DIR)."
            )

    def _open_metrics(self) -> None:
        self._metrics = self.metrics_path.open("a", encoding="utf-8", newline="\n")

    def _attach_logging(self, stack: ExitStack) -> logging.FileHandler:
        """Copy the package's log to ``train.log`` until `close`, and leave the logger as it was found."""
        alone = not LOGGER.hasHandlers()  # then warnings reached the terminal, and with our handler they would not
        file = logging.FileHandler(self.folder / "train.log", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        level = LOGGER.level
        stack.callback(LOGGER.setLevel, level)
        LOGGER.setLevel(min(LOGGER.getEffectiveLevel(), logging.INFO))
        for handler in [file, NoteHandler(self._display)] if alone else [file]:
            LOGGER.addHandler(handler)
            stack.callback(handler.close)
            stack.callback(LOGGER.removeHandler, handler)
        return file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step: one line in ``metrics.jsonl``, keys in the order given, and a row in each sink.

        Steps increase; all metrics of a step come in one call. Raises ValueError where they do not, and TypeError for
        a value that is not a number.
        """
        if step <= self._last_step or "step" in metrics:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}, or with a metric named 'step'; "
                "steps must increase, with all metrics of a step in one call."
            )
        row = {key: _number(key, value) for key, value in metrics.items()}
        self._metrics.write(to_json({"step": step, **row}) + "\n")
        self._metrics.flush()
        self._last_step = step
        for sink in self._sinks:
            sink.log(step, row)
        self._to_log_file(self._display.update(step, row))
        self._memory.look(step, self._total_steps)

    def expect(self, total_steps: int) -> None:
        """The run takes that many steps, as it turns out, instead of those it was begun with."""
        self._total_steps = total_steps
        self._display.expect(total_steps)

    def _to_log_file(self, line: str) -> None:
        """Progress goes to the file alone: other handlers of the application do not want a line a step."""
        self._log_file.handle(LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, line, (), None))

    def truncate_after(self, step: int) -> None:
        """Drop the lines of ``metrics.jsonl`` after a step, and a torn last one, in one atomic exchange of the file."""
        kept = [(at, line) for at, line in read_lines(self.metrics_path) if at <= step]
        self._metrics.close()
        write_atomically(self.metrics_path, b"".join(line for _, line in kept))
        self._open_metrics()
        self._last_step = kept[-1][0] if kept else -1
        if self._last_step < step and step > 0:
            LOGGER.warning(
                "%s ends at step %d, but the run resumes after step %d: the lines between are lost.",
                self.metrics_path, self._last_step, step,
            )  # fmt: skip

    def samples(self, when: Literal["before", "after"], samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep completions of held-out prompts in ``samples.json``, replacing those of the same time.

        The report shows ``prompt`` and ``response`` (text, or token ids where there is no tokenizer), ``reward``, and
        whatever else a sample holds.
        """
        if when not in ("before", "after"):
            raise ConfigError(f"samples are of 'before' or 'after' training, not {when!r}.")
        path = self.folder / "samples.json"
        kept = {**(read_json(path) or {}), when: [plain(sample) for sample in samples]}
        write_atomically(path, to_json(kept, indent=1).encode())

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write the outcome of the finished run to ``summary.json``."""
        write_atomically(self.folder / "summary.json", (to_json(summary, indent=2) + "\n").encode())
        self._finished = True

    def close(self) -> None:
        """Flush and close files, sinks and display, and take the log handlers away. May be called again."""
        self._close.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _number(key: str, value: Any) -> float:
    """The metric as int or float; scalars of NumPy and PyTorch are unpacked."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        raise TypeError(f"metric {key!r} is {value!r}; a metric is one number.")
    return int(number) if isinstance(number, int) else float(number)


def _check_writable(folder: Path) -> None:
    """Create the folder and a probe file in it: a full or read-only disk shows here, not after an hour."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the output folder {folder} cannot be written ({error.strerror or error}); "
            "choose another one (--output DIR), or make it writable."
        ) from error
