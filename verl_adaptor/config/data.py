"""Where prompts come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl_adaptor.config.base import (
    LONGEST_PAUSE_S,
    BackoffSeconds,
    Config,
    HttpUrl,
    ObjectPath,
    PositiveInt,
    Retries,
    Seconds,
    refuse_idle,
)
from verl_adaptor.errors import ConfigError


class DataConfig(Config):
    """Where prompts come from. Exactly one of path, task, generator and url.

    A path with `follow` and a url stream: they have no end and no epochs, the run waits for their records, and their
    order is kept. So they need `eval_path`, and their shuffle_buffer is 0. See docs/data.md.
    """

    path: Path | None = None
    """A ``.jsonl`` or ``.parquet`` file, or a folder written by `datasets.save_to_disk`."""
    follow: bool = False
    """The ``.jsonl`` file of path grows: wait for more lines at its end, and never begin again."""
    task: str | None = None
    """A task with its own scorer: ``digits``, ``reasoning_gym:NAME``, or ``package.module:factory``."""
    generator: ObjectPath | None = None
    """A function that returns an iterable of records."""
    args: dict[str, Any] = {}
    """Arguments of the task or the generator."""
    url: HttpUrl | None = None
    """A service that has records without an end: GET ``url?start=N&limit=M`` answers ``{"records": [...]}``, at most M
    from number N on; none: there are none yet."""
    limit: PositiveInt = 32
    """Most records that are asked for at a time, and so held."""
    retries: Retries = 5
    """How often a request to the url is repeated that found no service, no answer in time, or none that can be read."""
    backoff_s: BackoffSeconds = 1.0
    """Longest pause before the first repetition, in seconds, as for reward.backoff_s."""
    timeout_s: Seconds = 60.0
    """Longest wait for an answer of the url, in seconds; a service that holds requests back until there are records must
    answer an empty list before."""
    follow_timeout_s: Seconds = 86400.0
    """Longest wait for a record of a file that is followed, or of the url, in seconds; a longer silence is an error."""
    prompt_key: str = "prompt"
    """The record's field with the prompt: text, a list of chat messages, or token ids."""
    system_prompt: str | None = None
    """Put before a text prompt as a system message; needs a chat template."""
    chat_template: bool | None = None
    """Wrap text prompts as one user message. None: where the tokenizer has a template."""
    shuffle_buffer: Annotated[int, Field(ge=0)] = 1024
    """Records held for shuffling; 0 keeps the source's order. Left out, it is 0 for a source that streams, where the
    first prompt would wait for so many records; more is refused there."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens, after the chat template."""
    overlong: Literal["error", "drop"] = "error"
    """A longer prompt is an error, or dropped and counted."""
    eval_path: Path | None = None
    """Held-out records in the same format. A task brings its own; a source that streams cannot do without."""

    @property
    def streams(self) -> bool:
        """Whether records may be a long time coming, and have no end."""
        return self.follow or self.url is not None

    def longest_s(self, prompts: int) -> float:
        """Longest that this many prompts may be waited for, in seconds; 0 where the source does not stream."""
        if not self.streams:
            return 0.0
        asked = 0.0 if self.url is None else (self.retries + 1) * self.timeout_s + self.retries * LONGEST_PAUSE_S
        return prompts * (self.follow_timeout_s + asked)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        given = [name for name in ("path", "task", "generator", "url") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"give exactly one of path, task, generator and url; given: {', '.join(given) or 'none'}."
            )
        if self.args and (self.task or self.generator) is None:
            raise ConfigError(f"args={self.args!r} are for a task or a generator; with {given[0]} nobody reads them.")
        if self.task is not None and self.eval_path is not None:
            raise ConfigError(f"eval_path={str(self.eval_path)!r}: a task brings its own held-out records; delete it.")
        return self

    @model_validator(mode="after")
    def _all_read(self) -> DataConfig:
        url = dict.fromkeys(("limit", "retries", "backoff_s", "timeout_s"), ("data.url", self.url is not None))
        refuse_idle(self, {**url, "follow_timeout_s": ("data.follow or data.url", self.streams)})
        return self

    @model_validator(mode="after")
    def _can_stream(self) -> DataConfig:
        if not self.streams:
            return self
        problems = []
        if self.follow and (self.path is None or self.path.suffix != ".jsonl"):
            named = "not set" if self.path is None else repr(str(self.path))
            problems.append(f"follow=true is for a .jsonl file in data.path, which is {named}; name one, or delete it.")
        if "shuffle_buffer" not in self.model_fields_set:
            object.__setattr__(self, "shuffle_buffer", 0)  # frozen for others
        elif self.shuffle_buffer:
            problems.append(
                f"shuffle_buffer={self.shuffle_buffer}: the first prompt would wait for so many records of a source that "
                "streams; delete it, or set it to 0."
            )
        if self.eval_path is None:
            problems.append(
                "eval_path: null is not allowed for a source that streams: the run would wait for its first records to hold "
                "them out; name a file with held-out records."
            )
        if problems:
            raise ConfigError("\n".join(problems))
        return self
