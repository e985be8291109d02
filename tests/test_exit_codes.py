"""What scripts may rely on: exit codes, sentences on stderr, and the doctor's verdict."""

import json
from collections.abc import Callable

import pytest
import typer

from verl_adaptor import cli
from verl_adaptor.cli import doctor
from verl_adaptor.errors import ConfigError, EngineError
from verl_adaptor.findings import Finding


def ends(error: BaseException | None, *, working: bool) -> Callable[..., None]:
    """A train command that raises before its work or in it."""

    def train(*_: object, **__: object) -> None:
        if not working and error:
            raise error
        with cli.running():
            if error:
                raise error

    return train


@pytest.mark.parametrize(
    ("error", "working", "code", "shown"),
    [
        (None, True, 0, ""),
        (ConfigError("ppo.epochs=0 is wrong."), False, 2, "verl-adaptor: ppo.epochs=0 is wrong.\n"),
        (EngineError("the engine died."), True, 3, "verl-adaptor: the engine died.\n"),
        (ZeroDivisionError("a bug"), True, 3, "Traceback"),  # none of ours: its traceback is the report
        (ZeroDivisionError("a bug"), False, 2, "Traceback"),
        (KeyboardInterrupt(), True, 130, ""),
        (KeyboardInterrupt(), False, 130, ""),
        (typer.Exit(3), True, 3, ""),
    ],
)
def test_exit_codes(
    error: BaseException | None,
    working: bool,
    code: int,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("verl_adaptor.cli.train.train", ends(error, working=working))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "recipe.yaml", "ppo.epochs=0", "--output", "out"])
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(shown)
    assert ("Traceback" in printed) == (shown == "Traceback")


def test_the_traceback_of_our_own_errors_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_ADAPTOR_TRACEBACK", "1")
    monkeypatch.setattr("verl_adaptor.cli.train.train", ends(ConfigError("wrong."), working=False))
    with pytest.raises(SystemExit):
        cli.main(["train", "recipe.yaml", "--output", "out"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["trian"], ["train", "recipe.yaml"], ["backends", "--jsn"], []])
def test_a_mistyped_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


def test_the_doctor_exits_with_2_only_for_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for severity, code in (("warning", 0), ("error", 2)):
        finding = Finding("x", severity, "a fact", "a cure", ("a report",))
        monkeypatch.setattr(doctor, "SOFTWARE", ())
        monkeypatch.setattr(doctor, "MACHINE", (lambda finding=finding: iter([finding]),))
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", "--json"])
        assert ended.value.code == code
        [shown] = json.loads(capsys.readouterr().out)["findings"]
        assert shown == {"id": "x", "severity": severity, "fact": "a fact", "cure": "a cure", "reports": ["a report"]}


def test_the_doctor_cures_what_it_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    monkeypatch.setattr(doctor, "_version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.get)
    found = {finding.id: finding for finding in doctor.examine()}
    assert "export OMP_NUM_THREADS=" in found["cpus"].cure
    assert found["torch-companions"].cure == "pip uninstall torchvision"
    assert all(finding.cure for finding in found.values() if finding.severity != "ok")
