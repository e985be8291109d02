"""One thread (tiny models lose with two), no network, and the commit in the JUnit report."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _commit(record_testsuite_property: Callable[[str, object], None]) -> None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    record_testsuite_property("commit", done.stdout.strip() or "no repository")


def pytest_collection_finish() -> None:
    """What the imports have left lives to the end: a collection, which closing each trainer takes, need not walk through it."""
    gc.freeze()
