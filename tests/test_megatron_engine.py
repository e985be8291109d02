"""The megatron engine: every law on one rank; on shards what those change."""

import pytest

from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.bench import SHARE_CPUS

TestMegatronEngine = conformance_suite("megatron", roles=("inference",))
TestMegatronEngineTP = pytest.mark.slow(
    conformance_suite("megatron", roles=("inference",), engine_settings={"tensor_parallel_size": 2, **SHARE_CPUS})
)
