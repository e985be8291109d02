"""Every law on what plays both roles, by the one line that a plug-in author writes. Trainers alone: test_layouts.py."""

import pytest

from verl_adaptor.registry import register
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.reference import SPEC

register(SPEC)

TestReference = conformance_suite("reference")
TestHF = conformance_suite("hf")
TestHFQwen2 = pytest.mark.slow(conformance_suite("hf", family="qwen2"))
TestHFGPT2 = pytest.mark.slow(conformance_suite("hf", family="gpt2"))
TestHFMistral = pytest.mark.slow(conformance_suite("hf", family="mistral"))
TestHFMixtral = pytest.mark.slow(conformance_suite("hf", family="mixtral"))
