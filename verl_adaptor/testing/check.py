"""The laws for one backend without knowing pytest: run, counted, and written down."""

from __future__ import annotations

import gc
import io
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from verl_adaptor.errors import BackendError
from verl_adaptor.testing.suite import DECLARED, NOT_HERE, conformance_suite

Result = Literal["passed", "failed", "xfailed", "skipped", "not run"]
RESULTS: Mapping[Result, str] = {
    "passed": "kept",
    "failed": "broken, or it could not be checked",
    "xfailed": "declared NOT_IMPLEMENTED, and so it is",
    "skipped": "declared UNSUPPORTED; where it can be asked for, it was refused",
    "not run": "declared for a device that this machine has not",
}
"""What each means."""
TIMEOUT_S = 600.0
STACKS = "stacks"
STACK_FRAMES = 8
"""Innermost frames that are told of each thread of a law that did not end in time."""
_TIMED_OUT = "Timeout"

_FILE = "from verl_adaptor.testing import check\n\nTestConformance = check.suite\n"
suite: type
"""The one that is checked now; pytest takes tests from a file."""


@dataclass(frozen=True)
class Outcome:
    """What became of one law, or one part of one."""

    law: str
    """``I1`` to ``P3``."""
    name: str
    result: Result
    seconds: float
    detail: str = ""
    """Why it failed or was not run."""


def check_backend(
    backend: str,
    *,
    junit: Path | None = None,
    told: Callable[[Outcome], None] = lambda outcome: None,
    timeout_s: float = TIMEOUT_S,
    **settings: Any,
) -> list[Outcome]:
    """Run every law that the backend's declaration asks for.

    Args:
        backend: a registered name.
        junit: write a JUnit report there.
        told: is called with each outcome as it comes.
        timeout_s: longest that one law may take; then it is broken, and told with the stacks of all threads.
        settings: as `conformance_suite` takes them.

    Raises:
        UnknownBackend, ConfigError: there is no such backend, or there are no such settings.
    """
    global suite
    suite = conformance_suite(backend, **settings)
    here = sys.stdout

    def tell(outcome: Outcome) -> None:
        with redirect_stdout(here):
            told(outcome)

    collector, unsaid = _Collector(tell), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="verl-adaptor-check-") as scratch:
        file = Path(scratch) / f"test_{Path(scratch).name.replace('-', '_')}.py"  # pytest imports a name once a process
        file.write_text(_FILE)
        options = [
            str(file),
            f"--rootdir={scratch}",
            "-c",
            "/dev/null",
            "-p",
            "no:cacheprovider",
            "--disable-plugin-autoload",  # the laws need none of what else is installed
            "-p",
            "pytest_timeout",
        ]
        options += [f"--junitxml={junit}"] if junit is not None else []
        options += ["-o", "junit_family=xunit2", f"--timeout={timeout_s:g}"]
        with redirect_stdout(unsaid):
            code = pytest.main(options, plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise BackendError(f"the laws could not be run: pytest ended with {code!r}.\n{unsaid.getvalue()}")
    return collector.outcomes


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Counts of every result, and all outcomes, as built-ins."""
    counts = Counter(outcome.result for outcome in outcomes)
    return {"counts": {result: counts[result] for result in RESULTS}, "laws": [asdict(outcome) for outcome in outcomes]}


class _Collector:
    """A pytest plug-in that turns its reports into outcomes."""

    def __init__(self, told: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._told = told
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """A report parses source; a finalizer that parses too while it does would end it (SystemError, gh-106905).

        One of a law that did not end in time gets the stacks of all threads: the one that is waited for may be another.
        """
        was_on = gc.isenabled()
        gc.disable()
        try:
            report = yield
            if call.excinfo is not None and str(call.excinfo.value).startswith(_TIMED_OUT):
                report.user_properties.append((STACKS, _stacks(call.excinfo.tb)))
            return report
        finally:
            if was_on:
                gc.enable()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if report.when != "teardown":
            return
        outcome = _outcome(self._reports)
        self._reports = []
        self.outcomes.append(outcome)
        self._told(outcome)


def _outcome(reports: list[pytest.TestReport]) -> Outcome:
    """Of the phases of one test."""
    _, number, name = reports[0].location[2].rpartition(".")[2].split("_", 2)
    properties = {key: value for report in reports for key, value in report.user_properties}
    seconds = sum(report.duration for report in reports)
    failed = next((report for report in reports if report.failed), None)
    result: Result = "passed"
    detail = ""
    if failed is not None:
        result, detail = "failed", "\n".join([_last_lines(failed), *str(properties.get(STACKS, "")).splitlines()])
    elif any(hasattr(report, "wasxfail") for report in reports):
        result = "xfailed"
        detail = next(str(report.wasxfail) for report in reports if hasattr(report, "wasxfail"))
    elif NOT_HERE in properties:
        result, detail = "not run", f"needs {properties[NOT_HERE]}; declared {properties[DECLARED]}"
    elif DECLARED in properties:
        result, detail = "skipped", f"declared {properties[DECLARED]}"
    elif any(report.skipped for report in reports):
        result, detail = "skipped", _last_lines(next(report for report in reports if report.skipped))
    return Outcome(number, name, result, round(seconds, 3), detail)


def _stacks(here: TracebackType | None) -> str:
    """Where the law's thread was when its time ran out, and where all others are now, a line a frame."""
    me = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [("the law", traceback.extract_tb(here))]
    stacks += [(names.get(i, "?"), traceback.extract_stack(f)) for i, f in sys._current_frames().items() if i != me]
    lines = []
    for name, stack in stacks:  # several threads may have one name
        lines.append(f"thread {name}:")
        lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in stack[-STACK_FRAMES:]]
    return "\n".join(lines)


def _last_lines(report: pytest.TestReport, most: int = 12) -> str:
    """What was asserted and what was found."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    said = [line[1:].strip() for line in str(report.longrepr or "").splitlines() if line.startswith("E ")]
    where = str(report.longrepr or "").strip().splitlines()[-1:]
    return "\n".join([*said[:most], *where])
