"""Tasks: fixed held-out prompts that training never shows, scorers that keep their word, models made on the spot."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_adaptor.config import DataConfig
from verl_adaptor.data import open_prompts
from verl_adaptor.errors import ConfigError, DataError, RewardError, UnknownKey
from verl_adaptor.samples import Trajectory
from verl_adaptor.tasks import load_task
from verl_adaptor.tasks.digits import BOS, EOS, PAD, TOKENS, DigitsTask, build_model

pytest.importorskip("reasoning_gym")

DIGITS = DigitsTask()


def answered(prompt: Any, *response: int, info: Any = None, text: str = "") -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(prompt),
        response_ids=response,
        response_mask=(1,) * len(response),
        rollout_log_probs=(0.0,) * len(response),
        finish_reason="stop" if response and response[-1] == EOS else "length",
        info=info,
        text=text,
    )


# -- digits ------------------------------------------------------------------------------------------------------


def digits_reward(record: dict[str, Any], *response: int) -> Any:
    [reward] = DIGITS.score([answered((BOS, *record["shown"], TOKENS.index("=")), *response, info=record)])
    return reward


@given(
    record=st.sampled_from([*DIGITS.train_records(0), *DIGITS.eval_records(100)]),
    right=st.integers(0, 8),
    off=st.integers(1, 15),
    after=st.lists(st.integers(0, 15), max_size=3),
)
def test_digits_reward_is_the_share_before_the_first_mistake(
    record: dict[str, Any], right: int, off: int, after: list[int]
) -> None:
    target = record["target"]
    step = (target[1] - target[0]) % 10
    assert [(b - a) % 10 for a, b in itertools.pairwise([*record["shown"], *target[:-1]])] == [step] * (
        len(record["shown"]) + 7
    )
    assert digits_reward(record, *target) == 1
    assert digits_reward(record, *target[:right]) == right / 9  # cut off: the EOS is among what is missing
    wrong = (target[right] + off) % 16
    assert digits_reward(record, *target[:right], wrong, *target[right + 1 :], *after) == right / 9


def test_digits_split() -> None:
    key = lambda r: (r["shown"][0], (r["target"][1] - r["target"][0]) % 10)  # noqa: E731
    train, held_out = list(DIGITS.train_records(0)), DIGITS.eval_records(1000)
    assert (len(train), len(held_out)) == (288, 72)
    assert not {key(r) for r in train} & {key(r) for r in held_out}
    assert DIGITS.eval_records(5) == held_out[:5]
    assert train != list(DIGITS.train_records(1)) and train == list(DIGITS.train_records(0))


def test_digits_with_a_foreign_tokenizer_is_refused() -> None:
    record = DIGITS.eval_records(1)[0]
    with pytest.raises(RewardError, match="needs the model and tokenizer"):
        DIGITS.score([answered((5, 6, 7), 1, info=record)])


def test_digits_model(tmp_path: Path) -> None:
    """Its prompts are what the scorer expects; the same seed is the same model; no random state is touched."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "layers": 2,
        "batch_size": 32,
        "slip": 0.0,
        "learning_rate": 5e-3,
    }
    before = torch.random.get_rng_state()
    raw = build_model(tmp_path / "raw", 1, warm_start_steps=0, **small)
    facts = [build_model(tmp_path / name, 1, warm_start_steps=40, **small) for name in "ab"]
    assert torch.equal(before, torch.random.get_rng_state())
    assert facts[0]["expected_reward"] == facts[1]["expected_reward"] > 2 * raw["expected_reward"]
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in "ab"]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, PAD, BOS, EOS}) == 3
    task = load_task("digits", {})
    train, held_out = open_prompts(DataConfig(task="digits"), tokenizer, seed=0, held_out=200, task=task)
    prompts = [*held_out, *itertools.islice(train, 288)]
    assert task.score([answered(p.token_ids, *p.info["target"], info=p.info) for p in prompts]) == [1.0] * 360


# -- reasoning-gym -----------------------------------------------------------------------------------------------

SUMS = {"max_terms": 2, "max_digits": 1}


def test_gym_never_trains_on_a_held_out_question() -> None:
    task = load_task("reasoning_gym:chain_sum", SUMS)
    held_out = [r["question"] for r in task.eval_records(12)]
    assert len(set(held_out)) == 12
    assert [r["question"] for r in load_task("reasoning_gym:chain_sum", SUMS).eval_records(6)] == held_out[:6]
    for seed in range(3):
        drawn = [r["question"] for r in itertools.islice(task.train_records(seed), 1000)]
        assert not set(drawn) & set(held_out)
        assert len(set(drawn)) > 100  # of the 200 sums there are, nearly all that are not held out
    assert drawn == [r["question"] for r in itertools.islice(task.train_records(2), 1000)]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "rearc", "prime_factorization", "list_functions"])
def test_gym_scores_with_the_dataset_also_after_a_restart(name: str) -> None:
    """What is kept of an entry survives JSON, and a task that never made it scores as the dataset does (T5)."""
    task = load_task(f"reasoning_gym:{name}", {})
    records = json.loads(json.dumps([*task.eval_records(3), *itertools.islice(task.train_records(1), 3)]))
    right = [answered((1,), info=r, text=f"  {r['answer']}\n") for r in records if r["answer"] is not None]
    wrong = [answered((1,), info=r, text="no idea") for r in records]
    fresh = load_task(f"reasoning_gym:{name}", {})
    assert fresh.score(right) == [1.0] * len(right)
    assert all(reward < 0.5 for reward in fresh.score(wrong) if not isinstance(reward, list))
    assert fresh.score(right + wrong) == task.score(right + wrong)


@pytest.mark.parametrize(
    ("pattern", "response", "answer"),
    [
        (None, "\n 7 ", "7"),
        (r"\A\s*([^\n]*)", " 7\nbecause", "7"),  # first line
        (r"([^=]+?)\.?\s*\Z", "3 + 4 = 7. ", "7"),  # after the last '='
        (r"<answer>(.*?)</answer>", "<answer>1</answer> no: <answer> 7\n</answer>", "7"),
        (r"<answer>(.*?)</answer>", "7", ""),
    ],
)
def test_gym_answer_pattern(pattern: str | None, response: str, answer: str) -> None:
    task: Any = load_task("reasoning_gym:chain_sum", {"answer_pattern": pattern})
    assert task.extract(response) == answer


def test_gym_prompts() -> None:
    [plain] = load_task("reasoning_gym:chain_sum", {}).eval_records(1)
    assert plain["prompt"] == plain["question"]
    [told] = load_task("reasoning_gym:chain_sum", {"instruction": "Be brief."}).eval_records(1)
    assert told["prompt"] == plain["question"] + "\nBe brief."
    shots = [{"role": "user", "content": plain["question"]}, {"role": "assistant", "content": str(plain["answer"])}]
    [after] = load_task("reasoning_gym:chain_sum", {"messages": shots}).eval_records(1)
    assert after["prompt"] == [*shots, {"role": "user", "content": after["question"]}]
    assert after["question"] != plain["question"]  # its answer was given away


# -- names -------------------------------------------------------------------------------------------------------


class NoTask:
    def score(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "args", "error", "message"),
    [
        ("digit", {}, ConfigError, "did you mean 'digits'"),
        ("digits", {"length": 3}, UnknownKey, "data.args.length"),
        ("reasoning_gym:chain_sums", {}, ConfigError, "did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"max_term": 3}, UnknownKey, "did you mean 'max_terms'"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, ConfigError, "refuses.*max_terms must be >="),
        ("reasoning_gym:chain_sum", {"seed": 3}, ConfigError, "seeded by the run"),
        ("reasoning_gym:chain_sum", {"answer_pattern": "("}, ConfigError, "no regular expression"),
        ("reasoning_gym:chain_sum", {"messages": [{"role": "user"}]}, ConfigError, "a role and a content"),
        ("reasoning_gym:chain_sum", {"messages": None}, ConfigError, "must be a list"),
        ("no_such_package:Task", {}, ConfigError, "no module 'no_such_package'"),
        (f"{__name__}:NoTask", {}, ConfigError, "lacks train_records, eval_records"),
        (f"{__name__}:NoTask", {"a": 1}, UnknownKey, r"data\.args\.a"),
    ],
)
def test_task_names_and_arguments(name: str, args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_task(name, args)


def test_gym_with_nothing_to_train_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_adaptor.tasks.reasoning_gym.HELD_OUT_EVERY", 1)
    with pytest.raises(DataError, match="every question is held out"):
        next(iter(load_task("reasoning_gym:chain_sum", SUMS).train_records(0)))
