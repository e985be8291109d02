"""Every law that the declaration of ``accelerate`` asks for, on one rank and on two, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

from verl_adaptor import create_trainer_backend
from verl_adaptor.errors import ConfigError
from verl_adaptor.registry import get_spec
from verl_adaptor.testing import conformance_suite
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws_training import weights
from verl_adaptor.testing.models import make_tiny_model

TestOneRank = conformance_suite("accelerate")
TWO = {"family": "qwen2", "trainer_settings": {"data_parallel_size": 2}}
TestTwoRanks = conformance_suite("accelerate", laws=["T1", "T2"], **TWO)
TestTwoRanksWhole = pytest.mark.slow(conformance_suite("accelerate", **TWO))


def updated(bench: Bench) -> dict[str, torch.Tensor]:
    with bench.trainer() as trainer:
        trainer.update(bench.batch(), policy_gradient)
        return weights(trainer)


def test_accumulation_that_others_set_divides_no_gradient() -> None:
    bench = Bench(get_spec("accelerate"))
    try:
        plain = updated(bench)
        Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
        torch.testing.assert_close(updated(bench), plain, rtol=0, atol=0)
    finally:
        Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
        bench.close()


def test_what_accelerate_launch_asks_for_is_not_passed_over(tmp_path: Path, monkeypatch: Any) -> None:
    kinds = "verl_adaptor_accelerate.trainer.PLAIN"
    monkeypatch.setattr(kinds, ())  # a process group of another kind cannot be begun here without ending this one's
    with pytest.raises(ConfigError, match=r"accelerate is set to NO .* backend='fsdp'"):
        create_trainer_backend(make_tiny_model("llama", tmp_path), backend="accelerate")
