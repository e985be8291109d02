"""Discovery, laws R1 to R3: broken, duplicate, wrong and unknown plug-ins. Distributions are folders made on the spot."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from verl_adaptor.capabilities import FULL, BackendSpec, Capability, only, unsupported
from verl_adaptor.errors import BrokenPlugin, ConfigError, DuplicateBackend, UnknownBackend
from verl_adaptor.registry import Registry

HEAD = (
    "from verl_adaptor.hookspecs import hookimpl\nfrom verl_adaptor.capabilities import BackendSpec, Capability, FULL\n"
)


def distribution(folder: Path, name: str, source: str) -> None:
    """Install a plug-in into `folder`: one module, and the metadata that pip would write."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(HEAD + dedent(source))
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[verl_adaptor]\n{name}-point = {module}\n")


def backend(*names: str, role: str = "engine") -> str:
    """Source of a plug-in that offers these names."""
    specs = ", ".join(f"BackendSpec(name={name!r}, {role}='nowhere.engine:Engine')" for name in names)
    return f"@hookimpl\ndef verl_adaptor_backends():\n    return [{specs}]\n"


BROKEN = {  # distribution -> (source, what its listed error must say)
    "bad-import": ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that"),
    "bad-exit": ("raise SystemExit(7)", "SystemExit: 7"),
    "bad-hook": ("@hookimpl\ndef verl_adaptor_backends():\n    return 1 / 0", "ZeroDivisionError"),
    "bad-none": ("@hookimpl\ndef verl_adaptor_backends():\n    return None", "returned None; it must return a list"),
    "bad-type": ("@hookimpl\ndef verl_adaptor_backends():\n    return ['hf']", "'hf' is no BackendSpec"),
    "bad-nohook": ("", "implements no hook"),
    "bad-misspelt": ("@hookimpl\ndef verl_adaptor_backend():\n    return []", "unknown hook 'verl_adaptor_backend'"),
    "bad-argument": ("@hookimpl\ndef verl_adaptor_backends(config):\n    return []", "Argument(s) {'config'}"),
    "bad-spec": (
        "@hookimpl\ndef verl_adaptor_backends():\n"
        "    return [BackendSpec(name='a b', aliases='xy', engine='no_colon', version_range='5', capabilities={'scor': 1})]",
        "version_range='5' is no PEP 440 specifier",
    ),
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of broken plug-in beside a good one and two that claim one name."""
    folder = tmp_path_factory.mktemp("zoo")
    for name, (source, _) in BROKEN.items():
        distribution(folder, name, source)
    distribution(folder, "good", backend("good"))
    distribution(folder, "rival-one", backend("shared", "one"))
    distribution(folder, "rival-two", backend("two", "shared"))
    return folder


def listing(folder: Path, **environment: str) -> dict:
    """What the command line lists, in a process of its own."""
    code = (
        "import sys; from verl_adaptor.cli import main; sys.path.insert(0, sys.argv[1]); main(['backends', '--json'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, folder],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", **environment},
    )
    return json.loads(run.stdout)


def test_r1_a_broken_plugin_breaks_no_other_and_is_listed(zoo: Path) -> None:
    """C33."""
    shown = listing(zoo)
    assert {"hf", "good", "one", "two"} <= {row["name"] for row in shown["backends"]}
    errors = {row["distribution"]: row for row in shown["broken"]}
    assert errors.keys() == BROKEN.keys()
    for name, (_, sentence) in BROKEN.items():
        assert sentence in errors[name]["error"]
        assert errors[name]["version"] == "1.2"


def test_r2_two_claims_to_one_name_name_both_and_hurt_no_other_name(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(zoo)
    known = Registry.discover("")
    with pytest.raises(DuplicateBackend, match=r"'shared' is claimed by rival-one 1\.2.* and rival-two 1\.2"):
        known.find("shared", "inference")
    assert [known.find(name, "inference").name for name in ("hf", "one", "two", "good")] == ["hf", "one", "two", "good"]
    assert [row["name"] for row in listing(zoo)["duplicates"]] == ["shared"]
    assert "shared" not in known.names("inference")


def test_a_broken_plugin_asked_for_by_name_shows_its_cause(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(zoo)
    with pytest.raises(BrokenPlugin, match=r"bad-import 1\.2.*a_module_that_is_not_there") as caught:
        Registry.discover("").find("bad-import-point", "inference")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_every_fault_of_a_spec_is_named(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(zoo)
    [broken] = Registry.discover("bad-spec").broken
    for fault in (
        "'a b' is no name",
        "aliases='xy' must be",
        "engine='no_colon'",
        "needs distribution",
        "did you mean 'score'",
    ):
        assert fault in str(broken)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("none", {"hf"}),
        ("good", {"hf", "good"}),
        (
            " Good-Point , rival_one",
            {"hf", "good", "shared", "one"},
        ),  # by entry point, and by distribution, as pip spells
    ],
)
def test_the_variable_chooses_plugins_and_never_drops_the_built_in_ones(zoo: Path, chosen: str, expected: set) -> None:
    shown = listing(zoo, VERL_ADAPTOR_PLUGINS=chosen)
    assert {row["name"] for row in shown["backends"] if row["distribution"] != "verl-adaptor"} == expected - {"hf"}
    assert "hf" in {row["name"] for row in shown["backends"]}
    assert shown["broken"] == []


def test_a_name_in_the_variable_that_nothing_has_is_reported(zoo: Path) -> None:
    [row] = listing(zoo, VERL_ADAPTOR_PLUGINS="goood")["broken"]
    assert row["distribution"] == "VERL_ADAPTOR_PLUGINS"
    assert "did you mean 'good'" in row["error"]


# -- names, roles, capabilities: on a registry of our own --------------------------------------------------------


@pytest.fixture
def known() -> Registry:
    registry = Registry([], [])
    registry.register(
        BackendSpec(name="swift", aliases=("quick",), engine="m:E", capabilities={Capability.SCORE: FULL})
    )
    registry.register(BackendSpec(name="shard", trainer="m:T", capabilities={Capability.SCORE: unsupported("no")}))
    registry.register(
        BackendSpec(name="both", engine="m:E", trainer="m:T", capabilities={Capability.SCORE: only("cuda", "kernels")})
    )
    return registry


def test_r3_an_unknown_name_lists_the_nearest_of_the_asked_role(known: Registry) -> None:
    """C32."""
    with pytest.raises(UnknownBackend, match=r"'swfit'; did you mean 'swift'\? Known: both, quick, swift\."):
        known.find("swfit", "inference")
    with pytest.raises(UnknownBackend, match=r"no training backend.*Known: both, shard\."):
        known.find("swfit", "training")


def test_a_backend_asked_for_a_role_it_lacks_says_which_it_has(known: Registry) -> None:
    with pytest.raises(
        UnknownBackend, match=r"'shard' is for training only; for inference there are: both, quick, swift"
    ):
        known.find("shard", "inference")


def test_an_alias_finds_its_backend_and_what_is_no_string_is_refused(known: Registry) -> None:
    assert known.find("quick", "inference").name == "swift"
    with pytest.raises(ConfigError, match="backend=None is not a name"):
        known.find(None, "inference")  # type: ignore[arg-type]


def test_who_supports_a_capability(known: Registry) -> None:
    assert known.supporting(Capability.SCORE, "inference") == ["swift", "both (only cuda)"]
    assert known.supporting(Capability.SCORE, "training") == ["both (only cuda)"]


def test_registering_again_in_one_process_replaces(known: Registry) -> None:
    known.register(BackendSpec(name="swift", engine="m:E", summary="second"))
    assert known.find("swift", "inference").summary == "second"
    with pytest.raises(BrokenPlugin, match="neither an engine nor a trainer"):
        known.register(BackendSpec(name="idle"))
