"""Streaming prompt sources with a resumable position.

    train, held_out = open_prompts(config.data, tokenizer, seed=0, held_out=200, task=task)
    prompt = next(train)                # endless, epoch after epoch, or as records come
    state = train.state_dict()          # a few numbers; a source that loads it goes on exactly here

`records` reads files, tasks and generators; `streams` and `served` what has no end; `encode` makes token ids of a record;
`source` shuffles and keeps the place.
"""

from verl_adaptor.data.encode import PromptEncoder
from verl_adaptor.data.records import Records, open_records
from verl_adaptor.data.source import PromptSource, open_prompts

__all__ = ["PromptEncoder", "PromptSource", "Records", "open_prompts", "open_records"]
