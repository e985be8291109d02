"""`VLLMEngine`: vLLM's engine core under this project's contract."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from verl_adaptor.backends.causal_lm import load_config, outline, resolve_device
from verl_adaptor.backends.export import fused_groups
from verl_adaptor.backends.limits import eos_token_ids, max_model_len, sampled_ids
from verl_adaptor.backends.vllm.environment import vllm_environment, without_noise
from verl_adaptor.backends.vllm.memory import kv_cache_bytes
from verl_adaptor.backends.vllm.options import VLLMOptions
from verl_adaptor.backends.vllm.transfer import Route
from verl_adaptor.backends.world import ensure_process_group
from verl_adaptor.capabilities import BackendSpec, Capability
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import ConfigError, EngineError, ModelError, WeightUpdateError
from verl_adaptor.preflight.memory import dimensions
from verl_adaptor.protocols import EngineModel, InferenceEngine, InFlight, SampleRequest, Served
from verl_adaptor.samples import Delta, FinishReason, WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer
from verl_adaptor.weights import digests

with vllm_environment():
    from verl_adaptor.backends.vllm.adapters import PolicyAdapters
    from verl_adaptor.backends.vllm.core import Core, CoreBeside, CoreHere, sampling, scoring
    from verl_adaptor.backends.vllm.registered import VLLMS_OWN, Registered, settings_for, transfer_arguments
    from verl_adaptor.backends.vllm.replicas import CoreReplicas

if TYPE_CHECKING:
    from verl_adaptor.backends.vllm.server import Server

_JOIN_TIMEOUT_S = 600.0
_SETTLE_S = 620.0
"""A little more than HTTP requests may take to settle."""
_SCORE = "score"


class VLLMEngine(InferenceEngine):
    """Serves what vLLM serves, with this project's log-probs, seeds and weight updates.

    Raises:
        ModelError: the folder cannot be read, or vLLM does not know the architecture.
        ConfigError: max_model_len is over what the model was made for, the key-value cache cannot hold one sequence, or
            this process is one of several ranks.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        own = cast(VLLMOptions, options)
        self._device = resolve_device(config.device)
        model_config = load_config(path, config.trust_remote_code)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        drawn = outline(path, config.trust_remote_code)
        self.model = EngineModel(
            vocab_size=drawn.vocab_size,
            max_model_len=max_model_len(model_config, config.max_model_len, path),
            eos_token_ids=eos_token_ids(model_config, _generation_config(path), self.tokenizer),
            tensors=drawn.tensors,
            tied=drawn.tied,
        )
        self._names: dict[str, tuple[str, int]] = {}
        """vLLM's name of each running sample -> ours."""
        self._early: list[Delta] = []
        """What came while `score` was waiting for something else."""
        self._temperature = 1.0
        self._sleeping: set[str] = set()
        rank = config.lora_rank
        self._adapters = None if rank is None else PolicyAdapters(rank, self.model, own.weight_folder)
        own_transfer = None
        if own.weight_transport in VLLMS_OWN:
            own_transfer = settings_for(own.weight_transport, config.parallel.world_size, self._device)
        self._core = self._start(own, model_config)
        registered = own_transfer and Registered(self._core, own.weight_transport, own_transfer)
        self._route = Route(self._core, own.weight_transport, own.weight_folder, registered)
        self._server: Server | None = None
        self._compares: Callable[[Mapping[str, int]], None] | None = None
        """Is told the digests of what the workers have read."""
        try:
            self._score([[0, 0]], 1.0)
        except Exception as error:
            self._core.close()
            raise ModelError(
                f"{path}: vLLM loads this model and cannot run it here: {error}; use backend='hf', or another device."
            ) from error

    def _check_settings(self, own: VLLMOptions, *, beside: bool) -> None:
        """Raise `ConfigError` for settings that cannot go together here."""
        config = self.config
        if config.replicas > 1 and self._device.type != "cpu":
            raise ConfigError(
                f"replicas={config.replicas} on {self._device.type}: all would take the same GPUs; use tensor_parallel_size, or "
                "an engine for each GPU in a process of its own that sees that one alone (CUDA_VISIBLE_DEVICES)."
            )
        if config.lora_rank and self._device.type == "cpu" and any(".experts." in name for name in self.model.tensors):
            raise ConfigError(
                f"lora_rank={config.lora_rank}: vLLM computes adapters of a model with experts on GPUs only; leave it out, and "
                "adapters come merged."
            )
        if own.weight_transport != "auto" and not beside and config.parallel.world_size == 1:
            raise ConfigError(
                f"weight_transport={own.weight_transport!r}: vLLM is in this process and is handed the tensors themselves; leave "
                "it at 'auto', or set mode='async'."
            )
        if not beside and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"this process is one of {dist.get_world_size()} ranks, and vLLM in it would be one of them; set "
                "mode='async': then it has processes of its own."
            )
        if own.weight_transport in VLLMS_OWN and config.lora_rank:
            raise ConfigError(
                f"weight_transport={own.weight_transport!r}: vLLM's own transfers load no base of adapters; leave it at 'auto', "
                "or leave lora_rank out."
            )

    def _start(self, own: VLLMOptions, model_config: PreTrainedConfig) -> Core:
        config, model = self.config, self.model
        beside = config.mode == "async" or config.replicas > 1
        self._check_settings(own, beside=beside)
        if not beside:
            ensure_process_group(torch.device("cpu"), _JOIN_TIMEOUT_S)
        eager = self._device.type == "cpu" if own.enforce_eager is None else own.enforce_eager
        arguments = {
            "model": self.path,
            "skip_tokenizer_init": not beside or self.tokenizer is None,  # a HTTP server needs it
            "trust_remote_code": config.trust_remote_code,
            "dtype": config.dtype,
            "seed": config.seed,
            # one more: a sequence of the longest length is scored as a prompt, after which vLLM must generate a token
            "max_model_len": model.max_model_len + 1,
            "max_num_seqs": config.max_batch_size,
            "max_num_batched_tokens": max(config.max_prefill_tokens, config.max_batch_size),
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": config.parallel.pipeline_parallel_size,
            "distributed_executor_backend": "mp" if beside or config.parallel.world_size > 1 else "uni",
            "enforce_eager": eager,
            "enable_prefix_caching": own.prefix_caching,
            "async_scheduling": False,
            "gpu_memory_utilization": own.gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_bytes(
                own, config, dimensions(model_config.to_dict()), model.max_model_len + 1, self._device.type
            ),
            "enable_sleep_mode": self._device.type == "cuda",
            "generation_config": "vllm",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **(transfer_arguments(own.weight_transport) if own.weight_transport in VLLMS_OWN else {}),
            **(self._adapters.arguments if self._adapters is not None else {}),
        }
        taken = sorted(arguments.keys() & own.engine_args.keys())
        if taken:
            raise ConfigError(
                f"engine_args holds {', '.join(taken)}, for which there are settings here; use those instead."
            )
        with vllm_environment(beside=beside), nullcontext() if beside else without_noise():
            try:
                core: Core = self._core_of({**arguments, **own.engine_args}, beside=beside)
            except (ValueError, TypeError, RuntimeError, OSError) as error:
                raise self._explained(error) from error
        sampled = sampled_ids(model.vocab_size, model.eos_token_ids, self.tokenizer)
        core.call("adaptor_install", sampled, config.seed)
        core.call("adaptor_end_with", os.getpid())
        if self._adapters is not None:
            self._adapters.clear(core)
        return core

    def _core_of(self, arguments: Mapping[str, Any], *, beside: bool) -> Core:
        if self.config.replicas > 1:
            return CoreReplicas(arguments, self.config.replicas)
        return CoreBeside(arguments) if beside else CoreHere(arguments)

    def _explained(self, error: Exception) -> Exception:
        """vLLM's reason not to start, with the cure."""
        said = str(error).strip()
        if "KV cache" in said or "cache blocks" in said:
            return ConfigError(
                f"the key-value cache cannot hold one sequence of max_model_len={self.model.max_model_len}; set a larger "
                f"kv_cache_gib, or a smaller max_model_len. vLLM said: {said}"
            )
        if "does not support LoRA" in said:
            return ConfigError(
                f"lora_rank={self.config.lora_rank}: vLLM adapts no such model; leave it out. vLLM said: {said}"
            )
        if "architectures" in said:
            return ModelError(f"{self.path}: vLLM does not serve this model; use backend='hf'. vLLM said: {said}")
        if isinstance(error, TypeError) and "keyword argument" in said:
            return ConfigError(f"engine_args holds what vLLM's EngineArgs does not know: {said}")
        return EngineError(f"{self.path}: vLLM did not start: {type(error).__name__}: {said}")

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            name = f"{sample.request_id}/{sample.index}"
            self._names[name] = sample.key
            self._core.add(name, sample.prompt_token_ids, sampling(sample))

    def _step(self) -> list[Delta]:
        early, self._early = self._early, []
        return early or self._deltas(self._core.step())

    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        names = [name for name in (f"{request}/{index}" for request, index in keys) if self._names.pop(name, None)]
        if names:
            self._core.abort(names)

    def _deltas(self, outputs: Sequence[Any]) -> list[Delta]:
        deltas = []
        for output in outputs:
            key = self._names.get(output.request_id)
            if key is None:
                continue
            [new] = output.outputs
            log_probs = tuple(new.logprobs.logprobs)
            if any(value != value for value in log_probs):
                raise EngineError("the model's logits are NaN; check its weights, and the last weight update.")
            reason: FinishReason | None = new.finish_reason
            deltas.append(
                Delta(
                    request_id=key[0],
                    index=key[1],
                    token_ids=tuple(new.token_ids),
                    log_probs=log_probs,
                    finish_reason=reason,
                )
            )
            if reason is not None:
                del self._names[output.request_id]
        return deltas

    # -- score and weights ---------------------------------------------------------------------------------------

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        if temperature != self._temperature:
            self._core.call("adaptor_score_at", temperature)
            self._temperature = temperature
        waiting = {f"{_SCORE}/{next(self._ids)}": row for row in range(len(token_ids))}
        for name, row in waiting.items():
            self._core.add(name, token_ids[row], scoring())
        scores: list[list[float]] = [[] for _ in token_ids]
        while waiting:
            outputs = self._core.step()
            self._early += self._deltas(outputs)
            for output in outputs:
                if output.request_id in waiting and output.finished:
                    scores[waiting.pop(output.request_id)] = list(output.prompt_logprobs.logprobs)
        return scores

    def _halt(self) -> list[Delta]:
        early, self._early = self._early, []
        return early + self._deltas(self._core.halt())

    def _go_on(self) -> None:
        self._core.go_on()

    def _check_update(self, update: WeightUpdate) -> None:
        """And find a way for its bytes."""
        super()._check_update(update)
        if self._adapters is not None and update.adapters is not None:
            self._adapters.check(update.adapters)
            self._adapters.bring(update.adapters, self._arrived(update.adapters.weights))
        self._route.prepare(update.largest_bucket)

    def _load(self, update: WeightUpdate) -> None:
        try:
            self._load_parts(update)
        except BaseException:
            self._route.end()
            if self._server is not None:
                self._cores_beside()[0].run(self._server.client.fail())
            raise

    def _load_parts(self, update: WeightUpdate) -> None:
        """Of adapters the base first, if it is another than the one here; then no more of it."""
        if self._adapters is None:
            return self._load_whole(update)
        base, self._adapters.base = self._adapters.base, None
        if update.adapters is None:
            self._load_whole(update)
            self._adapters.clear(self._core)
            return None
        if base != update.adapters.base.source:
            self._load_whole(update.adapters.base)
        self._adapters.load(self._core)
        self._adapters.base = update.adapters.base.source

    def _arrived(self, update: WeightUpdate) -> dict[str, Tensor]:
        """All tensors of a small update."""
        arrived: dict[str, Tensor] = {}
        for bucket in update.buckets():
            if update.digests:
                self._compare(update, digests(bucket))
            arrived |= {name: tensor.clone() for name, tensor in bucket.items()}
        return arrived

    def _load_whole(self, update: WeightUpdate) -> None:
        """Digests are compared where the tensors arrive, in the workers' processes, if those can tell them."""
        there = self._route.transport.tells_digests
        self._compares = partial(self._compare, update) if update.digests and there else None
        try:
            super()._load(update)
        finally:
            self._compares = None

    def _arriving(self, update: WeightUpdate, *, verify: bool = True) -> Iterator[dict[str, Tensor]]:
        return self._whole(super()._arriving(update, verify=verify and self._compares is None))

    def _begin_load(self) -> None:
        self._route.transport.begin()

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        self._route.transport.load(bucket, self._compares)

    def _finish_load(self) -> None:
        self._route.transport.finish()
        self._route.transport.complete()

    # -- serving over HTTP ---------------------------------------------------------------------------------------

    @contextmanager
    def serving(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[Served]:
        """vLLM's OpenAI-compatible server on this engine, in the thread of its outputs; new weights reach it too.

        Raises:
            UnsupportedCapability: mode is not ``async``.
            ConfigError: the port cannot be had.
        """
        cores = self._cores_beside()
        with self._lock:
            self._check_serving()
            if self._server is not None:
                raise EngineError(f"this engine is served at {self._server.url} already; leave that context first.")
            with vllm_environment(beside=True):
                from verl_adaptor.backends.vllm.client import Client
                from verl_adaptor.backends.vllm.server import Server

                client = Client(cores, self, lambda: self._dispatch.held, self._check_serving)
                server = self._server = Server(self, client, cores[0].loop, host, port)
        try:
            yield server
        finally:
            server.end()
            self._server = None

    def _cores_beside(self) -> list[CoreBeside]:
        if isinstance(self._core, CoreReplicas):
            return self._core.cores
        if not isinstance(self._core, CoreBeside):
            raise self._unsupported(Capability.SERVE)
        return [self._core]

    def _settle(self, in_flight: InFlight) -> None:
        super()._settle(in_flight)
        if self._server is not None:
            self._cores_beside()[0].run(self._server.client.settle(in_flight), _SETTLE_S)

    def update_weights(self, update: WeightUpdate, *, in_flight: InFlight = "wait") -> None:
        """As every engine's; HTTP requests are settled as the engine's own are."""
        with self._lock, self._gate_opened():
            super().update_weights(update, in_flight=in_flight)

    def pause(self, in_flight: InFlight = "keep") -> None:
        """As every engine's; HTTP requests that come meanwhile wait."""
        with self._lock, self._gate_opened():
            super().pause(in_flight)

    @contextmanager
    def _gate_opened(self) -> Iterator[None]:
        """After this block HTTP requests are let in again."""
        try:
            yield
        finally:
            if self._server is not None:
                self._server.client.open()

    # -- memory --------------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Weights to the host and the key-value cache away, both at once; on a CPU `UnsupportedCapability`."""
        if self._device.type != self.spec.support(Capability.SLEEP).detail:
            raise self._unsupported(Capability.SLEEP)
        with self._lock, self._gate_opened():
            self._check_serving()
            self._settle("wait")
            self._core.sleep()
            self._sleeping = {"weights", "kv_cache"}
            self._asleep = True

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory again; the engine serves once it has both."""
        if self._device.type != self.spec.support(Capability.SLEEP).detail:
            raise self._unsupported(Capability.SLEEP)
        with self._lock:
            self._check_open()
            self._core.wake_up([tag for tag in tags if tag in self._sleeping])
            self._sleeping -= set(tags)
            self._asleep = bool(self._sleeping)

    # -- weights -------------------------------------------------------------------------------------------------

    def _whole(self, buckets: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Fused groups in one bucket: vLLM packs what it fuses as soon as the bucket is there."""
        groups = {name: group for group in fused_groups(self.model.tensors) for name in group}
        for bucket in buckets:
            torn = [name for name in bucket if not bucket.keys() >= set(groups.get(name, ()))]
            if torn:
                raise WeightUpdateError(
                    f"{torn[0]} arrived without the rest of what vLLM fuses it with ({', '.join(groups[torn[0]][:3])}); such "
                    "groups travel in one bucket: see WeightUpdate.fused_groups."
                )
            yield bucket

    def _break_off(self) -> None:
        self._core.break_off()

    def _release(self) -> None:
        if self._server is not None:
            self._server.end()
        self._route.end()
        self._core.close()
        del self._core


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
