"""The tokenizer that lies in a model folder: what engines, saved models and the command line need of one."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from verl_adaptor.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None if it has none. A hub id's is fetched as transformers sees fit."""
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: its tokenizer cannot be loaded. transformers said: {said}") from error


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's pad id, else its EOS id. Only a filler: masks come from lengths, never from ids (C05)."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ModelError(
        f"{tokenizer.name_or_path}: the tokenizer has neither a pad nor an EOS token; set one "
        "(tokenizer.pad_token = ...; tokenizer.save_pretrained(folder))."
    )
