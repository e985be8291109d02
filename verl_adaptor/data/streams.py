"""Records without an end. Here: what all such sources share, and a file that grows; ``served.py``: a service.

They have one epoch. A record is read when it is asked for and not before: so a reader that has enough holds up the source,
not this process's memory. The position is the record's number, from which any reader goes on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from verl_adaptor.data.records import Record, parse_line
from verl_adaptor.errors import DataError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
"""After a source is found to have nothing, before it is looked at again; each next pause is twice as long."""
TELL_AFTER_S = 60.0
"""A silence of so many seconds is told in the log."""


class Stream(ABC):
    """A source of records that are awaited.

    Args:
        name: of the source, for errors.
        timeout_s: longest silence, in seconds.
        sleep: pauses, given seconds; None: as long as the source is not closed.
    """

    longest_pause_s: ClassVar[float]
    """Between two looks at a source that has nothing, in seconds."""

    def __init__(self, name: str, timeout_s: float, sleep: Callable[[float], object] | None = None) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait

    @abstractmethod
    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """As `Records.read`, but without an end, and so with no other epoch than 0.

        Raises:
            DataError: the source is silent for longer than `timeout_s`, is not what it was, or was closed.
        """

    def close(self) -> None:
        """End the wait of whoever reads, in another thread; a source that is read afterwards raises."""
        self._closed.set()

    def _silence(self) -> Callable[[], None]:
        """A pause for each call, longer and longer, which raises when the source was silent too long, or is closed."""
        begun = time.monotonic()
        pause, tell_after = FIRST_PAUSE_S, TELL_AFTER_S

        def wait() -> None:
            nonlocal pause, tell_after
            silent = time.monotonic() - begun
            if silent >= self.timeout_s:
                raise DataError(
                    f"{self.name} had no new record for {self.timeout_s:g} s (data.follow_timeout_s). See to what fills it, or "
                    "raise that; a run goes on with --resume."
                )
            if silent >= tell_after:
                logger.warning("waiting for prompts: %s has had no new record for %.0f s.", self.name, silent)
                tell_after *= 2
            self._pause(min(pause, self.timeout_s - silent))
            pause = min(2 * pause, self.longest_pause_s)

        return wait

    def _pause(self, seconds: float) -> None:
        self._sleep(seconds)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise DataError(f"{self.name} was closed while it was read; open the prompts again.")


class FollowedFile(Stream):
    """A ``.jsonl`` file to which others append; it may still be empty, but must be there.

    A line counts once its newline is there. The file must stay the one it was: what is found to be shorter than what was
    read of it, rewritten, or another file under the same name is an error. So is, at a resume, a file with fewer records
    than were read.

    Raises:
        DataError: there is no such file.
    """

    longest_pause_s = 0.5

    def __init__(self, path: Path, timeout_s: float, sleep: Callable[[float], object] | None = None) -> None:
        super().__init__(str(path), timeout_s, sleep)
        self.path = path
        with self._opened() as file:
            self._inode = _inode(file)

    def read(self, epoch: int, start: int = 0) -> Iterator[tuple[str, Record]]:
        """Lines before record `start` are read, not parsed, and not waited for."""
        number = position = records = 0
        silence = self._silence()
        while True:
            for line in self._whole_lines(position):
                number, position = number + 1, position + len(line)
                if not line.strip():
                    continue
                records += 1
                if records > start:
                    where = f"{self.path}:{number}"
                    yield where, parse_line(line, where)
                    silence = self._silence()
            if records < start:
                raise self._changed(f"holds {records} records, and {start} were read of it")
            silence()

    def _whole_lines(self, position: int) -> Iterator[bytes]:
        """The lines from a byte on that have their newline by now. The file is opened anew each time: what another process
        has taken back of a half line must not linger in a buffer."""
        self._check_open()
        with self._opened() as file:
            if _inode(file) != self._inode:
                raise self._changed("is another file now")
            size = os.fstat(file.fileno()).st_size
            if size < position:
                raise self._changed(f"has {size} bytes, and {position} were read of it")
            self._check_end(file, position)
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                self._check_end(file, position)  # long may have passed since the line before
                yield line

    def _check_end(self, file: BinaryIO, position: int) -> None:
        """Raise unless a line ends there, as it did when it was read."""
        if position and os.pread(file.fileno(), 1, position - 1) != b"\n":
            raise self._changed(f"was rewritten: the line that ended at byte {position} does not any more")

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"{self.path}, which data.follow reads, cannot be opened: {error}.") from error

    def _changed(self, how: str) -> DataError:
        return DataError(
            f"{self.path} {how}: it was truncated or replaced, while data.follow needs a file that only grows. Restore it, or "
            "start a new run."
        )


def _inode(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
