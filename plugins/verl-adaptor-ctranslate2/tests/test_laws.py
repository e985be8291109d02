"""Every law that the declaration of ``ctranslate2`` asks for, and what it refuses."""

from pathlib import Path

import pytest

from verl_adaptor import resolve_engine
from verl_adaptor.errors import ConfigError
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.models import make_tiny_model

TestCTranslate2 = conformance_suite("ctranslate2")
TestQwen3 = pytest.mark.slow(conformance_suite("ctranslate2", family="qwen3"))
TestQwen2 = pytest.mark.slow(conformance_suite("ctranslate2", family="qwen2"))


def test_an_architecture_that_was_not_measured_is_refused_before_anything_loads(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="not measured with model_type='mistral', only with llama, qwen2, qwen3; take"
    ):
        resolve_engine(make_tiny_model("mistral", tmp_path), "ctranslate2")
