"""Every law on every built-in backend, by the one line that a plug-in author writes."""

from verl_adaptor.registry import register
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.reference import SPEC

register(SPEC)

TestReference = conformance_suite("reference")
TestHF = conformance_suite("hf")
