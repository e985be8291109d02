"""From a record to a `Prompt`: token ids for the engine, everything else for the reward function and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_adaptor.config import DataConfig
from verl_adaptor.errors import ConfigError, DataError, nearest
from verl_adaptor.samples import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class PromptEncoder:
    """Encodes the prompt field of records.

    A text is tokenised as it is, or, where `config.chat_template` says so, as one user message; a list of messages goes
    through the chat template; a list of ints is taken as token ids. `Prompt.info` is the record's other fields,
    ``prompt_text`` (exactly what the model sees, as text) and, where the template was used, ``messages``.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        has_template = bool(tokenizer is not None and tokenizer.chat_template)
        self.chat = has_template if config.chat_template is None else config.chat_template
        if self.chat and not has_template:
            raise ConfigError(
                "data.chat_template=true, but the tokenizer has no chat template; set it to null or false."
            )
        if config.system_prompt is not None and not self.chat:
            raise ConfigError(
                "data.system_prompt needs a chat template: the tokenizer has none, or data.chat_template is false; "
                "put the text into the prompts instead."
            )

    def __call__(self, record: Mapping[str, Any], *, where: str, group_id: str) -> Prompt | None:
        """The prompt, or None if it is overlong and ``config.overlong`` is ``drop``.

        Raises:
            DataError: the prompt field is missing, of no known kind, empty or overlong, or another field cannot be saved.
        """
        key = self.config.prompt_key
        if key not in record:
            raise DataError(f"{where}: no field {key!r} (data.prompt_key); {nearest(key, map(str, record))}.")
        info = {str(name): to_builtins(value, f"{where}: {name}") for name, value in record.items() if name != key}
        token_ids, about = self._encode(to_builtins(record[key], f"{where}: {key}"), where)
        if not token_ids:
            raise DataError(f"{where}: the prompt is empty; a model needs at least one token to go on from.")
        if len(token_ids) > self.config.max_prompt_tokens:
            if self.config.overlong == "drop":
                return None
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens="
                f"{self.config.max_prompt_tokens}; raise it, or set data.overlong=drop to leave such records out."
            )
        return Prompt(token_ids=tuple(token_ids), group_id=group_id, info=info | about)

    def _encode(self, prompt: Any, where: str) -> tuple[list[int], dict[str, Any]]:
        """Token ids, and what to tell the reward function about them."""
        if isinstance(prompt, str) and not self.chat:
            return list(self._tokenizer(where)(prompt)["input_ids"]), {"prompt_text": prompt}
        if isinstance(prompt, str):
            return self._conversation([{"role": "user", "content": prompt}], where)
        if isinstance(prompt, list) and all(isinstance(item, dict) and "role" in item for item in prompt):
            return self._conversation(prompt, where)
        if isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt):
            text = self.tokenizer.decode(prompt) if self.tokenizer is not None else " ".join(map(str, prompt))
            return prompt, {"prompt_text": text}
        raise DataError(
            f"{where}: the prompt is {str(prompt)[:80]!r}; it must be a text, a list of messages "
            "({'role': ..., 'content': ...}) or a list of token ids."
        )

    def _conversation(self, messages: Messages, where: str) -> tuple[list[int], dict[str, Any]]:
        tokenizer = self._tokenizer(where)
        if not self.chat:
            raise DataError(
                f"{where}: the prompt is a list of messages, but no chat template is used (data.chat_template="
                f"{self.config.chat_template}); give a model with one, or texts."
            )
        if not messages:
            return [], {}
        if self.config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        token_ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(token_ids), {"prompt_text": text, "messages": messages}

    def _tokenizer(self, where: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise DataError(f"{where}: the prompt is text, but the model has no tokenizer; give token ids.")
        return self.tokenizer


def to_builtins(value: Any, where: str) -> Any:
    """The value with only dicts, lists, strings, numbers, booleans and None in it, so that it can be saved as JSON.

    Raises:
        DataError: it holds something else, such as an image.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_builtins(inner, where) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtins(inner, where) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(to_builtins(inner, where) for inner in value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return to_builtins(value.tolist(), where)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    for kind in (str, bool, int, float):  # subclasses
        if isinstance(value, kind):
            return kind(value)
    raise DataError(
        f"{where} holds a {type(value).__name__}, which cannot be saved with a run; convert it to text or numbers, or "
        "leave the field out."
    )
