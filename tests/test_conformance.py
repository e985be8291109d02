"""Every law on every built-in backend, by the one line that a plug-in author writes."""

import pytest

from verl_adaptor.registry import register
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.reference import SPEC

register(SPEC)

TestReference = conformance_suite("reference")
TestHF = conformance_suite("hf")
TestFSDP = conformance_suite("fsdp")
TestZero = conformance_suite("zero")
TestMegatron = conformance_suite("megatron")
TestHFQwen2 = pytest.mark.slow(conformance_suite("hf", family="qwen2"))
TestHFGPT2 = pytest.mark.slow(conformance_suite("hf", family="gpt2"))
TestHFMistral = pytest.mark.slow(conformance_suite("hf", family="mistral"))
TestHFMixtral = pytest.mark.slow(conformance_suite("hf", family="mixtral"))
