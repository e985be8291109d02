"""The compatibility matrix: what is to be measured, a process a cell, what is worse than before, and the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from verl_adaptor.errors import ConfigError
from verl_adaptor.matrix.cells import Cell, load_cells
from verl_adaptor.matrix.render import write_pages
from verl_adaptor.matrix.results import differences, missing, read_results, result_file
from verl_adaptor.matrix.run import ensure_environment, measure_apart, run_cells
from verl_adaptor.registry import get_spec
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.models import FAMILIES
from verl_adaptor.testing.pairs import ENGINES, TRAINERS

ROOT = Path(__file__).parent.parent
MATRIX = ROOT / "compat_matrix"
CELLS = load_cells(MATRIX / "cells.toml")


def cell(**changes: Any) -> Cell:
    common = {
        "kind": "inference",
        "layout": "one process",
        "family": "llama",
        "precision": "float32",
        "timeout_s": 60.0,
    }
    return Cell(**{"environment": "latest", "backend": "hf", **common, **changes})


def test_the_cells_name_what_there_is() -> None:
    for one in CELLS:
        assert one.family in FAMILIES, one.name
        assert (MATRIX / f"envs/{one.environment}.txt").exists(), one.environment
        if one.kind == "pair":
            trainer, engine = one.backend.split(" + ")
            assert (trainer in TRAINERS, engine in ENGINES) == (True, True), one.backend
        else:
            assert one.kind in get_spec(one.backend).roles
            conformance_suite(one.backend, laws=one.laws or None)  # raises for an unknown law


def test_every_backend_and_family_has_a_cell() -> None:
    from verl_adaptor.registry import IN_PROCESS, registry

    tested_where_they_are_made = {"template", "openai"}  # a sample, and one that needs a server
    installed = {entry.spec.name for entry in registry().entries if entry.source != IN_PROCESS}  # not by another test
    backends = installed - tested_where_they_are_made
    assert backends <= {one.backend for one in CELLS}
    assert set(FAMILIES) == {one.family for one in CELLS}


def test_the_smoke_cells_work(tmp_path: Path) -> None:
    smoke = [one for one in CELLS if one.smoke]
    assert {one.kind for one in smoke} == {"inference", "training"}
    run_cells(smoke, tmp_path, lambda environment: Path(sys.executable))
    found = read_results(tmp_path)
    assert {key: (result["observed"], result["why"]) for key, result in found.items()} == dict.fromkeys(
        [(one.environment, one.name) for one in smoke], ("works", "")
    )
    for result in found.values():
        assert result["declared"] == "works"
        assert result["numbers"]["passed"] > 0
        assert result["versions"]["torch"]
    run_cells(smoke, tmp_path, never)  # measured with this source already


def never(environment: str) -> Path:
    raise AssertionError("a cell was measured again")


@pytest.mark.parametrize(
    ("changes", "declared", "observed", "says"),
    [
        ({"settings": {"tensor_parallel_size": 2}}, "refused", "refused", "tensor_parallel"),
        ({"backend": "nobody"}, "refused", "not installed", "nobody"),
        ({"needs": "cuda"}, None, "not run", "needs cuda"),
    ],
)
def test_what_cannot_be_measured_says_why(
    changes: Mapping[str, Any], declared: str | None, observed: str, says: str
) -> None:
    found = measure_apart(cell(laws=("I9",), **changes), Path(sys.executable))
    assert (found.get("declared"), found["observed"]) == (declared, observed)
    assert says in found["why"]


def script(folder: Path, *lines: str) -> Path:
    """In an interpreter's place."""
    file = folder / "python"
    file.write_text("\n".join(["#!/bin/sh", *lines]))
    file.chmod(0o755)
    return file


def test_a_cell_that_crashes_is_a_result(tmp_path: Path) -> None:
    found = measure_apart(cell(), script(tmp_path, "echo last words", "kill -SEGV $$"))
    assert (found["observed"], found["why"], found["log"]) == ("crashed", "ended with -11", ["last words"])


def test_a_cell_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    found = measure_apart(cell(timeout_s=1.0), script(tmp_path, f"sleep 600 & echo $! > {pid}", "wait"))
    assert (found["observed"], found["why"]) == ("timed out", "not done within 1 s")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text().strip()}").exists() and not is_zombie(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_unknown_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no environment 'vllm-9'; there are .*latest"):
        ensure_environment(MATRIX / "envs/vllm-9.txt", tmp_path)


def result(observed: str, declared: str = "works") -> dict[str, Any]:
    return {"observed": observed, "declared": declared, "why": "because", "declared_why": "so"}


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ("works", result("works"), None),
        ("works", result("broken"), "worked before and is broken now: because"),
        ("works", result("timed out", "refused"), "worked before and is timed out now: because"),
        ("works", result("not run"), None),  # measured elsewhere
        ("broken", result("broken"), "is declared to work and is broken: because"),
        ("broken", result("broken", "refused"), None),
        (None, result("crashed"), "is declared to work and is crashed: because"),
        (None, result("refused", "refused"), None),
        (None, result("works", "refused"), "works and is declared refused: so"),
        ("refused", result("works"), None),
    ],
)
def test_what_is_worse_or_not_as_declared(before: str | None, now: dict[str, Any], says: str | None) -> None:
    key = ("latest", "a")
    found = list(differences({key: now}, {} if before is None else {key: result(before)}))
    assert [difference.sentence for difference in found] == ([] if says is None else [says])


def test_the_committed_results_are_of_cells_that_there_are_and_as_declared() -> None:
    found = read_results(MATRIX / "results")
    assert not found.keys() - {(one.environment, one.name) for one in CELLS}, "delete results of cells that are gone"
    assert list(differences(found, {})) == []


def test_the_pages_are_of_the_committed_results(tmp_path: Path) -> None:
    for page in write_pages(CELLS, read_results(MATRIX / "results"), tmp_path):
        same = page.read_text() == (ROOT / "docs" / page.name).read_text()
        assert same, "run verl-adaptor matrix render"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cells, one of which hides a tag's end in its log."""
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("page")
    cells = [cell(), cell(backend="vllm", family="qwen2")]
    broken = {**result("broken"), "log": ["</script><b>"], "numbers": {"failed": 1}, "versions": {"torch": "2.13.0"}}
    for one, found in zip(cells, (result("works"), broken), strict=True):
        file = result_file(folder / "results", one)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    assert missing(cells, read_results(folder / "results")) == []
    return list(write_pages(cells, read_results(folder / "results"), folder))[1]


def shown(page: Path, state: str) -> str:
    """The page's document as Chromium sees it once its script has run."""
    profile = page.parent / "profile"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run([*command, f"{page.as_uri()}#{state}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.partition('<tbody id="rows">')[2].partition("</tbody>")[0]


def test_the_page_lists_filters_and_opens_cells(page: Path) -> None:
    assert len(re.findall(r"<tr [^>]*data-id=", shown(page, ""))) == 2
    for state in ("backend=vllm", "observed=broken", "version=torch+2.13.0"):
        assert re.findall(r'data-id="([^"]*)"', shown(page, state)) == [
            "latest/vllm.inference.one-process.qwen2.float32"
        ]
    opened = shown(page, "cell=latest/vllm.inference.one-process.qwen2.float32")
    assert "<dt>failed</dt><dd>1</dd>" in opened
    assert "broken: because" in opened
    assert "<pre>&lt;/script&gt;&lt;b&gt;</pre>" in opened


def test_the_workflows_run_what_there_is() -> None:
    commands = []
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        commands += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    asked = [line.split() for command in commands for line in command.splitlines() if "verl-adaptor matrix" in line]
    assert asked
    for words in asked:
        start = words.index("matrix")
        options = [word for word in words[start + 2 :] if word.startswith("--")]
        helped = subprocess.run(
            [sys.executable, "-m", "verl_adaptor.cli", "matrix", words[start + 1], "--help"],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
            timeout=120,
        )
        assert helped.returncode == 0, words
        assert all(option.partition("=")[0] in helped.stdout for option in options), words
