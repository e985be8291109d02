"""`trainer.rollout_engine()`: an engine on the trainer's own weights, over the trainer's own ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from verl_adaptor.backends.rollout import RolloutEngine, rollout_spec
from verl_adaptor.capabilities import Capability
from verl_adaptor.errors import ConfigError, EngineError, UnsupportedCapability, WeightUpdateError
from verl_adaptor.factory import create_inference_engine, create_trainer_backend, resolve_trainer
from verl_adaptor.protocols import InferenceEngine, TrainerBackend
from verl_adaptor.registry import get_spec
from verl_adaptor.samples import SamplingParams
from verl_adaptor.testing.bench import SHARE_CPUS, WORKERS, Bench, policy_gradient
from verl_adaptor.testing.laws_pairs import engine_scores_as_trainer, first_ratio_is_one, nothing_drifts, sync
from verl_adaptor.testing.suite import LAWS

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "hf": ("hf", {}),
    "hf, adapters": ("hf", {"lora_rank": 4}),
    "fsdp x2": ("fsdp", {"data_parallel_size": 2}),
    "zero3 x2": ("zero", {"data_parallel_size": 2, "zero_stage": 3}),
    "megatron tp2": ("megatron", {"tensor_parallel_size": 2}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "hf x2": ("hf", {"data_parallel_size": 2}),
    "fsdp tp2, adapters": ("fsdp", {"tensor_parallel_size": 2, "lora_rank": 4}),
    "fsdp cp2": ("fsdp", {"context_parallel_size": 2}),
    "megatron dp2": ("megatron", {"data_parallel_size": 2}),
    "megatron pp2": ("megatron", {"pipeline_parallel_size": 2}),
    "megatron pp2, interleaved": ("megatron", {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "megatron tp2 sp": ("megatron", {"tensor_parallel_size": 2, "sequence_parallel": True}),
}
FAMILIES = {"llama": {"num_hidden_layers": 4}, "qwen2": {}, "mixtral": {}}


@pytest.fixture(
    scope="module", params=[pytest.param(f, marks=[] if f == "llama" else pytest.mark.slow) for f in FAMILIES]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(get_spec("hf"), family=request.param, model=FAMILIES[request.param])
    yield bench
    bench.close()


def make(bench: Bench, name: str, **settings: Any) -> TrainerBackend:
    backend, layout = (LAYOUTS | MORE)[name]
    if bench.family == "mixtral" and layout.get("tensor_parallel_size") and backend == "megatron":
        layout = {**layout, "sequence_parallel": True}  # Megatron wants it with experts
    plan = resolve_trainer(bench.path, backend, **SHARE_CPUS, **layout, **settings)
    return plan.create(workers=WORKERS)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_it_is_the_trainers_policy(name: str, bench: Bench) -> None:
    """P1, P2, P3; and the tokens are those that an engine with weights of its own draws for the same seed."""
    if bench.family == "mixtral" and "adapters" in name:
        pytest.skip("adapters on fused experts are refused (test_adapters.py)")
    with make(bench, name, learning_rate=0.05) as trainer, trainer.rollout_engine() as engine:
        engine_scores_as_trainer(trainer, engine, bench)
        first_ratio_is_one(trainer, engine, bench)
        sync(trainer, engine)
        with bench.engine("hf") as own:
            sync(trainer, own)
            params, prompts = SamplingParams(max_tokens=12, seed=3, n=2), bench.prompts(12)
            expected = [c.token_ids for c in own.generate(prompts, params)]
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    with make(bench, name, learning_rate=0.0, weight_decay=0.0) as trainer, trainer.rollout_engine() as engine:
        nothing_drifts(trainer, engine, bench)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_never_serves_weights_that_it_does_not_know(name: str, bench: Bench) -> None:
    """After an update it refuses until it is handed the export, and it takes no export but its trainer's newest."""
    with make(bench, name, learning_rate=0.05) as trainer, trainer.rollout_engine(max_batch_size=4) as engine:
        old = trainer.export_weights()
        trainer.update(bench.batch(), policy_gradient)
        with pytest.raises(EngineError, match="gone on since policy version 0"):
            engine.generate([[5, 6]])
        with pytest.raises(EngineError, match="gone on"):
            engine.score([[5, 6]])
        new = trainer.export_weights()
        engine.update_weights(new)
        assert engine.policy_version == 1
        assert engine.generate([[5, 6]])[0].version_runs[0][0] == 1
        with pytest.raises(WeightUpdateError, match="older"):
            engine.update_weights(old)
        with bench.trainer(alone=True) as other, pytest.raises(WeightUpdateError, match="its trainer's own weights"):
            engine.update_weights(other.export_weights())
        assert engine.generate([[5, 6]])  # a refusal changes nothing


def test_requests_that_run_across_an_update_go_on_with_the_new_weights(bench: Bench) -> None:
    with bench.trainer(learning_rate=0.05) as trainer, trainer.rollout_engine() as engine:
        sample = engine._expand([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        engine._enter(sample)
        for _ in range(3):
            engine._dispatch.advance()
        trainer.update(bench.batch(), policy_gradient)
        engine.update_weights(trainer.export_weights(), in_flight="keep")
        engine._dispatch.run(sample)
        assert sample[0].version_runs == [(0, 3), (1, 5)]


@pytest.mark.parametrize("name", ["fsdp x2", "zero3 x2", "megatron tp2"])
def test_an_update_finds_all_ranks_whichever_of_them_has_requests(name: str, bench: Bench) -> None:
    """One request: on two replicas one rank has no rows, and the gathering of the new weights is a collective."""
    with make(bench, name, learning_rate=0.05, call_timeout_s=60) as trainer, trainer.rollout_engine() as engine:
        sample = engine._expand([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
        engine._enter(sample)
        engine._dispatch.advance()
        trainer.update(bench.batch(), policy_gradient)
        engine.update_weights(trainer.export_weights(), in_flight="keep")
        engine._dispatch.run(sample)
        assert [version for version, _ in sample[0].version_runs] == [0, 1]


@pytest.mark.parametrize("name", ["hf", "hf x2"])
def test_a_busy_engine_scores_with_no_weights_that_it_does_not_know(name: str, bench: Bench) -> None:
    """One row, so that one of two ranks has none: it refuses as well, and the ranks live on."""
    with make(bench, name, learning_rate=0.05) as trainer, trainer.rollout_engine() as engine:
        sample = engine._expand([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
        engine._enter(sample)
        engine._dispatch.advance()
        trainer.update(bench.batch(), policy_gradient)
        with pytest.raises(EngineError, match="gone on"):
            engine.score([[5, 6]])
        engine._dispatch.leave(sample)
        engine.update_weights(trainer.export_weights())
        assert len(engine.score([[5, 6]])[0]) == 1


@pytest.mark.parametrize("backend", ["hf", "fsdp", "zero"])
def test_it_holds_no_weights_of_its_own_while_nothing_runs(backend: str, bench: Bench) -> None:
    with create_trainer_backend(bench.path, backend, learning_rate=0.0) as trainer:
        engine = trainer.rollout_engine()
        assert isinstance(engine, RolloutEngine)
        own = [parameter.untyped_storage() for parameter in engine._parameters.values()]
        if backend == "hf":  # lent: the trainer's very memory
            lent = {parameter.data_ptr() for parameter in trainer.head.parameters()}
            assert {storage.data_ptr() for storage in own} == lent
        else:
            assert sum(storage.size() for storage in own) == 0
            seen = []
            step = engine._step
            engine._step = lambda: (seen.append(sum(s.size() for s in own)), step())[1]
            engine.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
            assert min(seen) == sum(4 * parameter.numel() for parameter in engine._parameters.values())
            assert sum(storage.size() for storage in own) == 0
        engine.close()


def test_what_cannot_be_is_refused(bench: Bench) -> None:
    with bench.trainer() as trainer, pytest.raises(ConfigError, match="does not read replicas"):
        trainer.rollout_engine(replicas=2)
    with bench.trainer(head="value") as critic, pytest.raises(UnsupportedCapability, match="generates nothing"):
        critic.rollout_engine()
    with pytest.raises(ConfigError, match="executor='inline' with 2 ranks"):
        create_inference_engine(bench.path, "hf", replicas=2, executor="inline")
    with pytest.raises(ConfigError, match="starts processes of its own"):
        create_inference_engine(bench.path, "vllm", executor="ray")


class RolloutBench(Bench):
    """A bench whose engine is a trainer's."""

    def engine(self, backend: str | None = None, **settings: Any) -> InferenceEngine:
        engine = self.trainer().rollout_engine(**settings)
        self._open.append(engine)
        return engine


@pytest.mark.parametrize("backend", ["hf", "fsdp"])
def test_it_keeps_the_laws_of_engines(backend: str) -> None:
    """All that need no export of another trainer."""
    bench = RolloutBench(get_spec(backend))
    checked = 0
    try:
        for law in LAWS:
            able = {c for c, support in rollout_spec(backend).capabilities.items() if support}
            if set(law.roles) == {"inference"} and set(law.needs) <= able - {Capability.UPDATE_WEIGHTS}:
                law.check(bench)
                checked += 1
    finally:
        bench.close()
    assert checked >= 9
