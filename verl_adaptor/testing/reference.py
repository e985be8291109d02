"""The reference backend: the slowest right way, short enough to be checked by eye.

One sequence at a time, a whole forward for every token, no cache, no padding. The conformance suite compares others with
it and is itself proven on it; as a template for a backend of your own it shows each primitive at its plainest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor, nn

from verl_adaptor.backends.causal_lm import load_causal_lm, named_tensors
from verl_adaptor.backends.export import bucketed, fused_groups
from verl_adaptor.backends.heads import VALUE_HEAD_FILE
from verl_adaptor.backends.optimizer import schedule_factor
from verl_adaptor.batch import aggregate
from verl_adaptor.capabilities import FULL, BackendSpec, Capability
from verl_adaptor.config import Config, EngineConfig, TrainerConfig
from verl_adaptor.errors import CheckpointError, NonFiniteGradient
from verl_adaptor.protocols import (
    Denominators,
    EngineModel,
    InferenceEngine,
    LogProbs,
    Loss,
    SampleRequest,
    TrainerBackend,
)
from verl_adaptor.samples import Delta, TensorMeta, WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer

SPEC = BackendSpec(
    name="reference",
    summary="the slowest right way; for tests",
    engine="verl_adaptor.testing.reference:ReferenceEngine",
    trainer="verl_adaptor.testing.reference:ReferenceTrainer",
    distribution="transformers",
    install="pip install transformers",
    capabilities={
        Capability.STREAM: FULL,
        Capability.ABORT: FULL,
        Capability.SCORE: FULL,
        Capability.UPDATE_WEIGHTS: FULL,
        Capability.IN_FLIGHT_KEEP: FULL,
        Capability.VALUE_HEAD: FULL,
        Capability.EXACT_RESUME: FULL,
        Capability.SAVE_PRETRAINED: FULL,
    },
)


class ReferenceEngine(InferenceEngine):
    """Generates by recomputing everything for every token."""

    def __init__(
        self, path: str, config: EngineConfig, options: Config | None = None, spec: BackendSpec = SPEC
    ) -> None:
        super().__init__(path, config, options, spec)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        self._network: nn.Module = load_causal_lm(
            path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=config.trust_remote_code
        )
        self._tensors, tied = named_tensors(self._network)
        eos = self._network.config.eos_token_id
        self.model = EngineModel(
            vocab_size=self._network.config.vocab_size,
            max_model_len=config.max_model_len or self._network.config.max_position_embeddings,
            eos_token_ids=tuple(eos if isinstance(eos, list) else [eos] if eos is not None else []),
            tensors={name: tuple(tensor.shape) for name, tensor in self._tensors.items()},
            tied=tied,
        )
        self._running: dict[tuple[str, int], tuple[SampleRequest, torch.Generator]] = {}

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            self._running[sample.key] = sample, torch.Generator().manual_seed(sample.seed)

    def _step(self) -> list[Delta]:
        deltas = [self._next_token(sample, generator) for sample, generator in self._running.values()]
        self._drop([(d.request_id, d.index) for d in deltas if d.finish_reason])
        return deltas

    @torch.no_grad()
    def _next_token(self, sample: SampleRequest, generator: torch.Generator) -> Delta:
        params = sample.params
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        logits = self._network(input_ids=ids, use_cache=False).logits[0, -1].float()
        log_probs = (logits / (params.temperature or 1.0)).log_softmax(-1)
        known = log_probs[: len(self.tokenizer)] if self.tokenizer else log_probs  # the vocabulary may be padded (C18)
        if params.temperature == 0:
            token = int(known.argmax())
        else:
            token = int(torch.multinomial(cut(known.exp(), params.top_k, params.top_p), 1, generator=generator))
        stopped = token in sample.stop_token_ids
        full = len(sample.token_ids) + 1 == params.max_tokens
        return Delta(
            request_id=sample.request_id,
            index=sample.index,
            token_ids=(token,),
            log_probs=(float(log_probs[token]),),
            finish_reason="stop" if stopped else "length" if full else None,
        )

    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        for key in keys:
            self._running.pop(key, None)

    @torch.no_grad()
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        rows = []
        for ids in token_ids:
            logits = self._network(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
            log_probs = (logits / temperature).log_softmax(-1)
            rows.append(log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
        return rows

    @torch.no_grad()
    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        for name, tensor in bucket.items():
            self._tensors[name].copy_(tensor)

    def _release(self) -> None:
        self._running.clear()
        self._tensors = {}
        self._network = nn.Module()


def cut(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[V] probabilities with all but the k likeliest, then all but the nucleus, set to 0."""
    ordered, order = probs.sort(descending=True)
    if top_k:
        ordered[top_k:] = 0
    ordered[ordered.cumsum(-1) - ordered >= top_p * ordered.sum()] = 0
    return torch.zeros_like(probs).scatter(-1, order, ordered)


class ReferenceTrainer(TrainerBackend):
    """Trains with one row a micro-batch and AdamW."""

    def __init__(
        self, path: str, config: TrainerConfig, options: Config | None = None, spec: BackendSpec = SPEC
    ) -> None:
        super().__init__(path, config, options, spec)
        self._network = load_causal_lm(
            path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=config.trust_remote_code
        )
        self._head: nn.Linear | None = None
        if config.head == "value":
            with torch.random.fork_rng():
                torch.manual_seed(config.seed)
                self._head = nn.Linear(self._network.config.hidden_size, 1)
            saved = Path(path) / VALUE_HEAD_FILE
            if saved.is_file():
                self._head.load_state_dict(load_file(saved))
        self._steps = 0
        self._parameters = [*self._network.parameters(), *(self._head.parameters() if self._head else ())]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def _row(self, batch: TensorDict, row: int) -> dict[str, Tensor]:
        """Outputs [1, R] of one row, computed on its real tokens only."""
        real = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][real]
        width = batch["responses"].shape[1]
        in_response = int(real[-width:].sum())
        hidden_or_logits = self._network(
            input_ids=ids[None], use_cache=False, output_hidden_states=self._head is not None
        )
        spread = torch.zeros(1, width)
        if self._head is not None:
            values = self._head(hidden_or_logits.hidden_states[-1])[0, -in_response - 1 : -1, 0]
            return {"values": torch.cat([values, spread[0, in_response:]])[None]}
        logits = hidden_or_logits.logits[0, -in_response - 1 : -1].float() / batch["temperature"][row]
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(-1, ids[-in_response:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        pad = spread[0, in_response:]
        return {"log_probs": torch.cat([chosen, pad])[None], "entropy": torch.cat([entropy, pad])[None]}

    @torch.no_grad()
    def _compute_log_probs(self, batch: TensorDict) -> LogProbs:
        rows = [self._row(batch, row) for row in range(len(batch))]
        return LogProbs(torch.cat([r["log_probs"] for r in rows]), torch.cat([r["entropy"] for r in rows]))

    @torch.no_grad()
    def _compute_values(self, batch: TensorDict) -> Tensor:
        return torch.cat([self._row(batch, row)["values"] for row in range(len(batch))])

    def _forward_backward(self, batch: TensorDict, loss: Loss, over: Denominators) -> dict[str, float]:
        total = 0.0
        sums: dict[str, tuple[float, float]] = {}
        for row in range(len(batch)):
            micro = batch[row : row + 1]
            try:
                out = loss(self._row(batch, row), micro)
            except Exception:
                self._optimizer.zero_grad()
                raise
            share = aggregate(
                out.per_token, micro["response_mask"], self.config.loss_aggregation, over, self.config.loss_scale_factor
            )
            share.backward()
            total += share.item()
            for name, (value, weight) in out.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + float(value), before[1] + float(weight)
        return {"loss": total} | {name: value / weight if weight else 0.0 for name, (value, weight) in sums.items()}

    def _optimizer_step(self) -> dict[str, float]:
        limit = self.config.max_grad_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit))
        finite = norm < float("inf")  # False for a NaN too
        learning_rate = self.config.learning_rate * schedule_factor(self._steps, self.config)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if finite:
            self._optimizer.step()
            self._steps += 1
        elif self.config.non_finite == "raise":
            self._optimizer.zero_grad()
            raise NonFiniteGradient(f"the gradient norm is {norm}; the weights were not touched.")
        self._optimizer.zero_grad()
        return {"grad_norm": norm, "learning_rate": learning_rate, "skipped": float(not finite)}

    def _export_weights(self) -> WeightUpdate:
        tensors, tied = named_tensors(self._network)

        def buckets() -> Iterator[dict[str, Tensor]]:
            for names in bucketed(dict.fromkeys(tensors, 1), 1):  # the smallest that keep fused groups whole
                yield {name: tensors[name].detach() for name in names}

        metas = tuple(
            TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        )
        fused = fused_groups(tensors)
        return WeightUpdate(version=self.policy_version, tensors=metas, buckets=buckets, tied=tied, fused_groups=fused)

    def _save_checkpoint(self, folder: Path) -> None:
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True)
        head = self._head.state_dict() if self._head else {}
        state = {"model": self._network.state_dict(), "head": head, "optimizer": self._optimizer.state_dict()}
        torch.save(state, partial / "state.pt")
        (partial / "manifest.json").write_text(
            json.dumps({"version": self._version, "changed": self._changed, "steps": self._steps})
        )
        partial.rename(folder)

    def _load_checkpoint(self, folder: Path) -> None:
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            state = torch.load(folder / "state.pt", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{folder} is no whole checkpoint ({error}).") from error
        self._network.load_state_dict(state["model"])
        if self._head is not None:
            self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._version, self._changed, self._steps = manifest["version"], manifest["changed"], manifest["steps"]

    def save_pretrained(self, folder: Path) -> None:
        """The model and its tokenizer."""
        self._network.save_pretrained(folder)
        if self._head is not None:
            save_file(self._head.state_dict(), folder / VALUE_HEAD_FILE)
        tokenizer = load_tokenizer(self.path, self.config.trust_remote_code)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _release(self) -> None:
        self._parameters = []
