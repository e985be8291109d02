"""The hf engine's own mechanics: its decode loop against transformers' generate, sampling, joining, admission.

The laws it shares with other engines are in the suite.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MambaConfig

from verl_adaptor.backends.causal_lm import named_tensors
from verl_adaptor.backends.decoding.network import Network
from verl_adaptor.backends.decoding.sampler import edited
from verl_adaptor.backends.hf import verl_adaptor_backends
from verl_adaptor.backends.hf.engine import HFEngine
from verl_adaptor.backends.sampling import cut, inverse_cdf
from verl_adaptor.config import EngineConfig
from verl_adaptor.errors import ConfigError, EngineClosed, EngineError, InvalidRequest, ModelError, WeightUpdateError
from verl_adaptor.protocols import SampleRequest
from verl_adaptor.protocols.dispatch import FairLock
from verl_adaptor.samples import Completion, Delta, SamplingParams, TensorMeta, WeightUpdate
from verl_adaptor.testing.models import VOCAB_SIZE, make_tiny_model, save_random_model, tiny_tokenizer

[SPEC] = verl_adaptor_backends()
KNOWN = 259
"""Ids that the tiny tokenizer has; the model's vocabulary goes on to VOCAB_SIZE."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Family -> folder of its tiny model, made once."""
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            made[family] = str(make_tiny_model(family, tmp_path_factory.mktemp("models") / family))
        return made[family]

    return folder


@pytest.fixture
def make(model: Callable[[str], str]) -> Iterator[Callable[..., HFEngine]]:
    """Makes engines and closes them."""
    made: list[HFEngine] = []

    def engine(family: str = "llama", **settings: Any) -> HFEngine:
        made.append(HFEngine(model(family), EngineConfig(device="cpu", **settings), None, SPEC))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shape of the token ids of every forward."""
    seen: list[tuple[int, ...]] = []
    call = Network.__call__

    def recorded(self: Network, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(ids.shape))
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(Network, "__call__", recorded)
    return seen


def prompts(count: int, *, longest: int = 20, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, KNOWN, (n,), generator=generator).tolist()) for n in lengths]


def plain(path: str) -> Any:
    """The model in plain transformers with eager attention: nothing of ours in it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def table(network: Any, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[len(ids), V] log-probs after each token."""
    return (network(input_ids=torch.tensor([list(ids)])).logits[0].float() / temperature).log_softmax(-1)


def greedy(network: Any, prompt: Sequence[int], tokens: int, **settings: Any) -> tuple[int, ...]:
    """transformers' own generate on one prompt, without the ids that no token has."""
    ids = torch.tensor([list(prompt)])
    network.generation_config.eos_token_id = None
    out = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        suppress_tokens=list(range(KNOWN, VOCAB_SIZE)), **settings,
    )  # fmt: skip
    return tuple(out[0, len(prompt) :].tolist())


def log_prob_error(network: Any, c: Completion, temperature: float = 1.0) -> float:
    """Largest difference between reported log-probs and a plain forward's."""
    truth = table(network, (*c.prompt_token_ids, *c.token_ids), temperature)[len(c.prompt_token_ids) - 1 : -1]
    return float((truth.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0] - torch.tensor(c.log_probs)).abs().max())


def updated(engine: HFEngine, *, scale: float = 0.0, version: int = 1) -> WeightUpdate:
    """The engine's own weights, moved by noise of this scale."""
    generator = torch.Generator().manual_seed(version)
    own, tied = named_tensors(engine._network.model)
    new = {name: t.clone() + scale * torch.randn(t.shape, generator=generator) for name, t in own.items()}
    return WeightUpdate(
        version=version,
        tensors=tuple(TensorMeta(name=n, shape=tuple(t.shape), dtype="float32") for n, t in new.items()),
        buckets=lambda: iter([{name: tensor} for name, tensor in new.items()]),
        tied=tied,
    )


# -- the decode loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "qwen3_moe", "mistral", "gemma2"])
def test_greedy_is_transformers_generate(make: Any, model: Any, family: str) -> None:
    """Though rows wait for three places, join, leave and are padded: one prompt at a time in transformers says the same."""
    engine, network = make(family, max_batch_size=3), plain(model(family))
    limits = [17, 5, 23, 9, 1, 14, 30, 2]
    each = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in limits]
    for c, n in zip(engine.generate(prompts(8), each), limits, strict=True):
        assert c.token_ids == greedy(network, c.prompt_token_ids, n)
        assert log_prob_error(network, c) <= 1e-4


def test_a_sliding_window_slides_over_joined_rows(make: Any, model: Any) -> None:
    engine, network = make("gemma3", max_batch_size=2), plain(model("gemma3"))
    for c in engine.generate(prompts(5, seed=4), SamplingParams(max_tokens=25, ignore_eos=True, seed=1)):
        assert log_prob_error(network, c) <= 1e-4


def test_rows_that_join_late_are_sampled_as_if_alone(make: Any) -> None:
    engine = make()
    wanted = [SamplingParams(max_tokens=10 + 3 * i, seed=i, temperature=1.2, ignore_eos=True) for i in range(6)]
    alone = [engine.generate([p], its)[0] for p, its in zip(prompts(6), wanted, strict=True)]

    async def staggered() -> list[Completion]:
        calls: list[asyncio.Task[list[Completion]]] = []
        long = engine.stream(prompts(1, seed=9)[0], SamplingParams(max_tokens=60, ignore_eos=True))
        async for delta in long:
            place = len(calls)
            if place < 6 and delta.token_ids:
                calls.append(asyncio.create_task(engine.agenerate(prompts(6)[place], wanted[place])))
        return [c for group in await asyncio.gather(*calls) for c in group]

    assert [c.token_ids for c in asyncio.run(staggered())] == [c.token_ids for c in alone]


def test_a_shared_prompt_is_read_once_and_a_long_one_in_pieces(make: Any, shapes: list[tuple[int, ...]]) -> None:
    engine = make(max_prefill_tokens=8)
    prompt = tuple(range(3, 23))
    shapes.clear()
    cs = engine.generate([prompt], SamplingParams(n=6, max_tokens=3, seed=0, ignore_eos=True))
    assert shapes == [(1, 8), (1, 8), (1, 4), (6, 1), (6, 1)]
    whole = make().generate([prompt], SamplingParams(n=6, max_tokens=3, seed=0, ignore_eos=True))
    assert [c.token_ids for c in cs] == [c.token_ids for c in whole]


def test_the_prefill_budget_counts_padding(make: Any, shapes: list[tuple[int, ...]]) -> None:
    engine = make(max_prefill_tokens=24)
    shapes.clear()
    engine.generate([(5,) * n for n in (3, 10, 11, 4, 12)], SamplingParams(max_tokens=1, seed=0))
    assert shapes == [(2, 12), (2, 10), (1, 3)]


def test_never_more_rows_than_places(make: Any, shapes: list[tuple[int, ...]]) -> None:
    engine = make(max_batch_size=4)
    engine.generate(prompts(11), [SamplingParams(max_tokens=2 + i, seed=0, ignore_eos=True) for i in range(11)])
    decoded = [rows for rows, width in shapes if width == 1]
    assert max(decoded) == 4 and not engine._rows and engine._batch is None


def test_dead_rows_leave_the_batch(make: Any, shapes: list[tuple[int, ...]]) -> None:
    limits = [4] * 6 + [40] * 2
    make().generate(prompts(8), [SamplingParams(max_tokens=n, seed=0, ignore_eos=True) for n in limits])
    assert shapes[-1] == (2, 1)


def test_score_is_exact_under_padding_and_in_pieces(make: Any, model: Any) -> None:
    rows = [*prompts(5, longest=30, seed=2), (7, 8)]
    whole, small = make().score(rows, 0.7), make(max_prefill_tokens=9).score(rows, 0.7)
    network = plain(model("llama"))
    for row, one, two in zip(rows, whole, small, strict=True):
        truth = table(network, row, 0.7)[:-1].gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        assert len(one) == len(row) - 1
        torch.testing.assert_close(torch.tensor([one, two]), truth.expand(2, -1), atol=1e-5, rtol=0)


# -- sampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.7}]
)
def test_frequencies_follow_the_distribution(make: Any, model: Any, settings: dict[str, Any]) -> None:
    """Pearson's chi-square over 4,000 independent samples, with top-p taken of what top-k leaves."""
    draws, [prompt] = 4000, prompts(1, seed=5)
    engine = make(max_batch_size=draws)
    cs = engine.generate([prompt], SamplingParams(max_tokens=1, n=draws, seed=11, **settings))
    probs = table(plain(model("llama")), prompt, settings.get("temperature", 1.0))[-1].exp()
    reported = torch.tensor([c.log_probs[0] for c in cs]).exp()
    tokens = torch.tensor([c.token_ids[0] for c in cs])
    torch.testing.assert_close(reported, probs[tokens], atol=1e-5, rtol=1e-4)  # never renormalised
    expected = probs.double()
    expected[KNOWN:] = 0
    ordered, order = expected.sort(descending=True)
    ordered[settings.get("top_k") or VOCAB_SIZE :] = 0
    ordered[ordered.cumsum(-1) - ordered >= settings.get("top_p", 2.0) * ordered.sum()] = 0
    expected = torch.zeros(VOCAB_SIZE, dtype=torch.float64).scatter(0, order, ordered / ordered.sum()) * draws
    seen = tokens.bincount(minlength=VOCAB_SIZE).double()
    assert float(seen[expected == 0].sum()) == 0
    common = expected >= 5
    chi = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert freedom >= 5 and chi < freedom + 4 * (2 * freedom) ** 0.5


def test_ids_without_a_token_are_never_sampled(make: Any) -> None:
    cs = make(max_batch_size=2000).generate([(5, 6)], SamplingParams(max_tokens=2, n=2000, temperature=50.0, seed=3))
    assert max(t for c in cs for t in c.token_ids) == KNOWN - 1  # among 4,000 nearly uniform ones


@given(st.integers(0, 10_000), st.integers(0, 12), st.floats(0.01, 1.0), st.booleans())
def test_cut_keeps_the_smallest_set(seed: int, top_k: int, top_p: float, wide: bool) -> None:
    size = 1500 if wide else 12
    probs = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    kept = cut(probs, torch.tensor([[top_k or size]]), torch.tensor([[top_p]], dtype=torch.float64))[0]
    ordered = probs[0].sort(descending=True).values.double()[: top_k or size]
    enough = int((ordered.cumsum(0) < top_p * ordered.sum() - 1e-7).sum()) + 1
    count = int((kept > 0).sum())
    assert count == (len(ordered) if top_p == 1 else count) and 0 <= count - enough + 1 <= 2
    assert kept[kept > 0].equal(probs[0][kept > 0])
    assert float(kept[kept > 0].min()) == pytest.approx(float(ordered[count - 1]), abs=0)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.7, 1e-12]), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_skips_what_has_no_probability(probs: list[float], number: float) -> None:
    if sum(probs):
        token = int(inverse_cdf(torch.tensor([probs]), torch.tensor([number], dtype=torch.float64)))
        assert probs[token] > 0


def test_the_last_number_takes_the_last_possible_token() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.7, 0.0]])
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(inverse_cdf(probs, last)) == 2 and int(inverse_cdf(probs, last * 0)) == 0


def test_repetition_penalty_is_transformers(make: Any, model: Any) -> None:
    engine, network, [prompt] = make(), plain(model("llama")), prompts(1, seed=6)
    params = SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.4, ignore_eos=True)
    others = [SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=30, seed=2)]
    c = engine.generate([(5, 6), prompt, (7,)], [others[0], params, others[1]])[1]
    assert c.token_ids == greedy(network, prompt, 20, repetition_penalty=1.4)
    assert log_prob_error(network, c) <= 1e-4  # the policy's, not the penalised


def test_penalties_count_the_response_and_min_tokens_hides_eos() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, min_tokens=4, logit_bias={1: 2.0})
    sample = SampleRequest(
        request_id="r", index=0, group_id="g", prompt_token_ids=(3,), params=params, seed=0,
        stop_token_ids=frozenset({2}), token_ids=[4, 4, 5],
    )  # fmt: skip
    assert edited(torch.zeros(6), sample).tolist() == [0.0, 2.0, -torch.inf, 0.0, -1.0, -0.75]
    sample.token_ids.append(5)
    assert edited(torch.zeros(6), sample)[2] == 0


def test_min_tokens_delays_a_certain_eos(make: Any, model: Any) -> None:
    engine = make()
    [eos] = engine.model.eos_token_ids
    params = SamplingParams(max_tokens=9, min_tokens=4, logit_bias={eos: 100.0}, seed=0)
    [c] = engine.generate([(5, 6, 7)], params)
    assert len(c.token_ids) == 5 and c.token_ids.index(eos) == 4 and c.finish_reason == "stop"
    assert log_prob_error(plain(model("llama")), c) <= 1e-4


# -- concurrency -------------------------------------------------------------------------------------------------


def test_concurrent_calls_are_one_batch_and_repeat_bit_for_bit(make: Any, shapes: list[tuple[int, ...]]) -> None:
    """32 async calls do the same forwards as one call of 32, and the same ones again next time."""
    wanted = [SamplingParams(max_tokens=5 + i % 7, seed=i, ignore_eos=True) for i in range(32)]

    async def gathered() -> list[Completion]:
        calls = [engine.agenerate(p, its) for p, its in zip(prompts(32), wanted, strict=True)]
        return [c for group in await asyncio.gather(*calls) for c in group]

    engine, runs = make(), []
    for run in (
        lambda: engine.generate(prompts(32), wanted),
        lambda: asyncio.run(gathered()),
        lambda: asyncio.run(gathered()),
    ):
        shapes.clear()
        runs.append(([(c.token_ids, c.log_probs) for c in run()], list(shapes)))
    assert runs[0] == runs[1] == runs[2]
    assert not engine._dispatch._drivers  # an event loop that is gone is not kept


def test_turn_by_turn_calls_batch_the_same_every_time(make: Any, shapes: list[tuple[int, ...]]) -> None:
    """Follow-up requests without seeds of their own, where the order of submission decides the seeds."""

    async def conversation(engine: HFEngine, number: int) -> list[int]:
        ids = list(prompts(8)[number])
        for turn in range(3):
            [c] = await engine.agenerate(ids, SamplingParams(max_tokens=2 + (number + turn) % 3, ignore_eos=True))
            ids += [*c.token_ids, 9]
            for _ in range(number % 3):
                await asyncio.sleep(0)
        return ids

    async def all_of_them() -> list[list[int]]:
        engine = make()
        shapes.clear()
        return await asyncio.gather(*(conversation(engine, number) for number in range(8)))

    first = asyncio.run(all_of_them()), list(shapes)
    assert all((asyncio.run(all_of_them()), list(shapes)) == first for _ in range(3))


def test_abort_cancel_and_early_exit_free_their_places(make: Any) -> None:
    engine = make(max_batch_size=1)
    long = SamplingParams(max_tokens=400, ignore_eos=True)

    async def scenario() -> None:
        task = asyncio.create_task(engine.agenerate((5, 6), long))
        while not engine.running:
            await asyncio.sleep(0)
        other = asyncio.create_task(engine.agenerate((7,), long))
        await asyncio.sleep(0.01)
        task.cancel()
        while len(engine.running) > 1:
            await asyncio.sleep(0)
        engine.abort(engine.running)
        [c] = await asyncio.wait_for(other, 30)
        assert c.finish_reason == "abort" and len(c.token_ids) < 400
        stream = engine.stream((8,), long)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert not engine.running and not engine._rows
        assert len((await engine.agenerate((9,), SamplingParams(max_tokens=3, ignore_eos=True)))[0].token_ids) == 3

    asyncio.run(scenario())


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread; its result or error will be in the list."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, out


def test_another_thread_can_abort_pause_and_close_a_sync_generate(make: Any) -> None:
    engine = make()
    long = SamplingParams(max_tokens=500, ignore_eos=True)

    def started() -> tuple[threading.Thread, list[Any]]:
        thread, out = in_thread(lambda: engine.generate([(5, 6)], long))
        while not engine.running:
            time.sleep(0.001)
        return thread, out

    thread, out = started()
    engine.abort(engine.running)
    thread.join(60)
    assert out[0][0].finish_reason == "abort" and len(out[0][0].token_ids) < 500

    thread, out = started()
    engine.pause()
    [sample] = engine._dispatch.samples.values()
    held = len(sample.token_ids)
    time.sleep(0.05)
    assert len(sample.token_ids) == held < 500, "a paused engine went on stepping"
    engine.resume()
    thread.join(60)
    assert len(out[0][0].token_ids) == 500

    thread, out = started()
    engine.close()
    thread.join(60)
    assert isinstance(out[0], EngineClosed)
    assert not [t for t in threading.enumerate() if t.name.startswith("hf-engine")]


def test_the_lock_is_granted_in_turn() -> None:
    """Who waits gets it before who releases it and takes it again at once: an update is not starved by requests (C13)."""
    lock = FairLock()

    def enter(who: str, order: list[str]) -> None:
        with lock, lock:
            order.append(who)

    for _ in range(20):
        order: list[str] = []
        with lock:
            thread, _out = in_thread(lambda order=order: enter("waiting", order))
            until = time.monotonic() + 0.1
            while not lock._turn.locked() and time.monotonic() < until:
                time.sleep(0.001)
        enter("stepping", order)
        thread.join()
        assert order == ["waiting", "stepping"]


def test_a_failing_step_ends_its_requests_only(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    with monkeypatch.context() as patch:
        patch.setattr(Network, "__call__", lambda *_, **__: 1 / 0)
        with pytest.raises(EngineError, match="generation step failed: division"):
            engine.generate(prompts(3))
        with pytest.raises(EngineError, match="generation step failed: division"):
            asyncio.run(engine.agenerate((5,)))
    assert not engine.running and not engine._rows
    assert engine.generate([(5, 6)], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"


def test_an_event_loop_waits_for_no_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step does not return, callers come and go."""
    engine, returns, steps = make(), threading.Event(), threading.Event()
    step = engine._step
    wanted = SamplingParams(max_tokens=3, ignore_eos=True)

    def late() -> Any:
        steps.set()
        assert returns.wait(30), "the event loop waited for the step"
        return step()

    async def come_and_go() -> list[list[Completion]]:
        stays, goes = (asyncio.create_task(engine.agenerate((5, i), wanted)) for i in (6, 7))
        while not steps.is_set():
            await asyncio.sleep(0.01)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        comes = asyncio.create_task(engine.agenerate((8, 9), wanted))
        await asyncio.sleep(0.02)
        returns.set()
        return await asyncio.gather(stays, comes)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_step", late)
        found = asyncio.run(come_and_go())
    assert [len(c.token_ids) for [c] in found] == [3, 3]
    assert not engine.running and not engine._rows


@pytest.mark.parametrize("on_a_loop", [False, True])
def test_close_waits_for_no_step_that_does_not_return(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_a_loop: bool
) -> None:
    """Callers on an event loop are told at once; one that steps itself is told when its step returns."""
    engine, returns, steps = make(), threading.Event(), threading.Event()
    monkeypatch.setattr("verl_adaptor.protocols.engine.CLOSE_WAIT_S", 0.1)
    monkeypatch.setattr(engine, "_step", lambda: (steps.set(), returns.wait(60), [])[-1])
    ask = (lambda: asyncio.run(engine.agenerate((5, 6)))) if on_a_loop else (lambda: engine.generate([(5, 6)]))
    thread, out = in_thread(ask)
    assert steps.wait(60)
    engine.close()
    assert "does not return" in caplog.text
    if on_a_loop:
        thread.join(60)
    assert thread.is_alive() != on_a_loop
    with pytest.raises(EngineClosed):
        engine.generate([(5, 6)])
    returns.set()
    thread.join(60)
    assert isinstance(out[0], EngineClosed)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the call that is left hanging
def test_a_request_of_a_dead_event_loop_harms_nobody(make: Any) -> None:
    engine = make()
    loop = asyncio.new_event_loop()
    call = loop.create_task(engine.agenerate((5,), SamplingParams(max_tokens=3)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert engine.running
    assert engine.generate([(6,)], SamplingParams(max_tokens=9, ignore_eos=True))[0].finish_reason == "length"
    assert not call.done()
    call._log_destroy_pending = False  # type: ignore[attr-defined]
    del call
    gc.collect()


# -- weights -----------------------------------------------------------------------------------------------------


def test_kept_requests_go_on_with_their_own_random_numbers(make: Any, model: Any) -> None:
    """The same weights again: the same tokens. Other weights: the tokens after the update are the new policy's."""
    engine, wanted = make(max_batch_size=3), SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    undisturbed = engine.generate(prompts(4), wanted)

    async def over(update: WeightUpdate) -> list[Completion]:
        async def watched() -> None:
            count = 0
            async for _ in engine.stream(prompts(1, seed=8)[0], wanted):
                count += 1
                if count == 4:
                    engine.update_weights(update, in_flight="keep")

        calls = [engine.agenerate(p, wanted) for p in prompts(4)]
        _, *groups = await asyncio.gather(watched(), *calls)
        return [c for group in groups for c in group]

    same = asyncio.run(over(updated(engine)))
    assert [c.token_ids for c in same] == [c.token_ids for c in undisturbed]
    moved = asyncio.run(over(updated(engine, scale=0.05, version=2)))
    assert {version for c in moved for version, _ in c.version_runs} == {1, 2}
    network = plain(model("llama"))
    network.load_state_dict({name: t.clone() for name, t in named_tensors(engine._network.model)[0].items()})
    mixed = 0
    for c in moved:
        old = sum(count for version, count in c.version_runs if version == 1)
        mixed += 0 < old < 12
        ids = (*c.prompt_token_ids, *c.token_ids)
        truth = table(network, ids)[len(c.prompt_token_ids) - 1 : -1].gather(-1, torch.tensor(c.token_ids)[:, None])[
            :, 0
        ]
        torch.testing.assert_close(torch.tensor(c.log_probs)[old:], truth[old:], atol=1e-4, rtol=0)
    assert mixed


def test_what_was_promised_must_arrive(make: Any) -> None:
    engine = make()
    update = updated(engine)
    *rest, last = update.buckets()
    with pytest.raises(WeightUpdateError, match=next(iter(last))):
        engine.update_weights(dataclasses.replace(update, buckets=lambda: iter(rest)))
    with pytest.raises(EngineError, match="half-way"):
        engine.score([(5, 6)])


def test_an_untied_trainer_does_not_fit_a_tied_engine(make: Any) -> None:
    engine = make("qwen2")
    update = updated(engine)
    [(alias, name)] = update.tied.items()
    head = TensorMeta(name=alias, shape=engine.model.tensors[name], dtype="float32")
    with pytest.raises(WeightUpdateError, match=f"not in the trainer: {alias}"):
        engine.update_weights(dataclasses.replace(update, tensors=(*update.tensors, head), tied={}))
    engine.update_weights(update)


# -- requests and models -----------------------------------------------------------------------------------------


def test_responses_end_where_they_are_told(make: Any) -> None:
    engine = make()
    letter = tiny_tokenizer().convert_tokens_to_ids
    sure = {letter("a"): 60.0}
    for params, ending in (
        (SamplingParams(max_tokens=9, stop=("aaa",), logit_bias=sure), ("aaa", "stop")),
        (SamplingParams(max_tokens=3, stop=("aaa",), logit_bias=sure), ("aaa", "stop")),
        (SamplingParams(max_tokens=9, stop_token_ids=(letter("a"),), logit_bias=sure), ("a", "stop")),
        (SamplingParams(max_tokens=4, ignore_eos=True, logit_bias={2: 60.0}), ("", "length")),
        (SamplingParams(max_tokens=4, logit_bias={2: 60.0}), ("", "stop")),
    ):
        [c] = engine.generate(["xyz"], params)
        assert (c.text, c.finish_reason) == ending
    assert len(c.token_ids) == 1  # EOS itself


def test_text_of_split_characters_joins(make: Any) -> None:
    """Characters of several tokens come out whole, and the pieces join to the whole text."""
    tokenizer = tiny_tokenizer()
    text = "naïve 漢字 🙂 end"
    sample = SampleRequest(
        request_id="r", index=0, group_id="g", prompt_token_ids=(3,), params=SamplingParams(), seed=0,
        stop_token_ids=frozenset(),
    )  # fmt: skip
    pieces = []
    ids = tokenizer(text)["input_ids"]
    for place, token in enumerate(ids):
        done = "length" if place == len(ids) - 1 else None
        sample.take(Delta(request_id="r", token_ids=(token,), log_probs=(0.0,), finish_reason=done), 0)
        pieces.append(sample.new_text(tokenizer))
    assert "".join(pieces) == sample.text == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) and "漢" in pieces


def test_what_is_no_prompt_is_refused_alone(make: Any) -> None:
    engine = make()
    bad, good = engine.generate([(1.5, 2), (5, 6)], SamplingParams(max_tokens=1), return_exceptions=True)
    assert isinstance(bad, InvalidRequest) and "1.5" in str(bad)
    assert len(good.token_ids) == 1
    assert len(engine.generate(torch.tensor([5, 6]).numpy(), SamplingParams(max_tokens=1))) == 1


def test_unfit_models_are_refused(make: Any, model: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=513 is over .*=512"):
        make(max_model_len=513)
    assert make(max_model_len=100).model.max_model_len == 100
    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, state_size=4)
    folder = save_random_model(config, tmp_path / "mamba", seed=0)
    with pytest.raises(ModelError, match="recurrent state"):
        HFEngine(str(folder), EngineConfig(device="cpu", max_model_len=64), None, SPEC)


def test_a_model_without_position_ids(tmp_path: Any) -> None:
    """ALiBi: positions are in the mask, and there is no own length limit."""
    config = AutoConfig.for_model(
        "bloom",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
    )
    folder = str(save_random_model(config, tmp_path / "bloom", seed=0))
    with pytest.raises(ConfigError, match="set max_model_len"):
        HFEngine(folder, EngineConfig(device="cpu"), None, SPEC)
    with HFEngine(folder, EngineConfig(device="cpu", max_model_len=64, max_batch_size=3), None, SPEC) as engine:
        network = plain(folder)
        for c in engine.generate(prompts(5), SamplingParams(max_tokens=12, seed=0, ignore_eos=True)):
            assert log_prob_error(network, c) <= 1e-4


def test_bfloat16_is_near(make: Any, model: Any) -> None:
    network = plain(model("llama"))
    for c in make(dtype="bfloat16").generate(prompts(4), SamplingParams(max_tokens=8, seed=0)):
        assert log_prob_error(network, c) <= 0.2
