"""Endless, shuffled, resumable: the prompts of a run, one after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verl_adaptor.config import DataConfig
from verl_adaptor.data.encode import PromptEncoder
from verl_adaptor.data.records import Record, Records, open_path, open_records
from verl_adaptor.data.streams import Stream
from verl_adaptor.errors import ConfigError, DataError
from verl_adaptor.protocols.requests import mix_seed
from verl_adaptor.samples import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_adaptor.tasks import Task

Encode = Callable[..., Prompt | None]
"""``(record, where=..., group_id=...) -> Prompt``, or None for a record to leave out."""
GIVE_UP_AFTER = 100_000
"""Records left out in a row before an endless source is taken for one that will never give a prompt."""


def open_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    seed: int,
    held_out: int,
    task: Task | None = None,
) -> tuple[PromptSource, list[Prompt]]:
    """The training prompts of a run and its held-out ones.

    The held-out prompts are the task's own, or the first `held_out` records of ``config.eval_path``. With neither, they
    are the first `held_out` records of the source. In each case training leaves out every record with a prompt
    that is held out. Nothing is read yet of a source that streams.

    Args:
        config: what to read.
        tokenizer: of the model that is trained; None where the prompts are token ids.
        seed: of the order.
        held_out: most held-out prompts; equal ones count once, so there may be fewer.
        task: the loaded ``config.task``.
    """
    records, encode = open_records(config, seed=seed, task=task), PromptEncoder(config, tokenizer)
    if task is not None:
        rows: Iterator[tuple[str, Record]] = (
            (f"task {config.task} held-out record {i}", r) for i, r in enumerate(task.eval_records(held_out))
        )
    else:
        rows = (open_path(config.eval_path) if config.eval_path else records).read(0)
    kept: dict[tuple[int, ...], Prompt] = {}
    for index, (where, record) in enumerate(itertools.islice(rows, held_out)):
        prompt = encode(record, where=where, group_id=f"held-out:{index}")
        if prompt is not None:
            kept.setdefault(prompt.token_ids, prompt)
    if not kept:
        raise DataError("there is no held-out prompt: the records are empty or all overlong; see the section data.")
    source = PromptSource(records, encode, seed=seed, shuffle_buffer=config.shuffle_buffer, exclude=frozenset(kept))
    return source, list(kept.values())


class PromptSource:
    """An endless iterator of prompts, epoch after epoch. A source that streams is one epoch; its next prompt is waited for.

    Shuffling is by blocks: `shuffle_buffer` records are read, put into random order and handed out before the next are
    read; each epoch has an order of its own. A source no longer than the buffer is thus shuffled fully. So the position
    is two numbers, memory is one buffer of records, and a resume is exact: it skips to the block (see `records` for what
    that costs) and reads at most one buffer again.

    Args:
        records: what to read.
        encode: makes a prompt of a record, or None to drop it.
        seed: of the order.
        shuffle_buffer: records held; 0 keeps the source's order.
        exclude: token ids of the prompts that are held out.
    """

    def __init__(
        self,
        records: Records,
        encode: Encode,
        *,
        seed: int,
        shuffle_buffer: int,
        exclude: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self._records, self._encode, self._exclude = records, encode, exclude
        self._identity = {"seed": seed, "shuffle_buffer": shuffle_buffer}
        self.epoch = 0
        self.index = 0
        """Records of this epoch that were handed out or left out."""
        self.dropped = 0
        """Overlong records left out so far."""
        self._stream: Iterator[Prompt] | None = None

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """The next prompt; its group_id is ``epoch:place in the source``.

        Raises:
            DataError: a record is bad, or there is no record to make a prompt of.
        """
        if self._stream is None:
            self._stream = self._prompts()
        try:
            return next(self._stream)
        except BaseException:
            self._stream = None  # a generator that raised is spent; the next call meets the same record again
            raise

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON can hold it."""
        return {"epoch": self.epoch, "index": self.index, "dropped": self.dropped, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where the source that made `state` stood.

        Raises:
            ConfigError: that source was shuffled with another seed or buffer, so this one cannot continue it.
        """
        for name, value in self._identity.items():
            if state[name] != value:
                raise ConfigError(
                    f"the saved data position was made with {name}={state[name]}, not {value}: the order would be another. "
                    "Resume with the old value, or start a new run."
                )
        self.epoch, self.index, self.dropped = state["epoch"], state["index"], state["dropped"]
        self._stream = None

    def close(self) -> None:
        """End the wait for a source that streams, in whatever thread; it cannot be read any more. Others need no end."""
        if isinstance(self._records, Stream):
            self._records.close()

    def _prompts(self) -> Iterator[Prompt]:
        """Prompts from the current position on, for ever."""
        fruitless = 0
        while True:
            begun = self.index
            for place, where, record in self._epoch(begun):
                prompt = self._encode(record, where=where, group_id=f"{self.epoch}:{place}")
                self.index += 1
                if prompt is not None and prompt.token_ids not in self._exclude:
                    fruitless = 0
                    yield prompt
                    continue
                self.dropped += prompt is None
                fruitless += 1
                if fruitless >= GIVE_UP_AFTER:
                    raise DataError(self._fruitless(f"of the last {fruitless} records"))
            if begun == 0 and fruitless >= self.index:
                raise DataError(self._fruitless(f"of the {self.index} records in epoch {self.epoch}"))
            self.epoch, self.index = self.epoch + 1, 0

    def _epoch(self, start: int) -> Iterator[tuple[int, str, Record]]:
        """(place, where, record) of this epoch in shuffled order, without the first `start` of that order."""
        size = max(1, self._identity["shuffle_buffer"])
        first = start // size * size
        rows = enumerate(self._records.read(self.epoch, first), first)
        skip = start - first
        for number in itertools.count(first // size):
            block = [(place, where, record) for place, (where, record) in itertools.islice(rows, size)]
            if len(block) < skip:
                raise DataError(
                    f"the saved data position is record {start} of epoch {self.epoch}, but there are only "
                    f"{first + len(block)}: the data has changed. Restore it, or start a new run."
                )
            if not block:
                return
            random.Random(mix_seed(mix_seed(self._identity["seed"], self.epoch), number)).shuffle(block)
            block.reverse()  # handed out from the end, so that a record is let go once it is out
            del block[len(block) - skip :]
            skip = 0
            while block:
                yield block.pop()

    def _fruitless(self, which: str) -> str:
        if self.index == 0:
            return (
                f"epoch {self.epoch} of the prompts has no records; fill the source (a generator must return a fresh "
                "iterable at each call)."
            )
        return (
            f"none {which} makes a prompt: {self.dropped} overlong ones were dropped (data.max_prompt_tokens) and the others "
            "are held out for evaluation; raise the limit, give data.eval_path, or lower evaluation.prompts."
        )
