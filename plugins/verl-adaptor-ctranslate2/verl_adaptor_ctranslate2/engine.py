"""The engine: logits are CTranslate2's, samples, seeds and log-probs this project's own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from verl_adaptor import BackendSpec, Delta, InferenceEngine
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import ModelError
from verl_adaptor.protocols import EngineModel, SampleRequest
from verl_adaptor.tokenizer import load_tokenizer


class CTranslate2Engine(InferenceEngine):
    """Generates with a converted copy of the model, in float32 on the CPU.

    CTranslate2 keeps no cache between calls that sample by themselves, and its own sampling has one generator for all requests,
    so that no seed would repeat a sample (law I4): each token is a forward of all running rows, and is drawn here. A weight
    update writes a Hugging Face folder, converts it and loads the result.

    Args:
        path: a Hugging Face folder with a tokenizer, which CTranslate2 wants.
        config: what is asked of every engine.
        options: it has none.
        spec: its declaration.

    Raises:
        ModelError: the model has no tokenizer, or CTranslate2 cannot convert it.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        if self.tokenizer is None:
            raise ModelError(
                f"{path} has no tokenizer, and CTranslate2 converts no model without one; save one beside it."
            )
        facts = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(facts, trust_remote_code=config.trust_remote_code)
        tensors = dict(outline.named_parameters())  # what is tied is here once
        names = {id(tensor): name for name, tensor in tensors.items()}
        aliases = dict(outline.named_parameters(remove_duplicate=False))
        eos = facts.eos_token_id
        self.model = EngineModel(
            vocab_size=facts.vocab_size,
            max_model_len=config.max_model_len or facts.max_position_embeddings,
            eos_token_ids=tuple(eos if isinstance(eos, list) else [eos] if eos is not None else []),
            tensors={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            tied={alias: names[id(tensor)] for alias, tensor in aliases.items() if alias not in tensors},
        )
        self._folder = tempfile.TemporaryDirectory(prefix="verl-adaptor-ctranslate2-")
        self._running: dict[tuple[str, int], tuple[SampleRequest, torch.Generator]] = {}
        self._coming: dict[str, Tensor] = {}
        try:
            self._generator = self._converted(path)
        except BaseException:
            self._folder.cleanup()
            raise

    def _converted(self, path: str) -> ctranslate2.Generator:
        place = Path(tempfile.mkdtemp(dir=self._folder.name))
        try:
            converter = TransformersConverter(path, trust_remote_code=self.config.trust_remote_code)
            converter.convert(str(place), quantization="float32", force=True)
        except Exception as error:  # whatever a converter of 30 architectures meets
            raise ModelError(f"CTranslate2 cannot convert {path}: {error}") from error
        return ctranslate2.Generator(
            str(place), device="cpu", compute_type="float32", intra_threads=torch.get_num_threads()
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            self._running[sample.key] = sample, torch.Generator().manual_seed(sample.seed)

    def _step(self) -> list[Delta]:
        rows = list(self._running.values())
        last = self._logits([[*sample.prompt_token_ids, *sample.token_ids] for sample, _ in rows])
        deltas = [self._next_token(*row, logits[-1]) for row, logits in zip(rows, last, strict=True)]
        self._drop([(delta.request_id, delta.index) for delta in deltas if delta.finish_reason])
        return deltas

    def _next_token(self, sample: SampleRequest, generator: torch.Generator, logits: Tensor) -> Delta:
        params = sample.params
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
        for key in keys:
            self._running.pop(key, None)

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return [
            (logits[:-1] / temperature).log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            for ids, logits in zip(token_ids, self._logits(token_ids), strict=True)
        ]

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """[T, V] float32 logits after each token, for each row."""
        padded = self._generator.forward_batch([list(map(int, row)) for row in rows])
        logits = torch.from_numpy(np.array(padded)).float()
        return [logits[number, : len(row)] for number, row in enumerate(rows)]

    # -- weights -------------------------------------------------------------------------------------------------

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        self._coming |= {name: tensor.detach().cpu().clone() for name, tensor in bucket.items()}

    def _finish_load(self) -> None:
        coming, self._coming = self._coming, {}
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        for file in Path(self.path).iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt") and "index" not in file.name:
                shutil.copy(file, folder)
        save_file(coming, folder / "model.safetensors", metadata={"format": "pt"})
        before, self._generator = self._generator, self._converted(str(folder))
        before.unload_model()
        shutil.rmtree(folder)

    # -- sleep, close --------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Unload the model; it is read again from the converted folder. Without the tag ``weights`` there is nothing to do."""
        with self._lock:
            self._check_serving()
            self._settle("wait")
            if "weights" in tags:
                self._generator.unload_model()
            self._asleep = True

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Load it again."""
        with self._lock:
            self._check_open()
            if not self._generator.model_is_loaded:
                self._generator.load_model()
            self._asleep = False

    def _release(self) -> None:
        self._running.clear()
        self._generator.unload_model()
        del self._generator
        self._folder.cleanup()


def _kept(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """[V] probabilities with all but the k likeliest, then all but the nucleus, set to 0."""
    ordered, order = probs.sort(descending=True)
    if top_k:
        ordered[top_k:] = 0
    ordered[ordered.cumsum(-1) - ordered >= top_p * ordered.sum()] = 0
    return torch.zeros_like(probs).scatter(-1, order, ordered)
