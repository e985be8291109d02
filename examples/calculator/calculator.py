"""A two-turn task: choose the operator, let a calculator compute, repeat what it said.

    prompt   <bos> sum 3 4          the policy sees what is asked for
    turn 1   +                      sampled: response_mask 1
    tool     = 7                    observation: response_mask 0, so it neither earns nor is trained
    turn 2   7 <eos>                sampled: response_mask 1

Run it from this folder: ``verl-adaptor train calculator.yaml --output /tmp/calculator``. All a task of your own needs is
here: prompts, a rollout, a reward and (only because this one starts from nothing) a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_adaptor.protocols import InferenceEngine
from verl_adaptor.samples import Prompt, SamplingParams, Trajectory

TOKENS = ["<pad>", "<bos>", "<eos>", *"0123456789", "sum", "product", "+", "*", "="]
ID = {token: number for number, token in enumerate(TOKENS)}
OPERATIONS = {"sum": "+", "product": "*"}


def prompts(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless questions, each with its answer (modulo ten, so that it is one token)."""
    rng = random.Random(seed)
    while True:
        word, a, b = rng.choice(list(OPERATIONS)), rng.randrange(10), rng.randrange(10)
        yield {
            "prompt": [ID["<bos>"], ID[word], ID[str(a)], ID[str(b)]],
            "operator": OPERATIONS[word],
            "operands": [a, b],
        }


async def rollout(engine: InferenceEngine, prompt: Prompt, params: SamplingParams) -> Trajectory:
    """Turn, tool, turn. The tool's tokens get mask 0 and log-prob 0."""
    [first] = await engine.agenerate(prompt, params.replace(max_tokens=1))
    observation = (ID["="], ID[calculate(TOKENS[first.token_ids[0]], *prompt.info["operands"])])
    so_far = Prompt(token_ids=(*prompt.token_ids, *first.token_ids, *observation), info=prompt.info)
    [second] = await engine.agenerate(so_far, params.replace(max_tokens=2))
    return Trajectory(
        prompt_ids=prompt.token_ids,
        response_ids=(*first.token_ids, *observation, *second.token_ids),
        response_mask=(1, 0, 0, *(1 for _ in second.token_ids)),
        rollout_log_probs=(*first.log_probs, 0.0, 0.0, *second.log_probs),
        finish_reason=second.finish_reason,
        version_runs=(*first.version_runs, *second.version_runs),
        group_id=prompt.group_id,
        info=prompt.info,
        text=f"{first.text} {second.text}",
        temperature=params.temperature or 1.0,
    )


def calculate(operator: str, a: int, b: int) -> str:
    """The tool: the last digit of the result, 0 for what is no operator."""
    return str({"+": a + b, "*": a * b}.get(operator, 0) % 10)


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    """Half for the right operator, half for repeating what the tool said and stopping."""
    rewards = []
    for t in trajectories:
        operator, _, observed, *answer = t.response_ids
        right_operator = TOKENS[operator] == t.info["operator"]
        rewards.append(0.5 * right_operator + 0.5 * (answer == [observed, ID["<eos>"]]))
    return rewards


def build_model(folder: Path, seed: int, *, imitation_steps: int = 150) -> dict[str, Any]:
    """A 0.1 M-parameter Llama with this vocabulary that has seen the form of a dialogue, but guesses the operator."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(imitation_steps):
            rows = torch.tensor(careless_dialogues(64, seed * imitation_steps + step))
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    return {"parameters": model.num_parameters()}


def careless_dialogues(count: int, seed: int) -> list[list[int]]:
    """Dialogues of someone who picks the operator by chance and misreads the tool in one case of three."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        word, operator = rng.choice(list(OPERATIONS)), rng.choice("+*")
        a, b, observed, slip = (str(rng.randrange(10)) for _ in range(4))
        answer = slip if rng.random() < 1 / 3 else observed
        rows.append([ID[token] for token in ("<bos>", word, a, b, operator, "=", observed, answer, "<eos>")])
    return rows
