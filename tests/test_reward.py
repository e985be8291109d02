"""Rewards: whatever scores, one finite number for each trajectory or an error that says where."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from verl_adaptor.config import RewardConfig
from verl_adaptor.errors import ConfigError, ModelError, RewardError, UnknownKey
from verl_adaptor.ppo.reward import Reward, RewardFunction, load_reward
from verl_adaptor.samples import Trajectory


def trajectory(text: str = "", mask: Sequence[int] = (1, 0, 1), **info: Any) -> Trajectory:
    return Trajectory(
        prompt_ids=(1,),
        response_ids=(2,) * len(mask),
        response_mask=tuple(mask),
        rollout_log_probs=(0.0,) * len(mask),
        finish_reason="stop",
        info=info,
        text=text,
    )


TWO = [trajectory("a"), trajectory("bb")]


def run(reward: Reward, trajectories: Sequence[Trajectory] = TWO) -> Any:
    return asyncio.run(reward.score(trajectories))


def lengths(trajectories: Sequence[Trajectory], scale: float = 1.0) -> list[float]:
    return [scale * len(t.text) for t in trajectories]


async def async_lengths(trajectories: Sequence[Trajectory]) -> list[float]:
    assert threading.current_thread() is threading.main_thread()
    await asyncio.sleep(0)
    return lengths(trajectories)


class Callable_:
    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return await async_lengths(trajectories)


CALLABLE = Callable_()


# -- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lengths, [1.0, 2.0]),
        (async_lengths, [1.0, 2.0]),
        (CALLABLE, [1.0, 2.0]),
        (lambda ts: async_lengths_in_thread(ts), [1.0, 2.0]),
        (lambda ts: [True, False], [1.0, 0.0]),
        (lambda ts: np.array([0.5, 1]), [0.5, 1.0]),
        (lambda ts: [np.float32(0.5), torch.tensor(1)], [0.5, 1.0]),
        (lambda ts: [[1, 2], 0.5], [[1.0, 2.0], 0.5]),
        (lambda ts: torch.ones(2, 2), [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_rewards_become_plain_floats(function: Callable[..., Any], expected: Any) -> None:
    rewards = run(RewardFunction(function))
    assert rewards == expected
    assert {type(r) for row in rewards for r in (row if isinstance(row, list) else [row])} == {float}


def async_lengths_in_thread(trajectories: Sequence[Trajectory]) -> Any:
    return async_lengths(trajectories)  # a plain function that returns a coroutine


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned a NoneType; it must return a list"),
        ([1.0], "returned 1 rewards for 2 trajectories"),
        ([1.0, float("nan")], "trajectory 1: the reward is nan"),
        ([float("inf"), 1.0], "trajectory 0: the reward is inf"),
        ([1.0, "good"], "trajectory 1: 'good' is a str"),
        ([1.0, None], "trajectory 1: None is a NoneType"),
        ([1.0, [1.0, 2.0, 3.0]], "trajectory 1: 3 token rewards for 2 sampled tokens"),
        ([[1.0, float("nan")], 1.0], "trajectory 0, token 1: the reward is nan"),
        ({"a": 1, "b": 2}, "returned a dict"),
        ("ab", "returned a str"),
    ],
)
def test_what_is_no_reward(answer: Any, message: str) -> None:
    with pytest.raises(RewardError, match=f"reward function mine.*{message}"):
        run(RewardFunction(lambda ts: answer, name="mine"))


def test_an_exception_names_the_function_and_is_kept() -> None:
    def broken(trajectories: Sequence[Trajectory]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(RewardError, match=r"broken raised KeyError: 'answer'") as caught:
        run(RewardFunction(broken))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_slow_function_does_not_hold_up_the_loop() -> None:
    release = threading.Event()

    def slow(trajectories: Sequence[Trajectory]) -> list[float]:
        assert release.wait(30)
        return [0.0, 0.0]

    async def both() -> Any:
        scoring = asyncio.create_task(RewardFunction(slow).score(TWO))
        await asyncio.sleep(0)
        release.set()  # reached only if the loop goes on meanwhile
        return await scoring

    assert asyncio.run(both()) == [0.0, 0.0]


# -- choice ------------------------------------------------------------------------------------------------------


class OwnScorer:
    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [9.0 for _ in trajectories]


def test_who_scores() -> None:
    task: Any = OwnScorer()
    assert run(load_reward(RewardConfig(), task)) == [9.0, 9.0]
    config = RewardConfig(function=f"{__name__}:lengths", args={"scale": 3})
    assert run(load_reward(config, task)) == [3.0, 6.0]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, ConfigError, "nothing scores the responses"),
        ({"function": f"{__name__}:length"}, ConfigError, "did you mean 'lengths'"),
        ({"function": "no_such:f"}, ConfigError, "reward.function: there is no module 'no_such'"),
        ({"function": f"{__name__}:TWO"}, ConfigError, "is a list, not a function"),
        ({"function": f"{__name__}:lengths", "args": {"scala": 2}}, UnknownKey, "reward.args.scala.*'scale'"),
        ({"function": f"{__name__}:broken_signature"}, ConfigError, "too many positional arguments"),
        ({"args": {"scale": 2}}, ConfigError, "are for reward.function"),
        ({"model": "/no/such/folder"}, ModelError, "reward.model=/no/such/folder cannot be loaded"),
    ],
)
def test_wrong_choices(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_reward(RewardConfig(**config), None)


def broken_signature() -> None: ...


# -- reward models -----------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<eos>", "<unk>", "user", "assistant", *"abcdefgh"]
SMALL: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.4,
}


def save(folder: Path, model: PreTrainedModel, **tokens: str) -> str:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", **tokens)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("reward")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = LlamaConfig(**SMALL, num_key_value_heads=2, num_labels=1)
        decoder = LlamaForSequenceClassification(llama)
        encoder = BertForSequenceClassification(BertConfig(**SMALL, num_labels=1, pad_token_id=0))
        three = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3))
        causal = LlamaForCausalLM(llama)
    return {
        "decoder": save(root / "decoder", decoder, pad_token="<pad>"),
        "no pad": save(root / "no_pad", decoder),
        "encoder": save(root / "encoder", encoder, pad_token="<pad>"),
        "three": save(root / "three", three, pad_token="<pad>"),
        "causal": save(root / "causal", causal, pad_token="<pad>"),
    }


TEXTS = ["a", "b c d e f g h <eos>", "c c", "a b <eos>", "h g f", ""]


@pytest.mark.parametrize("kind", ["decoder", "no pad", "encoder"])
def test_a_reward_depends_on_its_own_text_alone(folders: dict[str, str], kind: str) -> None:
    """Batch size, padding and order change nothing (C05, C07)."""
    many = [trajectory(text, prompt_text="d e ") for text in TEXTS]
    alone = run(load_reward(RewardConfig(model=folders[kind], model_batch_size=1), None), many)
    batched = run(load_reward(RewardConfig(model=folders[kind], model_batch_size=4), None), many[::-1])[::-1]
    assert batched == pytest.approx(alone, abs=1e-5)
    assert len({round(reward, 3) for reward in alone}) == len(TEXTS)


def test_a_reward_model_reads_prompt_and_response(folders: dict[str, str]) -> None:
    reward: Any = load_reward(RewardConfig(model=folders["decoder"]), None)
    same = [trajectory("c d", prompt_text="a b "), trajectory(" d", prompt_text="a b c")]
    token_ids = torch.tensor([[WORDS.index(w) for w in "abcd"]])
    with torch.no_grad():
        expected = float(LlamaForSequenceClassification.from_pretrained(folders["decoder"])(token_ids).logits)
    assert run(reward, same) == pytest.approx([expected] * 2, abs=1e-5)
    reward.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    chat = trajectory("b", prompt_text="ignored", messages=[{"role": "user", "content": "a"}])
    assert run(reward, [chat]) == pytest.approx(
        run(reward, [trajectory("b", prompt_text="user a assistant ")]), abs=1e-5
    )


@pytest.mark.parametrize(("kind", "message"), [("three", "has 3 labels"), ("causal", r"no weights for score\.weight")])
def test_what_is_no_reward_model(folders: dict[str, str], kind: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_reward(RewardConfig(model=folders[kind]), None)


def test_a_text_too_long_for_the_reward_model(folders: dict[str, str]) -> None:
    reward = load_reward(RewardConfig(model=folders["decoder"]), None)
    with pytest.raises(RewardError, match="trajectory 1: 34 tokens, but it takes 1 to 32"):
        run(reward, [trajectory("a", prompt_text="a "), trajectory("a " * 33, prompt_text="a ")])
    with pytest.raises(RewardError, match="trajectory 0: its info has no 'prompt_text'"):
        run(reward, [trajectory("a")])


def test_a_reward_model_that_hangs_is_told(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    reward: Any = load_reward(RewardConfig(model=folders["decoder"], timeout_s=0.2), None)
    release = threading.Event()
    monkeypatch.setattr(reward.model, "forward", lambda **_: release.wait(30))
    with pytest.raises(RewardError, match=r"has not scored 1 trajectories within 0\.2 s; raise reward\.timeout_s"):
        run(reward, [trajectory("a", prompt_text="b ")])
    release.set()
