"""The engine of ``template``: each primitive at its plainest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl_adaptor import BackendSpec, Delta, InferenceEngine
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.protocols import EngineModel, SampleRequest
from verl_adaptor.tokenizer import load_tokenizer


class TemplateEngine(InferenceEngine):
    """Generates on the CPU, one sequence at a time.

    Args:
        path: a Hugging Face folder.
        config: what is asked of every engine.
        options: this backend's own; it has none.
        spec: its declaration.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        self._network: nn.Module = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
        self._network.requires_grad_(False).eval()
        self._tensors = dict(self._network.named_parameters())  # what is tied is here once
        aliases = dict(self._network.named_parameters(remove_duplicate=False))
        names = {id(tensor): name for name, tensor in self._tensors.items()}
        facts = self._network.config
        eos = facts.eos_token_id
        self.model = EngineModel(
            vocab_size=facts.vocab_size,
            max_model_len=config.max_model_len or facts.max_position_embeddings,
            eos_token_ids=tuple(eos if isinstance(eos, list) else [eos] if eos is not None else []),
            tensors={name: tuple(tensor.shape) for name, tensor in self._tensors.items()},
            tied={alias: names[id(tensor)] for alias, tensor in aliases.items() if alias not in self._tensors},
        )
        self._running: dict[tuple[str, int], tuple[SampleRequest, torch.Generator]] = {}

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        """Take requests in, one record a sample. Each brings a seed: the same one gives the same tokens (law I4)."""
        for sample in samples:
            self._running[sample.key] = sample, torch.Generator().manual_seed(sample.seed)

    def _step(self) -> list[Delta]:
        """One step of everything that runs: new tokens, and the reason where a response has ended."""
        deltas = [self._next_token(sample, generator) for sample, generator in self._running.values()]
        self._drop([(delta.request_id, delta.index) for delta in deltas if delta.finish_reason])
        return deltas

    def _next_token(self, sample: SampleRequest, generator: torch.Generator) -> Delta:
        params = sample.params
        logits = self._logits([*sample.prompt_token_ids, *sample.token_ids])[-1]
        # log-probs are the policy's at the sampling temperature, whatever top-p and top-k leave to choose from (law I2)
        log_probs = (logits / (params.temperature or 1.0)).log_softmax(-1)
        known = log_probs[: len(self.tokenizer)] if self.tokenizer else log_probs  # ids beyond are padding (law I1)
        if params.temperature == 0:
            token = int(known.argmax())
        else:
            token = int(torch.multinomial(_kept(known.exp(), params.top_k, params.top_p), 1, generator=generator))
        is_full = len(sample.token_ids) + 1 == params.max_tokens
        return Delta(
            request_id=sample.request_id,
            index=sample.index,
            token_ids=(token,),
            log_probs=(float(log_probs[token]),),
            finish_reason="stop" if token in sample.stop_token_ids else "length" if is_full else None,
        )

    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        """Forget samples: finished, aborted, or left by their callers."""
        for key in keys:
            self._running.pop(key, None)

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """log p(token | before) of each token but the first."""
        return [
            (self._logits(ids)[:-1] / temperature)
            .log_softmax(-1)
            .gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            .tolist()
            for ids in token_ids
        ]

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        """New weights, some at a time, checked already: names, shapes, and that none is missing (law I6)."""
        for name, tensor in bucket.items():
            self._tensors[name].data.copy_(tensor)

    def _release(self) -> None:
        """Give back memory, processes, ports and files (law I9)."""
        self._running.clear()
        self._tensors = {}
        self._network = nn.Module()

    @torch.no_grad()
    def _logits(self, ids: Sequence[int]) -> Tensor:
        """[T, V] float32 logits after each token."""
        logits: Tensor = self._network(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return logits


def _kept(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[V] probabilities with all but the k likeliest, then all but the nucleus, set to 0."""
    ordered, order = probs.sort(descending=True)
    if top_k:
        ordered[top_k:] = 0
    ordered[ordered.cumsum(-1) - ordered >= top_p * ordered.sum()] = 0
    return torch.zeros_like(probs).scatter(-1, order, ordered)
