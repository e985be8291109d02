"""Prompt sources: exact resume, bounded memory, equal readers, and errors that help."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_adaptor.config import DataConfig
from verl_adaptor.data import PromptEncoder, PromptSource, open_prompts
from verl_adaptor.data.records import open_path
from verl_adaptor.errors import ConfigError, DataError, UnknownKey
from verl_adaptor.samples import Prompt

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "user", "system", "assistant", "a", "b", "c"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def numbered(count: int) -> Any:
    """``data.generator`` of the tests: record i has the one-token prompt [i]."""
    return ({"prompt": [i], "answer": i} for i in range(count))


def nothing() -> list[dict[str, Any]]:
    return []


class Counted:
    """Records that count how many of them are alive at once, and how many were read."""

    def __init__(self, size: int) -> None:
        self.size, self.alive, self.most, self.read_count = size, 0, 0, 0

    def read(self, epoch: int, start: int = 0) -> Any:
        for i in range(start, self.size):
            self.read_count += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield f"record {i}", {"prompt": [i]}

    def encode(self, record: dict[str, Any], *, where: str, group_id: str) -> Prompt | None:
        self.alive -= 1
        return None if record["prompt"][0] % 5 == 4 else Prompt(token_ids=tuple(record["prompt"]), group_id=group_id)

    def source(self, buffer: int, seed: int = 0) -> PromptSource:
        return PromptSource(self, self.encode, seed=seed, shuffle_buffer=buffer, exclude=frozenset({(3,)}))


def take(source: PromptSource, count: int) -> list[Prompt]:
    return list(itertools.islice(source, count))


# -- position ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 40),
    buffer=st.integers(0, 50),
    stops=st.lists(st.integers(0, 90), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
def test_resume_is_exact(size: int, buffer: int, stops: list[int], seed: int) -> None:
    """Stopped anywhere, any number of times, a source goes on as if it had never been (T5, C10)."""
    whole = take(Counted(size).source(buffer, seed), sum(stops) + 60)
    pieces: list[Prompt] = []
    state = None
    for stop in [*stops, 60]:
        source = Counted(size).source(buffer, seed)
        if state is not None:
            source.load_state_dict(json.loads(json.dumps(state)))
        pieces += take(source, stop)
        state = source.state_dict()
    assert pieces == whole


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 60), buffer=st.integers(0, 70), seed=st.integers(0, 2**63 - 1))
def test_each_epoch_gives_each_record_once(size: int, buffer: int, seed: int) -> None:
    good = [i for i in range(size) if i % 5 != 4 and i != 3]  # Counted drops the one, the source excludes the other
    prompts = take(Counted(size).source(buffer, seed), 3 * len(good))
    for epoch in range(3):
        drawn = prompts[epoch * len(good) : (epoch + 1) * len(good)]
        assert sorted(p.token_ids[0] for p in drawn) == good
        assert {p.group_id for p in drawn} == {f"{epoch}:{i}" for i in good}


def test_order_is_shuffled_anew_in_each_epoch_and_for_each_seed() -> None:
    def orders(buffer: int, seed: int) -> tuple[tuple[int, ...], ...]:
        drawn = [p.token_ids[0] for p in take(Counted(50).source(buffer, seed), 78)]
        return tuple(drawn[:39]), tuple(drawn[39:])

    assert orders(0, 1)[0] == orders(0, 1)[1] == tuple(sorted(orders(0, 1)[0]))
    assert len({*orders(64, 1), *orders(64, 2), *orders(0, 1)}) == 5


@pytest.mark.parametrize("buffer", [0, 7, 32])
def test_no_more_than_a_buffer_is_held_or_read_again(buffer: int) -> None:
    records = Counted(1000)
    source = records.source(buffer)
    take(source, 500)
    assert records.most <= max(1, buffer)
    resumed = Counted(1000)
    again = resumed.source(buffer)
    again.load_state_dict(source.state_dict())
    take(again, 1)
    assert resumed.read_count <= 2 * max(1, buffer) + 5  # one buffer, and the records that are left out


def test_position_of_another_order_or_of_other_data_is_refused() -> None:
    state = {"epoch": 0, "index": 7, "dropped": 0, "seed": 0, "shuffle_buffer": 10}
    with pytest.raises(ConfigError, match="seed=0, not 1"):
        Counted(9).source(10, seed=1).load_state_dict(state)
    shrunk = Counted(5).source(10)
    shrunk.load_state_dict(state)
    with pytest.raises(DataError, match="the data has changed"):
        next(shrunk)


# -- readers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def same_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """600 records (more than two read batches), as each kind of file."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": [i, i + 1], "answer": {"value": i / 2, "tags": ["x"] * (i % 3)}} for i in range(600)]
    (folder / "d.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "d.parquet", row_group_size=270)
    datasets.Dataset.from_list(rows).save_to_disk(folder / "d")
    return {name: folder / name for name in ("d.jsonl", "d.parquet", "d")}


@pytest.mark.parametrize("start", [0, 1, 269, 270, 599, 600, 601])
def test_readers_agree_from_any_record_on(same_data: dict[str, Path], start: int) -> None:
    rows = [[record for _, record in open_path(path).read(0, start)] for path in same_data.values()]
    assert len(rows[0]) == max(0, 600 - start)
    assert rows[0] == rows[1] == rows[2]


def test_a_path_without_eval_path_holds_its_first_records_out(same_data: dict[str, Path]) -> None:
    config = DataConfig(path=same_data["d.parquet"], shuffle_buffer=100)
    train, held_out = open_prompts(config, None, seed=3, held_out=20)
    assert [p.info["answer"]["value"] for p in held_out] == [i / 2 for i in range(20)]
    epoch = take(train, 580)
    assert {p.token_ids for p in epoch} | {p.token_ids for p in held_out} == {(i, i + 1) for i in range(600)}
    assert max(Counter(p.group_id for p in epoch).values()) == 1
    assert epoch[0].info["prompt_text"] == " ".join(map(str, epoch[0].token_ids))


def test_eval_path_is_left_out_of_training(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text('{"prompt": [7]}\n{"prompt": [7]}\n{"prompt": [9]}\n', encoding="utf-8")
    config = DataConfig(generator=f"{__name__}:numbered", args={"count": 10}, eval_path=held, shuffle_buffer=4)
    train, held_out = open_prompts(config, None, seed=0, held_out=50)
    assert [p.token_ids for p in held_out] == [(7,), (9,)]
    assert {p.token_ids[0] for p in take(train, 80)} == set(range(10)) - {7, 9}


# -- encoding ----------------------------------------------------------------------------------------------------


def encoded(tokenizer: Any, prompt: Any, **config: Any) -> Prompt | None:
    encoder = PromptEncoder(DataConfig(task="t", **config), tokenizer)
    return encoder({"prompt": prompt, "answer": 1}, where="here", group_id="g")


def test_text_messages_and_ids(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = encoded(tokenizer, "a b")
    assert plain is not None and plain.token_ids == (4, 5)
    assert plain.info == {"answer": 1, "prompt_text": "a b"} and plain.group_id == "g"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    user = {"role": "user", "content": "a b"}
    chat = encoded(tokenizer, "a b", system_prompt="c")
    assert chat is not None and chat.token_ids == (2, 6, 1, 4, 5, 3)
    assert chat == encoded(tokenizer, [user], system_prompt="c")
    assert chat.info["messages"] == [{"role": "system", "content": "c"}, user]
    assert chat.info["prompt_text"] == "system c user a b assistant"
    assert encoded(tokenizer, "a b", chat_template=False) == plain
    ids = encoded(tokenizer, [6, 5])
    assert ids is not None and ids.token_ids == (6, 5) and ids.info["prompt_text"] == "c b"


def test_overlong_prompts_are_refused_or_counted(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here: the prompt has 3 tokens.*max_prompt_tokens=2.*overlong=drop"):
        encoded(tokenizer, "a b c", max_prompt_tokens=2)
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a " * n}) + "\n" for n in range(1, 6)), encoding="utf-8")
    config = DataConfig(path=path, max_prompt_tokens=3, overlong="drop", shuffle_buffer=0)
    train, held_out = open_prompts(config, tokenizer, seed=0, held_out=1)
    assert [len(p.token_ids) for p in (*held_out, *take(train, 3))] == [1, 2, 3, 2]
    assert train.dropped == 2


@pytest.mark.parametrize(
    ("config", "prompt", "error", "message"),
    [
        ({}, [{"role": "user", "content": "a"}], DataError, "no chat template is used"),
        ({"chat_template": True}, "a", ConfigError, "tokenizer has no chat template"),
        ({"system_prompt": "c"}, "a", ConfigError, "system_prompt needs a chat template"),
        ({}, "", DataError, "the prompt is empty"),
        ({}, 7, DataError, "must be a text"),
        ({}, [1, -2], DataError, "must be a text"),
        ({"prompt_key": "promt"}, "a", DataError, r"no field 'promt'.*did you mean 'prompt'.*answer, prompt"),
    ],
)
def test_what_is_no_prompt(tokenizer: Any, config: Any, prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        encoded(tokenizer, prompt, **config)


def test_info_that_cannot_be_saved_is_refused() -> None:
    encoder = PromptEncoder(DataConfig(task="t"), None)
    with pytest.raises(DataError, match="here: picture holds a PosixPath"):
        encoder({"prompt": [1], "picture": Path()}, where="here", group_id="g")


# -- errors ------------------------------------------------------------------------------------------------------


def drain(**config: Any) -> None:
    train, _ = open_prompts(DataConfig(**config), None, seed=0, held_out=2)
    take(train, 10)


def test_bad_files(tmp_path: Path) -> None:
    good = '{"prompt": [1]}\n{"prompt": [2]}\n'
    for name, text, message in [
        ("bad.jsonl", good + "\n{oops\n", r"bad.jsonl:4: not valid JSON"),
        ("list.jsonl", good + "[1]\n", r"list.jsonl:3: a record must be an object"),
        ("empty.jsonl", "\n", "no held-out prompt"),
        ("few.jsonl", good, "none of the 2 records in epoch 0 makes a prompt"),
        ("bad.parquet", "no parquet", "no readable parquet file"),
        ("data.csv", "prompt\n", r"suffix '\.csv'; readable are \.jsonl"),
    ]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            drain(path=tmp_path / name)
    with pytest.raises(DataError, match=r"does not exist; did you mean 'empty\.jsonl'"):
        drain(path=tmp_path / "emty.jsonl")
    with pytest.raises(DataError, match=r"not one written by datasets\.save_to_disk"):
        drain(path=tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": [1]}])}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match=r"several splits; give one of: .*dict/train"):
        drain(path=tmp_path / "dict")


def test_bad_generators() -> None:
    with pytest.raises(DataError, match="no held-out prompt"):
        drain(generator=f"{__name__}:nothing")
    with pytest.raises(DataError, match="returned int; it must return an iterable"):
        drain(generator=f"{__name__}:no_iterable")
    with pytest.raises(UnknownKey, match=r"data\.args\.cuont: unknown argument; did you mean 'count'"):
        drain(generator=f"{__name__}:numbered", args={"cuont": 3})
    with pytest.raises(ConfigError, match="missing a required argument: 'count'"):
        drain(generator=f"{__name__}:numbered")
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        drain(generator="no_such_module.inner:f")
    with pytest.raises(ConfigError, match=r"no 'numberd' there; did you mean 'numbered'"):
        drain(generator=f"{__name__}:numberd")
    with pytest.raises(DataError, match=r"none of the last .* records makes a prompt"):
        drain(generator=f"{__name__}:always_the_same")  # endless, and all of it is held out


def no_iterable() -> int:
    return 3


def always_the_same() -> Any:
    return itertools.repeat({"prompt": [1]})
