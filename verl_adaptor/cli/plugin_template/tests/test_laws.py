"""Every law that the declaration of ``template`` asks for."""

from verl_adaptor.testing import conformance_suite

TestTemplate = conformance_suite("template")
