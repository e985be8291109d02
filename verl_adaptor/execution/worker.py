"""`Worker`: what one rank's process runs. It hosts objects by name: the actor, the critic and the reference of a run
share their ranks, and with them one process group.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_adaptor import errors
from verl_adaptor.execution.wire import decode, encode

Request = tuple[Any, ...]
"""``(operation, *arguments)`` as encoded by `wire`: ``("call", key, method, args, kwargs)`` and its like."""
Reply = tuple[Any, ...]
"""``("answer", value)``, or ``("raised", name of the class in verl_adaptor.errors or "", sentence, traceback)``."""


class Worker:
    """One rank. Made before torch is imported, so that `start` can still set what torch reads at import."""

    def __init__(self, rank: int, label: str) -> None:
        self._rank = rank
        self._label = label
        self._objects: dict[str, Any] = {}
        self._now = ""
        self._thread = 0

    def __repr__(self) -> str:
        """What stands before each line that this rank prints."""
        return f"{self._label} rank {self._rank}"

    def start(self, environment: Mapping[str, str], paths: Sequence[str]) -> None:
        """Take on a rank's environment variables, and find the user's own modules where the driver finds them."""
        os.environ.update(environment)
        sys.path += [path for path in paths if path not in sys.path and Path(path).exists()]

    def doing(self) -> str:
        """Where this rank is right now: a hanging one is asked from another thread."""
        frame = sys._current_frames().get(self._thread)
        if not self._now or frame is None:
            return "idle"
        innermost = traceback.extract_stack(frame)[-1]
        return f"in {self._now}, at {innermost.name} ({Path(innermost.filename).name}:{innermost.lineno})"

    def run(self, request: Request) -> Reply:
        """Do what is asked; every rank does. ``ask`` wants the result of each, all else that of the first."""
        operation, *arguments = request
        self._thread, self._now = threading.get_ident(), " ".join(str(a) for a in request[:3] if isinstance(a, str))
        try:
            result = getattr(self, f"_{operation}")(*decode(arguments))
            return "answer", encode(result) if self._rank == 0 or operation == "ask" else None
        except Exception as error:
            return raised(error)
        finally:
            self._now = ""

    # -- operations ----------------------------------------------------------------------------------------------

    def _create(self, key: str, builder: str, arguments: dict[str, Any]) -> None:
        module, _, name = builder.partition(":")
        self._objects[key] = getattr(importlib.import_module(module), name)(**arguments)

    def _call(self, key: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._find(key), method)(*args, **kwargs)

    def _ask(self, key: str, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._find(key), method)(*args)

    def _derive(self, key: str, method: str, new_key: str, kwargs: Mapping[str, Any]) -> None:
        """Keep what a method returns as an object of its own."""
        self._objects[new_key] = getattr(self._find(key), method)(**kwargs)

    def _drop(self, key: str) -> None:
        found = self._objects.pop(key, None)
        if found is not None:
            found.close()
        del found
        gc.collect()  # models are full of cycles, and the next one needs the memory now

    def _find(self, key: str) -> Any:
        if key not in self._objects:
            raise errors.WorkerError(
                f"the worker processes were replaced and hold no {key!r} any more; call restart(checkpoint) on it."
            )
        return self._objects[key]


def raised(error: Exception) -> Reply:
    """An exception for the wire: the nearest class of ours by name, the sentence, the traceback as text."""
    ours = errors.kind_of(error)
    sentence = str(error) if ours else f"{type(error).__name__}: {error}"
    return "raised", ours, sentence, "".join(traceback.format_exception(error))
