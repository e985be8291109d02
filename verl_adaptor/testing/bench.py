"""What a law is checked on: a backend, tiny models, and an independent oracle."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from verl_adaptor.backends.causal_lm import load_causal_lm, load_config
from verl_adaptor.batch import collate
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import EngineConfig, TrainerConfig
from verl_adaptor.execution import WorkerPool
from verl_adaptor.factory import resolve_engine, resolve_trainer
from verl_adaptor.protocols import InferenceEngine, LossOutput, TrainerBackend
from verl_adaptor.samples import Trajectory
from verl_adaptor.testing.models import PAD, make_tiny_model
from verl_adaptor.testing.reference import ReferenceEngine, ReferenceTrainer
from verl_adaptor.tokenizer import load_tokenizer

FP32_LOG_PROB = 1e-4
"""Law I2: engine against oracle, nats."""
GAP = 1e-4
"""Laws I3, I4: where the best two are nearer than this, rounding may choose."""


SETTLED = {"eps": 1e-5}
"""For models with weights whose gradient is 0 but for rounding (key biases, for one; single elements elsewhere): with AdamW's
usual eps of 1e-8 such a rounding error becomes a whole step, and no two correct trainers agree."""


WORKERS = WorkerPool()
"""Ranks of all benches: starting them takes longer than most laws. They end with the process."""
SHARE_CPUS = {"cpus_per_worker": 0.1}
"""Ranks of tiny models need not have a CPU each, and `WORKERS` keeps those of every layout at a time."""


class Bench:
    """Makes engines and trainers of one backend on one tiny model, and closes them all at the end."""

    def __init__(
        self,
        spec: BackendSpec,
        *,
        family: str = "llama",
        model: Mapping[str, Any] | None = None,
        engine_settings: Mapping[str, Any] | None = None,
        trainer_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.family = family
        self._model = dict(model or {})
        self._engine_settings = dict(engine_settings or {})
        self._trainer_settings = dict(trainer_settings or {})
        self._optimizer: dict[str, Any] = {"learning_rate": 1e-3, **(SETTLED if model or family != "llama" else {})}
        self._folder = tempfile.TemporaryDirectory(prefix="verl-adaptor-laws-")
        self._open: list[InferenceEngine | TrainerBackend] = []
        self._shared: InferenceEngine | None = None

    @property
    def folder(self) -> Path:
        """Scratch space."""
        return Path(self._folder.name)

    @cached_property
    def path(self) -> str:
        """The tiny model: two layers or more, grouped-query attention, random norms and biases."""
        return str(make_tiny_model(self.family, self.folder / self.family, **self._model))

    @cached_property
    def smooth_path(self) -> str:
        """The same, except that a mixture's tokens go to all its experts.

        Which few experts a router chooses jumps with the smallest rounding, and with it everything after it: then there is
        nothing for bfloat16 to stay near to.
        """
        config = load_config(self.path, trust_remote_code=False)
        experts = [count for key in ("num_local_experts", "num_experts") if (count := getattr(config, key, None))]
        return self.variant("all-experts", num_experts_per_tok=experts[0]) if experts else self.path

    @cached_property
    def critic_path(self) -> str:
        """The same model with a value head beside it, as the reference trainer saved it."""
        folder = self.folder / f"{self.family}-critic"
        with self.reference_trainer(head="value") as critic:
            critic.save_pretrained(folder)
        return str(folder)

    def variant(self, name: str, **overrides: Any) -> str:
        """Another model of the family, kept under `name`; overrides as `make_tiny_model` takes them."""
        folder = self.folder / name
        return str(folder if folder.exists() else make_tiny_model(self.family, folder, **{**self._model, **overrides}))

    # -- what is tested ------------------------------------------------------------------------------------------

    def engine(self, backend: str | None = None, **settings: Any) -> InferenceEngine:
        """A fresh engine of the backend under test, or of another."""
        common = self._engine_settings if backend is None else {}
        engine = resolve_engine(self.path, backend or self.spec.name, **{**common, **settings}).create(workers=WORKERS)
        self._open.append(engine)
        return engine

    @property
    def shared_engine(self) -> InferenceEngine:
        """One engine for all laws that leave it as they found it."""
        if self._shared is None:
            self._shared = self.engine()
        return self._shared

    def trainer(self, path: str | None = None, *, alone: bool = False, **settings: Any) -> TrainerBackend:
        """A fresh trainer of the backend under test; learning rate 1e-3 unless told otherwise.

        `alone`: on one rank, whatever layout is under test.
        """
        layout = {} if alone else self._trainer_settings
        settings = {**SHARE_CPUS, **self._optimizer, **layout, **settings}
        trainer = resolve_trainer(path or self.path, self.spec.name, **settings).create(workers=WORKERS)
        self._open.append(trainer)
        return trainer

    # -- what it is compared with --------------------------------------------------------------------------------

    @cached_property
    def oracle(self) -> Any:
        """The same model in plain transformers, float32, eager attention."""
        model = load_causal_lm(self.path, dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
        model.set_attn_implementation("eager")
        return model

    @cached_property
    def sampleable(self) -> int:
        """Ids below this have a tokenizer entry; the model's vocabulary is padded beyond (C18)."""
        tokenizer = load_tokenizer(self.path)
        return self.oracle.config.vocab_size if tokenizer is None else len(tokenizer)

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """[len(ids) - 1, V] log-probs of every next token, by the oracle."""
        logits = self.oracle(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
        return (logits / temperature).log_softmax(-1)

    def reference_engine(self) -> InferenceEngine:
        """The reference engine on the same model."""
        engine = ReferenceEngine(self.path, EngineConfig())
        self._open.append(engine)
        return engine

    def reference_trainer(self, path: str | None = None, **settings: Any) -> TrainerBackend:
        """The reference trainer on the same model."""
        trainer = ReferenceTrainer(path or self.path, TrainerConfig(**{**self._optimizer, **settings}))
        self._open.append(trainer)
        return trainer

    # -- inputs --------------------------------------------------------------------------------------------------

    def prompts(self, count: int, *, seed: int = 0, longest: int = 12) -> list[tuple[int, ...]]:
        """Random prompts of unequal lengths, without special tokens."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
        return [tuple(torch.randint(8, self.sampleable, (n,), generator=generator).tolist()) for n in lengths]

    def batch(self, rows: int = 6, *, seed: int = 0, temperature: float = 1.0, shared: int = 1) -> TensorDict:
        """A training batch of unequal lengths, with observation tokens, advantages, returns and values.

        The first response has the padding token in its midst, as a policy may sample it. Each prompt stands in `shared` rows.
        """
        generator = torch.Generator().manual_seed(seed)
        prompts = [prompt for prompt in self.prompts(rows, seed=seed + 1) for _ in range(shared)][:rows]
        responses = self.prompts(rows, seed=seed + 2, longest=9)
        responses[0] = (responses[0][0], PAD, *responses[0][1:])
        trajectories = [
            Trajectory(
                prompt_ids=prompt,
                response_ids=response,
                response_mask=tuple(int(not (row % 3 == 1 and place == 1)) for place in range(len(response))),
                rollout_log_probs=(0.0,) * len(response),
                finish_reason="stop",
                temperature=temperature,
            )
            for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        batch = collate(trajectories, pad_token_id=PAD)
        for key in ("advantages", "returns", "values"):
            batch[key] = torch.randn(batch["responses"].shape, generator=generator)
        return batch

    def close(self) -> None:
        """Close what was opened and delete the scratch space."""
        while self._open:
            self._open.pop().close()
        self._folder.cleanup()


def policy_gradient(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """The plainest policy loss, -log p * A: its gradient depends on every token."""
    weight = batch["response_mask"].sum()
    metric = ((outputs["log_probs"].detach() * batch["response_mask"]).sum(), weight)
    return LossOutput(-outputs["log_probs"] * batch["advantages"], {"log_prob": metric})


def squared_error(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """The plainest value loss."""
    return LossOutput(0.5 * (outputs["values"] - batch["returns"]) ** 2)
