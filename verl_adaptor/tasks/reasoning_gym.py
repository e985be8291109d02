"""Tasks of reasoning-gym: a hundred procedural generators, each with its own verifier (arXiv 2505.24760)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_adaptor.errors import BackendNotInstalled, ConfigError, DataError, UnknownKey, nearest
from verl_adaptor.protocols.requests import mix_seed
from verl_adaptor.samples import Trajectory

logger = logging.getLogger(__name__)

GYM = "reasoning_gym:"
CHUNK = 500
"""Questions of one dataset object (the generator's own default); the next chunk has another seed."""
HELD_OUT_EVERY = 8
"""One question in so many is held out, chosen by a checksum of its text: no seed can bring it into training."""
TRIES = 50
"""Chunks in which held-out questions are looked for."""
MANAGED = ("seed", "size")


class ReasoningGymTask:
    r"""Endless fresh questions of one dataset, scored by the dataset itself.

    Args:
        name: a dataset of reasoning-gym, for example ``chain_sum``.
        instruction: put after each question, on a line of its own.
        messages: put before each question as the beginning of the conversation: a system message, worked examples.
        answer_pattern: a regular expression that finds the answer in the response: the first group (or all) of its
            last match, and nothing without a match; ``([^=]+)\Z`` is what follows the last ``=``. None takes the
            whole response. White space around the answer is cut.
        config: the dataset's own arguments, for example ``min_terms``.

    Raises:
        BackendNotInstalled: reasoning-gym is missing.
        ConfigError: no such dataset, or it refuses its arguments.
        UnknownKey: it has no such argument.
    """

    def __init__(
        self,
        name: str,
        *,
        instruction: str = "",
        messages: Sequence[Mapping[str, str]] = (),
        answer_pattern: str | None = None,
        **config: Any,
    ) -> None:
        self.name = name
        self.config = config
        self.instruction = instruction
        listed = isinstance(messages, Sequence)
        if not listed or any(not isinstance(m, Mapping) or set(m) != {"role", "content"} for m in messages):
            raise ConfigError(
                f"data.args.messages={messages!r}: must be a list, and each of it have exactly a role and a content."
            )
        self.messages = [dict(message) for message in messages]
        _check(name, config)
        try:
            self._pattern = re.compile(answer_pattern, re.DOTALL) if answer_pattern is not None else None
        except re.error as error:
            raise ConfigError(
                f"data.args.answer_pattern={answer_pattern!r} is no regular expression: {error}."
            ) from error
        # a response is scored against the entry it answers: made once while it is fresh, made again after a resume
        self._chunk = functools.lru_cache(maxsize=4)(self._make_chunk)
        self._entry = functools.lru_cache(maxsize=4096)(lambda seed, index: self._chunk(seed)[index])
        self._complained = False

    def train_records(self, seed: int) -> Iterator[dict[str, Any]]:
        """Endless questions, none of them held out."""
        for chunk in itertools.count():
            record = None
            for record in self._records(mix_seed(mix_seed(seed, chunk), 1), held_out=False):
                yield record
            if record is None:
                raise DataError(f"{GYM}{self.name}: every question is held out; it makes too few different ones.")

    def eval_records(self, count: int) -> list[Mapping[str, Any]]:
        """`count` different held-out questions, the same ones whatever the run's seed; fewer where there are not as many.

        Raises:
            DataError: there is none.
        """
        found: dict[str, Mapping[str, Any]] = {}
        for chunk in range(TRIES + count * HELD_OUT_EVERY // CHUNK):
            for record in self._records(mix_seed(chunk, 0), held_out=True):
                if any(record["question"] in message["content"] for message in self.messages):
                    continue  # its answer is given away
                found.setdefault(record["question"], record)
                if len(found) == count:
                    return list(found.values())
        if not found:
            raise DataError(f"{GYM}{self.name}: no question is held out; it makes too few different ones.")
        logger.warning("%s%s has only %d held-out questions with %s.", GYM, self.name, len(found), self.config)
        return list(found.values())

    def score(self, trajectories: Sequence[Trajectory]) -> list[float | list[float]]:
        """The dataset's verdict on each response, usually between 0 and 1."""
        return [self._score(t) for t in trajectories]

    def extract(self, response: str) -> str:
        """The answer in a response."""
        if self._pattern is not None:
            matches = list(self._pattern.finditer(response))
            response = matches[-1][1 if self._pattern.groups else 0] or "" if matches else ""
        return response.strip()

    def _score(self, trajectory: Trajectory) -> float:
        seed, index = (trajectory.info[key] for key in ("entry_seed", "entry_index"))
        dataset, entry = self._chunk(seed), self._entry(seed, index)
        try:
            return float(dataset.score_answer(self.extract(trajectory.text), entry))
        except Exception as error:  # some verifiers stumble over an answer that is no number, say: then it is wrong
            if not self._complained:
                logger.warning("%s%s could not parse an answer (%r); such answers score 0.", GYM, self.name, error)
            self._complained = True
            return 0.0

    def _records(self, seed: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
        """A chunk's questions of one side of the split, each once."""
        seen: set[str] = set()
        seed %= 2**31  # what every dataset takes
        for index in range(CHUNK):
            try:
                entry = self._entry(seed, index)
            except IndexError:  # some run out of questions
                return
            question = entry["question"]
            if question not in seen and (zlib.crc32(question.encode()) % HELD_OUT_EVERY == 0) == held_out:
                seen.add(question)
                yield self._record(entry, seed, index)

    def _record(self, entry: Mapping[str, Any], seed: int, index: int) -> dict[str, Any]:
        """Built-ins only: the entry itself may hold tuples that its verifier compares, so it is kept by number."""
        question = str(entry["question"])
        content = f"{question}\n{self.instruction}" if self.instruction else question
        prompt = [*self.messages, {"role": "user", "content": content}] if self.messages else content
        answer = None if entry["answer"] is None else str(entry["answer"])
        return {"prompt": prompt, "question": question, "answer": answer, "entry_seed": seed, "entry_index": index}

    def _make_chunk(self, seed: int) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(self.name, seed=seed, size=CHUNK, **self.config)


def _check(name: str, config: Mapping[str, Any]) -> None:
    """Raise unless there is such a dataset and it takes this configuration."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise BackendNotInstalled(
            f"task reasoning_gym:{name} needs reasoning-gym, which is not installed ({error}); "
            "pip install 'verl-adaptor[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"data.task: reasoning-gym has no dataset {name!r}; {nearest(name, DATASETS)}.")
    fields = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in MANAGED]
    for key in config:
        if key in MANAGED:
            raise ConfigError(f"data.args.{key}: questions are endless and seeded by the run; leave it out.")
        if key not in fields:
            known = nearest(key, [*fields, "instruction", "messages", "answer_pattern"])
            raise UnknownKey(f"data.args.{key}: unknown argument of reasoning_gym:{name}; {known}.")
    try:
        reasoning_gym.create_dataset(name, seed=0, size=1, **config)
    except Exception as error:
        raise ConfigError(f"data.args: reasoning_gym:{name} refuses {dict(config)}: {error}") from error
