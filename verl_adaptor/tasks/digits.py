"""The smallest honest end-to-end task: continue an arithmetic progression modulo ten.

    prompt     <bos> 3 5 7 =              2 to 5 digits of a progression, its step 1 to 9
    response   9 1 3 5 7 9 1 3 <eos>      the next 8 digits, then the end

The reward is the share of these nine tokens that are right before the first mistake, so it is dense enough to climb. Some
progressions (start and step) are held out: what is learnt is the rule, not the list. `build_model` makes a model that
has seen just enough to get about a third of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.errors import RewardError
from verl_adaptor.samples import Trajectory

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

TOKENS = (*"0123456789", "<pad>", "<bos>", "<eos>", "=", "<unk>", "<unused>")
"""Token of each id. A digit is its own id; sixteen, so that tensor parallelism can divide them."""
PAD, BOS, EOS, END_OF_PROMPT = (TOKENS.index(token) for token in ("<pad>", "<bos>", "<eos>", "="))
SHOWN = range(2, 6)
"""Digits in a prompt."""
CONTINUED = 8
"""Digits to continue."""
Progression = tuple[int, int, int]
"""Start, step and number of digits shown."""
ALL = [(start, step, shown) for step in range(1, 10) for start in range(10) for shown in SHOWN]
HELD_OUT = {(start % 10, step) for step in range(1, 10) for start in (7 * step + 1, 7 * step + 4)}
"""(start, step) of the progressions that training never shows: two of each step."""


class DigitsTask:
    """The task: 288 training prompts and 72 held-out ones, for the model of `build_model`."""

    def train_records(self, seed: int) -> Iterator[dict[str, Any]]:
        """All training prompts once, in an order of this seed."""
        chosen = [each for each in ALL if each[:2] not in HELD_OUT]
        random.Random(seed).shuffle(chosen)
        return map(record, chosen)

    def eval_records(self, count: int) -> list[Mapping[str, Any]]:
        """The first `count` of the 72 held-out prompts, in a fixed order that mixes steps and lengths."""
        held_out = [each for each in ALL if each[:2] in HELD_OUT]
        random.Random(0).shuffle(held_out)
        return [record(each) for each in held_out[:count]]

    def score(self, trajectories: Sequence[Trajectory]) -> list[float | list[float]]:
        """For each: right tokens before the first mistake, over the nine that are due; what follows them is ignored.

        Raises:
            RewardError: the prompt was not encoded with this task's tokenizer.
        """
        return [_score(trajectory) for trajectory in trajectories]


def record(progression: Progression) -> dict[str, Any]:
    """A record: the prompt, the digits shown, and the token ids that answer it."""
    start, step, shown = progression
    digits = [(start + i * step) % 10 for i in range(shown + CONTINUED)]
    prompt = " ".join(map(str, [*digits[:shown], "="]))
    return {"prompt": prompt, "shown": digits[:shown], "target": [*digits[shown:], EOS]}


def _score(trajectory: Trajectory) -> float:
    shown, target = trajectory.info["shown"], trajectory.info["target"]
    expected = (BOS, *shown, END_OF_PROMPT)
    if tuple(trajectory.prompt_ids) != expected:
        raise RewardError(
            f"the digits task knows the prompt {shown} as the ids {expected}, not {tuple(trajectory.prompt_ids)}: it needs "
            "the model and tokenizer that verl_adaptor.tasks.digits:build_model makes (model.build)."
        )
    right = 0
    for due, given in zip(target, trajectory.response_ids, strict=False):
        if due != given:
            break
        right += 1
    return right / len(target)


def build_model(
    folder: Path,
    seed: int,
    *,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    layers: int = 4,
    warm_start_steps: int = 200,
    slip: float = 0.25,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
) -> dict[str, Any]:
    """Make a small Llama with its tokenizer, teach it the task a little, and save both.

    The warm start imitates a demonstrator who slips now and then: so the model knows the rule, gets about a third of the
    reward, and still tries everything. The same seed makes the same model; the process's random state is left as it was.

    Args:
        folder: where to save; made if missing.
        seed: of weights and warm start.
        hidden_size: width.
        intermediate_size: width inside the feed-forward layers.
        layers: number of layers.
        warm_start_steps: supervised steps on training prompts.
        slip: probability that the demonstrator writes a random token instead of the right one.
        batch_size: prompts a warm-start step.
        learning_rate: of AdamW in the warm start.

    Returns:
        Facts for the summary: ``parameters``, ``warm_start_steps``, ``expected_reward`` on training prompts, ``seconds``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    begun = time.perf_counter()
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    prompts, answers = _examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(warm_start_steps):
        rows = torch.randint(len(prompts), (batch_size,), generator=generator)
        shown = _demonstrate(prompts[rows], answers[rows], slip, generator)
        log_probs = _answer_log_probs(model, prompts[rows], shown)
        loss = -log_probs.sum() / (shown != PAD).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():  # exactly: sum over j of p(the first j tokens are right) / 9
        expected = float(_answer_log_probs(model.eval(), prompts, answers).cumsum(-1).exp().mean())
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return {
        "parameters": model.num_parameters(),
        "warm_start_steps": warm_start_steps,
        "expected_reward": round(expected, 4),
        "seconds": round(time.perf_counter() - begun, 2),
    }


def _tokenizer() -> Any:
    """One token a word; ``<bos>`` is put first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    special = {name + "_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def _examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Training prompts, padded on the left [288, 7], and their answers [288, 9]."""
    import torch

    training = [record(each) for each in ALL if each[:2] not in HELD_OUT]
    width = 1 + SHOWN[-1] + 1
    prompts = [[BOS, *example["shown"], END_OF_PROMPT] for example in training]
    padded = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    return torch.tensor(padded), torch.tensor([example["target"] for example in training])


def _demonstrate(prompts: torch.Tensor, answers: torch.Tensor, slip: float, generator: torch.Generator) -> torch.Tensor:
    """[b, 9] answers of one who slips: a random digit, from which he then carries on, or an early end (then padding)."""
    import torch

    before, last = prompts[:, -3], prompts[:, -2]
    running = torch.ones(len(prompts), dtype=torch.bool)
    shown = torch.full_like(answers, PAD)
    for at in range(answers.shape[1]):
        due = (2 * last - before) % 10 if at < CONTINUED else answers[:, at]
        wrong = torch.randint(11, (len(prompts),), generator=generator)
        slips = torch.rand(len(prompts), generator=generator) < slip
        token = torch.where(slips, torch.where(wrong == 10, EOS, wrong), due)
        shown[:, at] = torch.where(running, token, PAD)
        running = running & (token != EOS)
        before, last = last, torch.where(token < 10, token, last)
    return shown


def _answer_log_probs(model: LlamaForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """[b, 9] log-probs of the answers' tokens; 0 at padding."""
    import torch

    input_ids = torch.cat([prompts, answers], dim=1)
    mask = (input_ids != PAD).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    log_probs = logits[:, prompts.shape[1] - 1 : -1].log_softmax(-1)
    return log_probs.gather(-1, answers[..., None])[..., 0] * (answers != PAD)
