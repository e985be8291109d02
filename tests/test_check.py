"""``verl-adaptor check``: what is broken, undone or not here is told apart, by exit code, as JSON and as JUnit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SHIFTY = """
import dataclasses
import sys
import threading
import time

from verl_adaptor.capabilities import Capability, not_implemented, only
from verl_adaptor.cli import main
from verl_adaptor.errors import UnsupportedCapability
from verl_adaptor.registry import register
from verl_adaptor.testing.reference import SPEC, ReferenceEngine


class Shifty(ReferenceEngine):
    def _step(self):
        return [dataclasses.replace(d, log_probs=tuple(value - 0.01 for value in d.log_probs)) for d in super()._step()]

    async def stream(self, prompt, params=None):
        raise NotImplementedError
        yield

    def sleep(self, tags=()):
        raise UnsupportedCapability("only on cuda")


class Stuck(ReferenceEngine):
    def _step(self):
        threading.Thread(target=stands_still, name="culprit", daemon=True).start()
        threading.Event().wait()


def stands_still():
    time.sleep(600)


if __name__ == "__main__":
    declared = {**SPEC.capabilities, Capability.STREAM: not_implemented("later"), Capability.SLEEP: only("cuda", "so it is")}
    register(dataclasses.replace(SPEC, name="shifty", engine="shifty:Shifty", trainer=None, capabilities=declared))
    register(dataclasses.replace(SPEC, name="stuck", engine="shifty:Stuck", trainer=None))
    main(sys.argv[1:])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "shifty.py").write_text(SHIFTY)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(folder / "shifty.py"), "check", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240)


def test_what_is_broken_undone_and_not_here_is_told_apart(tmp_path: Path) -> None:
    done = run(tmp_path, "shifty", "--json", "--junit", str(tmp_path / "junit.xml"))
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    results = {(law["law"], law["name"]): law for law in found["laws"]}
    assert {key[0] for key, law in results.items() if law["result"] == "failed"} >= {"I2"}
    assert results["I1", "tokens_and_finish_reason"]["result"] == "passed"
    assert results["I5", "sync_async_and_stream_agree"]["result"] == "xfailed"
    asleep = results["I7", "sleep_changes_nothing"]
    assert asleep["result"] == "not run" and asleep["detail"].startswith(
        "needs cuda; declared sleep: only: cuda (so it is)"
    )
    broken = results["I2", "log_probs_are_the_tempered_policys"]["detail"]
    assert "laws_inference.py" in broken and "assert" in broken.lower()
    assert sum(found["counts"].values()) == len(found["laws"]) > 10
    suite = next(ElementTree.parse(tmp_path / "junit.xml").iter("testsuite"))
    assert (int(suite.get("tests", 0)), int(suite.get("failures", 0))) == (
        len(found["laws"]),
        found["counts"]["failed"],
    )


def test_a_law_that_does_not_end_is_told_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    done = run(tmp_path, "stuck", "laws=a_seed_repeats_its_sample", "--timeout", "2", "--json")
    assert done.returncode == 3, done.stderr
    [law] = json.loads(done.stdout)["laws"]
    assert law["result"] == "failed" and law["detail"].startswith("Failed: Timeout")
    its, culprit = law["detail"].split("thread culprit:")
    assert "shifty.py" in its and "_step" in its
    assert "stands_still" in culprit


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    for arguments, said in ((["shify"], "shifty"), (["shifty", "familiy=llama"], "allowed: family")):
        done = run(tmp_path, *arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
