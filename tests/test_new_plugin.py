"""``verl-adaptor new-plugin``: what it writes is a backend. That it keeps the laws is tested in plugins/verl-adaptor-template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_adaptor import cli
from verl_adaptor.cli.new_plugin import TEMPLATE, new_plugin
from verl_adaptor.errors import ConfigError
from verl_adaptor.testing.models import make_tiny_model

USE = """
import json, sys
from verl_adaptor import SamplingParams, create_inference_engine
listed = "verl_adaptor_my_engine.engine" in sys.modules
with create_inference_engine(sys.argv[1], backend="my-engine") as engine:
    [completion] = engine.generate([(5, 6)], SamplingParams(max_tokens=3, ignore_eos=True))
print(json.dumps([listed, type(engine).__name__, len(completion.token_ids)]))
"""


def test_what_it_writes_is_found_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "verl-adaptor-my-engine"
    with pytest.raises(SystemExit) as ended:
        cli.main(["new-plugin", "my-engine", "--output", str(folder)])
    assert ended.value.code == 0
    assert "verl-adaptor check my-engine" in capsys.readouterr().out
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert files == {
        "pyproject.toml",
        "README.md",
        "tests/test_laws.py",
        "verl_adaptor_my_engine/__init__.py",
        "verl_adaptor_my_engine/engine.py",
    }
    assert not [file for file in files if "emplate" in (folder / file).read_text().replace("chat_template", "")]
    info = folder / "verl_adaptor_my_engine-0.1.0.dist-info"  # what pip would write
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-adaptor-my-engine\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[verl_adaptor]\nmy-engine = verl_adaptor_my_engine\n")
    code = f"import sys; sys.path.insert(0, {str(folder)!r})" + USE
    model = make_tiny_model("llama", tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, "MyEngineEngine", 3], done.stderr


@pytest.mark.parametrize(
    ("name", "told"), [("My Engine", "is no name"), ("hf", "already"), ("transformers", "already"), ("there", "exists")]
)
def test_what_it_refuses(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=told):
        new_plugin(name, tmp_path / name)


def test_the_package_in_plugins_is_what_it_writes() -> None:
    assert (Path(__file__).parent.parent / "plugins/verl-adaptor-template").resolve() == TEMPLATE
