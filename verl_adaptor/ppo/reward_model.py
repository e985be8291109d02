"""A reward model: a sequence classifier with one label, whose logit is the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_adaptor.errors import ModelError, RewardError
from verl_adaptor.ppo.reward import Scores, check_scores
from verl_adaptor.samples import Trajectory
from verl_adaptor.threads import in_daemon_thread


class SequenceClassificationReward:
    """Scores prompt and response with a model of its own.

    It reads text, tokenised by its own tokenizer: reward models rarely share the policy's vocabulary, and where they do,
    its special tokens and template may still differ. A conversation (``info["messages"]``) whose model has a chat template
    goes through that template, with the response as the assistant's turn; anything else is ``info["prompt_text"]``
    followed by the response. Nothing is trained here, so re-tokenising changes no log-prob.

    Args:
        path: a Hugging Face folder or hub id.
        batch_size: texts scored at a time; it changes speed and memory, not rewards.
        timeout_s: longest that all texts of one call may take.

    Raises:
        ModelError: the model cannot be loaded, has other than one label, a newly made head, or no way to pad.
    """

    def __init__(self, path: str | Path, *, batch_size: int = 16, timeout_s: float = 600.0) -> None:
        self.path = str(path)
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.path)
            self.model, loaded = AutoModelForSequenceClassification.from_pretrained(
                self.path, dtype="auto", output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(f"reward.model={self.path} cannot be loaded as a sequence classifier: {error}") from error
        if loaded["missing_keys"]:  # transformers would make these up at random and only warn
            raise ModelError(
                f"reward.model={self.path} has no weights for {', '.join(sorted(loaded['missing_keys']))}: it is no trained "
                "reward model. Give one that was saved with its classification head."
            )
        if self.model.config.num_labels != 1:
            raise ModelError(
                f"reward.model={self.path} has {self.model.config.num_labels} labels; a reward is one number."
            )
        self._set_padding()
        self.limit = min(
            self.tokenizer.model_max_length, getattr(self.model.config, "max_position_embeddings", None) or 2**62
        )
        self.model.eval().requires_grad_(False)
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")

    async def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """One reward a trajectory; computed in a thread.

        Raises:
            RewardError: a text is longer than the model takes, a reward is not finite, or there is none in time.
        """
        rows = [self._token_ids(trajectory, index) for index, trajectory in enumerate(trajectories)]
        try:
            async with asyncio.timeout(self.timeout_s):
                rewards = await in_daemon_thread(lambda: self._forward(rows), "reward")
        except TimeoutError as error:
            raise RewardError(
                f"reward.model={self.path} has not scored {len(rows)} trajectories within {self.timeout_s:g} s; raise "
                "reward.timeout_s, or take a smaller model."
            ) from error
        return check_scores(rewards, trajectories, self.path)

    def _set_padding(self) -> None:
        """Pad on the right, with a token that the model knows as padding: it reads the last token before that."""
        self.tokenizer.padding_side = "right"
        if self.tokenizer.pad_token_id is None:
            if self.tokenizer.eos_token_id is None:
                raise ModelError(
                    f"reward.model={self.path}: its tokenizer has neither a pad nor an eos token; set one."
                )
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def _token_ids(self, trajectory: Trajectory, index: int) -> list[int]:
        messages = trajectory.info.get("messages")
        if messages and self.tokenizer.chat_template:
            answer = {"role": "assistant", "content": trajectory.text}
            token_ids = self.tokenizer.apply_chat_template([*messages, answer], return_dict=False)
        else:
            if "prompt_text" not in trajectory.info:
                raise RewardError(
                    f"reward.model={self.path}, trajectory {index}: its info has no 'prompt_text'; a rollout function must "
                    "pass prompt.info on."
                )
            token_ids = self.tokenizer(trajectory.info["prompt_text"] + trajectory.text)["input_ids"]
        if not 0 < len(token_ids) <= self.limit:
            raise RewardError(
                f"reward.model={self.path}, trajectory {index}: {len(token_ids)} tokens, but it takes 1 to {self.limit}; "
                "lower data.max_prompt_tokens or rollout.max_tokens."
            )
        return list(token_ids)

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Rewards in the order of the rows, which are scored longest first so that a batch pads little."""
        rewards = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = self.tokenizer.pad({"input_ids": [rows[row] for row in chosen]}, return_tensors="pt")
            logits = self.model(**batch.to(self.model.device)).logits  # [b, 1]
            for row, reward in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                rewards[row] = reward
        return rewards
