"""Laws I1 to I10: what every inference engine must do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch

from verl_adaptor.backends.export import weight_update
from verl_adaptor.capabilities import Capability, Role
from verl_adaptor.errors import EngineClosed, InvalidRequest, WeightUpdateError
from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.samples import AdapterUpdate, Completion, Delta, Prompt, SamplingParams, WeightUpdate
from verl_adaptor.testing.bench import FP32_LOG_PROB, GAP, Bench
from verl_adaptor.testing.laws import law

INFERENCE: Role = "inference"
LONG = 40


@law("I1", INFERENCE)
def tokens_and_finish_reason(bench: Bench) -> None:
    """The tokens returned are those sampled; EOS is there if and only if the response stopped on it."""
    engine = bench.shared_engine
    [eos, *_] = engine.model.eos_token_ids
    # nearly uniform over a small vocabulary: EOS comes in some rows, max_tokens in others
    params = SamplingParams(max_tokens=LONG, temperature=50.0, n=4)
    completions = engine.generate(bench.prompts(12), [params.replace(seed=seed) for seed in range(12)])
    reasons = {c.finish_reason for c in completions}
    assert reasons == {"stop", "length"}, f"expected both endings among 48 samples, got {reasons}"
    for c in completions:
        ended = c.token_ids[-1] == eos
        assert ended == (c.finish_reason == "stop"), f"{c.finish_reason} with last token {c.token_ids[-1]}, eos={eos}"
        assert eos not in c.token_ids[:-1], "EOS inside a response"
        assert len(c.token_ids) == len(c.log_probs) <= LONG
        assert ended or len(c.token_ids) == LONG, "finish_reason length before max_tokens"
        assert max(c.token_ids) < bench.sampleable, f"sampled id {max(c.token_ids)}, which no tokenizer entry has (C18)"
        assert sum(count for _, count in c.version_runs) == len(c.token_ids)
    beyond = engine.generate(bench.prompts(3), params.replace(ignore_eos=True, n=1))
    assert all(len(c.token_ids) == LONG and c.finish_reason == "length" for c in beyond)


@law("I2", INFERENCE)
def log_probs_are_the_tempered_policys(bench: Bench) -> None:
    """Log-probs are those at the sampling temperature, not renormalised under top-p or top-k (C02, C03)."""
    engine, prompts = bench.shared_engine, bench.prompts(6)
    for cut in ({}, {"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.8, "top_k": 9}):
        for temperature in (0.6, 1.0, 1.7):
            params = SamplingParams(max_tokens=8, temperature=temperature, seed=3, **cut)
            for c in engine.generate(prompts, params):
                assert_log_probs(bench, c, temperature)
    for c in engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0)):
        assert_log_probs(bench, c, 1.0)  # greedy reports the policy's own


@law("I2", INFERENCE)
def top_k_and_top_p_cut_the_support(bench: Bench) -> None:
    """Only tokens of the kept set are ever sampled."""
    for cut in ({"top_k": 3}, {"top_p": 0.3}):
        params = SamplingParams(max_tokens=6, temperature=2.0, seed=5, n=3, **cut)
        for c in bench.shared_engine.generate(bench.prompts(5), params):
            table = bench.log_probs((*c.prompt_token_ids, *c.token_ids), 2.0)[len(c.prompt_token_ids) - 1 :]
            for row, token in zip(table, c.token_ids, strict=True):
                better = row[: bench.sampleable][row[: bench.sampleable] > row[token] + GAP]
                kept = len(better) < 3 if "top_k" in cut else float(better.exp().sum()) < 0.3
                assert kept, f"sampled outside {cut}: {len(better)} tokens are likelier"


@law("I3", INFERENCE)
def greedy_is_the_oracles_greedy(bench: Bench) -> None:
    """Greedy takes the best token wherever it leads by more than 1e-4, alone and in any batch."""
    engine, prompts = bench.shared_engine, bench.prompts(9, seed=7)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    together = engine.generate(prompts, params)
    for prompt, c in zip(prompts, together, strict=True):
        table = bench.log_probs((*prompt, *c.token_ids))[len(prompt) - 1 :]
        lead = table[:, : bench.sampleable].max(-1).values - table.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]
        assert float(lead.max()) <= GAP, f"a token {float(lead.max()):.1e} nats below the best was taken as greedy"
    alone = [engine.generate([prompt], params)[0] for prompt in prompts[:4]]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:4]] or near_tie(bench, alone, together)


@law("I4", INFERENCE)
def a_seed_repeats_its_sample(bench: Bench) -> None:
    """A seed repeats its sample whatever else is in the batch; n samples differ."""
    engine, prompts = bench.shared_engine, bench.prompts(8, seed=11)
    params = SamplingParams(max_tokens=10, temperature=1.3, seed=42, n=3)
    alone = engine.generate([prompts[0]], params)
    others = [SamplingParams(max_tokens=5 + i, temperature=0.5 + i, seed=i) for i in range(7)]
    among = engine.generate([*prompts[1:4], prompts[0], *prompts[4:]], [*others[:3], params, *others[3:]])[3:6]
    assert [c.token_ids for c in alone] == [c.token_ids for c in among], "the sample depends on the batch around it"
    assert len({c.token_ids for c in alone}) == 3, "n samples of one prompt are not independent"
    assert {c.group_id for c in alone} == {alone[0].group_id} and [c.index for c in alone] == [0, 1, 2]
    again = engine.generate([prompts[0]], params.replace(seed=43))
    assert [c.token_ids for c in again] != [c.token_ids for c in alone], "the seed is ignored"


@law("I5", INFERENCE, needs=(Capability.STREAM,))
def sync_async_and_stream_agree(bench: Bench) -> None:
    """The three ways of calling give the same tokens, and deltas join to the final text."""
    engine, prompts = bench.shared_engine, bench.prompts(6, seed=13)
    each = [SamplingParams(max_tokens=9, temperature=1.0, seed=i) for i in range(6)]
    sync = engine.generate(prompts, each)

    async def both() -> tuple[list[Completion], list[list[Delta]]]:
        calls = [engine.agenerate(p, its) for p, its in zip(prompts, each, strict=True)]
        completions = [c for group in await asyncio.gather(*calls) for c in group]
        return completions, await asyncio.gather(*(collect(engine, p, q) for p, q in zip(prompts, each, strict=True)))

    completions, streams = asyncio.run(both())
    for a, b, deltas in zip(sync, completions, streams, strict=True):
        assert a.token_ids == b.token_ids == tuple(t for d in deltas for t in d.token_ids), "sync, async, stream differ"
        assert a.text == b.text == "".join(d.text for d in deltas), "the deltas do not join to the text"
        assert a.finish_reason == b.finish_reason == deltas[-1].finish_reason
        assert_close(a.log_probs, [x for d in deltas for x in d.log_probs])


@law("I5", INFERENCE, needs=(Capability.ABORT, Capability.STREAM))
def an_aborted_request_frees_its_place(bench: Bench) -> None:
    """Abort ends one request with what it has; the others finish; nothing is left running."""
    engine = bench.engine(max_batch_size=2)
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)

    async def scenario() -> tuple[list[Delta], list[Completion]]:
        seen: list[Delta] = []
        others = asyncio.gather(*(engine.agenerate(p, params) for p in bench.prompts(3)))
        async for delta in engine.stream(bench.prompts(1, seed=3)[0], params):
            seen.append(delta)
            if len(seen) == 2:
                engine.abort([delta.request_id])
        return seen, [c for group in await asyncio.wait_for(others, 120) for c in group]

    seen, others = asyncio.run(scenario())
    assert seen[-1].finish_reason == "abort" and sum(len(d.token_ids) for d in seen) < 40
    assert all(len(c.token_ids) == 40 for c in others), "an abort touched another request"
    assert not engine.running, "a finished request is still in the table"


@law("I6", INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def an_update_is_served_whole(bench: Bench) -> None:
    """After an update `score` and `generate` are the new policy's, also for prompts that were cached before."""
    engine = bench.engine()
    trainer = bench.reference_trainer()
    probe = [tuple(bench.prompts(1, seed=17, longest=60)[0]) for _ in range(2)]
    before = engine.score(probe)
    engine.generate(probe, SamplingParams(max_tokens=4, seed=0))  # fills whatever prefix cache there is
    for version in (1, 2):
        move(trainer, 0.05 * version)
        update = dataclasses.replace(trainer.export_weights(), version=version)
        engine.update_weights(update)
        assert engine.policy_version == version
        after = engine.score(probe)
        truth = oracle_scores(bench, trainer, probe)
        assert_close(after[0], truth[0], "score is not the new policy's")
        assert max(abs(a - b) for a, b in zip(after[0], before[0], strict=True)) > 1e-2, "the update changed nothing"
        [c] = engine.generate([probe[0]], SamplingParams(max_tokens=4, seed=0))
        truth_c = oracle_scores(bench, trainer, [(*c.prompt_token_ids, *c.token_ids)])[0]
        assert_close(c.log_probs, truth_c[len(probe[0]) - 1 :], "generation does not use the new policy")
        assert c.version_runs[0][0] == version


@law("I6", INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.SCORE))
def a_wrong_update_changes_nothing(bench: Bench) -> None:
    """Missing, extra or misshapen tensors are named; the old policy is served on."""
    engine, probe = bench.engine(), bench.prompts(2, seed=19)
    good = bench.reference_trainer().export_weights()
    before = engine.score(probe)
    first, *rest = good.tensors
    wrong_shape = dataclasses.replace(first, shape=(*first.shape[:-1], first.shape[-1] + 1))
    stranger = dataclasses.replace(first, name="no.such.weight")
    for tensors, named in (
        (tuple(rest), first.name),
        ((*good.tensors, stranger), "no.such.weight"),
        ((wrong_shape, *rest), first.name),
    ):
        try:
            engine.update_weights(dataclasses.replace(good, tensors=tensors, version=5))
        except WeightUpdateError as error:
            assert named in str(error), f"the error does not name {named}: {error}"
        else:
            raise AssertionError(f"an update with a wrong {named} was accepted")
    assert engine.policy_version == 0
    assert engine.score(probe) == before, "a refused update changed the policy"


@law("I6", INFERENCE, needs=(Capability.UPDATE_WEIGHTS, Capability.IN_FLIGHT_KEEP))
def tokens_know_their_policy(bench: Bench) -> None:
    """Requests kept over an update go on under the new policy, and each token knows its version and log-prob."""
    engine, trainer = bench.engine(), bench.reference_trainer()
    move(trainer, 0.05)
    update = dataclasses.replace(trainer.export_weights(), version=1)
    _kept_tokens_are_the_new_policys(bench, engine, trainer, update)


def _kept_tokens_are_the_new_policys(
    bench: Bench, engine: InferenceEngine, trainer: object, update: WeightUpdate
) -> None:
    """Update while a request runs, to what the reference trainer's network computes."""
    old = engine.policy_version
    [prompt] = bench.prompts(1, seed=23)

    async def scenario() -> list[Delta]:
        deltas = []
        async for delta in engine.stream(prompt, SamplingParams(max_tokens=12, ignore_eos=True, seed=1)):
            deltas.append(delta)
            if len(deltas) == 3:
                engine.update_weights(update, in_flight="keep")
        return deltas

    deltas = asyncio.run(scenario())
    ids = [t for d in deltas for t in d.token_ids]
    versions = [d.policy_version for d in deltas for _ in d.token_ids]
    assert len(ids) == 12 and sorted(versions) == versions and set(versions) == {old, update.version}
    log_probs = [x for d in deltas for x in d.log_probs]
    new = oracle_scores(bench, trainer, [(*prompt, *ids)])[0][len(prompt) - 1 :]
    at = versions.index(update.version)
    assert_close(log_probs[at:], new[at:], "after the update a cache of the old policy was used")


@law(
    "I6",
    INFERENCE,
    needs=(Capability.ADAPTER_SYNC, Capability.SCORE),
    refused=lambda bench: bench.engine(lora_rank=4).close(),
)
def adapters_travel_alone(bench: Bench) -> None:
    """Adapters reach the policy they are part of; their base is asked for once, whole weights never.

    Requests kept over an update go on with the new adapters. Whole weights replace all; a rank too large is refused.
    """
    trainer = bench.reference_trainer()
    with bench.engine(lora_rank=4) as engine:
        move(trainer, 0.02)  # a base that the engine has not loaded from anywhere
        base = dataclasses.replace(kept(trainer.export_weights()), source=("a trainer", 0))
        probe = [bench.prompts(1, seed=37, longest=60)[0]]
        engine.generate(probe, SamplingParams(max_tokens=1))  # fills whatever prefix cache there is
        for version in (1, 2):
            own = base if version == 1 else dataclasses.replace(base, buckets=_is_not_needed)
            with adapted(trainer, own, version) as update:
                engine.update_weights(update)
                assert_close(
                    engine.score(probe)[0], oracle_scores(bench, trainer, probe)[0], "score is not the policy's"
                )
                engine.generate(probe, SamplingParams(max_tokens=1))
        assert engine.policy_version == 2
        with adapted(trainer, own, 3) as update:
            _kept_tokens_are_the_new_policys(bench, engine, trainer, update)
        before = engine.score(probe)
        with adapted(trainer, own, 4, rank=8) as update:
            try:
                engine.update_weights(update)
            except WeightUpdateError as error:
                assert "lora_rank=8" in str(error)
            else:
                raise AssertionError("adapters of a rank over the engine's were accepted")
        assert engine.score(probe) == before, "a refused update changed the policy"
        engine.update_weights(dataclasses.replace(trainer.export_weights(), version=5))
        assert_close(engine.score(probe)[0], oracle_scores(bench, trainer, probe)[0], "adapters are left over")


def kept(update: WeightUpdate) -> WeightUpdate:
    """The same, with the bytes of now."""
    copies = [{name: tensor.clone() for name, tensor in bucket.items()} for bucket in update.buckets()]
    return dataclasses.replace(update, buckets=lambda: iter(copies))


@contextmanager
def adapted(trainer: object, base: WeightUpdate, version: int, rank: int = 4) -> Iterator[WeightUpdate]:
    """Random adapters over a reference trainer's network, whose weights are the merged ones within this block."""
    generator = torch.Generator().manual_seed(version)
    weights, scale = dict(trainer._network.named_parameters()), 1.5  # type: ignore[attr-defined]
    parts: dict[str, torch.Tensor] = {}
    chosen = [name for name in weights if name.endswith(("q_proj.weight", "o_proj.weight", "up_proj.weight"))]
    before = {name: weights[name].detach().clone() for name in chosen}
    for name in chosen:
        (out, into), layer = weights[name].shape, name.removesuffix(".weight")
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((rank, into), (out, rank)))
        parts |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
        weights[name].data += scale * b @ a
    adapters = AdapterUpdate(rank=rank, alpha=scale * rank, base=base, weights=weight_update(parts, {}, version))
    try:
        yield dataclasses.replace(base, version=version, adapters=adapters, buckets=_is_not_needed)
    finally:
        for name, weight in before.items():
            weights[name].data.copy_(weight)


def _is_not_needed() -> NoReturn:
    raise AssertionError("weights were asked for that the engine has, or that adapters make up for")


@law(
    "I7",
    INFERENCE,
    needs=(Capability.SLEEP, Capability.SCORE),
    refused=lambda bench: bench.shared_engine.sleep(),
)
def sleep_changes_nothing(bench: Bench) -> None:
    """Sleep and wake change nothing that can be observed but memory."""
    engine, probe = bench.engine(), bench.prompts(3, seed=29)
    before = engine.score(probe)
    engine.sleep()
    engine.wake_up()
    assert engine.score(probe) == before


@law("I8", INFERENCE)
def a_bad_request_is_refused_alone(bench: Bench) -> None:
    """Bad requests are `InvalidRequest` with limit and value; their neighbours and the engine live on."""
    engine = bench.shared_engine
    good, vocabulary, limit = bench.prompts(1)[0], engine.model.vocab_size, engine.model.max_model_len
    params = SamplingParams(max_tokens=4, seed=0)
    bad: list[tuple[Sequence[int], str]] = [
        ((), "empty"),
        ((1, vocabulary), str(vocabulary - 1)),
        ((-1,), "-1"),
        ((9,) * limit, str(limit)),
    ]
    for prompt, told in bad:
        first, refused, last = engine.generate(
            [Prompt(token_ids=tuple(p)) for p in (good, prompt, good)], params, return_exceptions=True
        )
        assert isinstance(refused, InvalidRequest) and told in str(refused), f"{prompt[:3]}: {refused!r}"
        assert first.token_ids == last.token_ids and len(first.token_ids) >= 1
    for wrong in ({"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"n": 0}):
        try:
            SamplingParams(**wrong)
        except InvalidRequest as error:
            assert next(iter(wrong)) in str(error)
        else:
            raise AssertionError(f"{wrong} was accepted")


@law("I9", INFERENCE)
def close_is_final(bench: Bench) -> None:
    """Close twice, and use after close is `EngineClosed`; a call in flight ends with it too."""
    before = leftovers()
    engine, prompt = bench.engine(), bench.prompts(1)[0]

    async def scenario() -> BaseException | list[Completion]:
        call = asyncio.ensure_future(engine.agenerate(prompt, SamplingParams(max_tokens=50, ignore_eos=True)))
        while not engine.running:
            await asyncio.sleep(0)
        engine.close()
        return (await asyncio.gather(call, return_exceptions=True))[0]

    assert isinstance(asyncio.run(scenario()), EngineClosed)
    engine.close()
    assert not leftovers() - before, f"close left behind: {leftovers() - before}"
    for use in (lambda: engine.generate([prompt]), lambda: engine.score([prompt])):
        try:
            use()
        except EngineClosed:
            continue
        raise AssertionError("a closed engine still answers")


@law("I10", INFERENCE)
def the_process_is_left_as_found(bench: Bench) -> None:
    """Environment, default dtype, thread count, signal handlers and global RNG are as before."""
    import numpy as np

    def found() -> tuple[object, ...]:
        return (
            dict(os.environ),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
            torch.random.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # type: ignore[index]
        )

    before = found()
    with bench.engine() as engine:
        engine.generate(bench.prompts(2), SamplingParams(max_tokens=3))
    changed = [now != then for now, then in zip(found(), before, strict=True)]
    names = ("environment", "default dtype", "threads", "grad mode", "signal handlers", "torch RNG", "numpy RNG")
    effects = [name for name, differs in zip(names, changed, strict=True) if differs]
    declared = " ".join(bench.spec.process_effects)
    assert all(name in declared for name in effects), f"changed and not declared in process_effects: {effects}"


def leftovers() -> set[str]:
    """Child processes and shared-memory segments of this machine now; empty where the system does not tell."""
    children = [Path(f"/proc/{os.getpid()}/task/{task.name}/children") for task in Path("/proc/self/task").glob("*")]
    pids = {f"process {pid}" for file in children if file.exists() for pid in file.read_text().split()}
    return pids | {f"segment {entry.name}" for entry in Path("/dev/shm").glob("*")}


# -- helpers -----------------------------------------------------------------------------------------------------


async def collect(engine: InferenceEngine, prompt: Sequence[int], params: SamplingParams) -> list[Delta]:
    """All deltas of one stream."""
    return [delta async for delta in engine.stream(prompt, params)]


def assert_log_probs(bench: Bench, c: Completion, temperature: float) -> None:
    """The completion's log-probs are the oracle's for its own tokens."""
    table = bench.log_probs((*c.prompt_token_ids, *c.token_ids), temperature)[len(c.prompt_token_ids) - 1 :]
    assert_close(c.log_probs, table.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0].tolist())


def assert_close(a: Sequence[float], b: Sequence[float], says: str = "log-probs differ") -> None:
    """Equal within law I2's tolerance."""
    assert len(a) == len(b), f"{says}: {len(a)} and {len(b)} values"
    gap = max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
    assert gap <= FP32_LOG_PROB, f"{says}: by up to {gap:.2e} nats"


def near_tie(bench: Bench, alone: Sequence[Completion], together: Sequence[Completion]) -> bool:
    """True if each pair differs first where the oracle's best two are within GAP."""
    for a, b in zip(alone, together, strict=False):
        place = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
        if place is not None:
            ids = (*a.prompt_token_ids, *a.token_ids[: place + 1])
            best = bench.log_probs(ids)[-1, : bench.sampleable].topk(2).values
            if float(best[0] - best[1]) > GAP:
                return False
    return True


@torch.no_grad()
def move(trainer: object, scale: float) -> None:
    """Shift every weight of a reference trainer by noise of this scale."""
    generator = torch.Generator().manual_seed(int(scale * 1000))
    for parameter in trainer._network.parameters():  # type: ignore[attr-defined]
        parameter += scale * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def oracle_scores(bench: Bench, trainer: object, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of given tokens by a reference trainer's network, outside any engine."""
    scores = []
    for ids in rows:
        logits = trainer._network(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1]  # type: ignore[attr-defined]
        table = logits.float().log_softmax(-1)
        scores.append(table.gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0].tolist())
    return scores
