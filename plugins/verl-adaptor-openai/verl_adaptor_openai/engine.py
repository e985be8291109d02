"""The engine: every sample is a streamed completion of token ids, new weights are files that the server reads."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from verl_adaptor import BackendSpec, Delta, InferenceEngine
from verl_adaptor.backends.causal_lm import load_config, outline
from verl_adaptor.backends.folder import folder_update
from verl_adaptor.backends.limits import eos_token_ids, max_model_len, sampled_ids
from verl_adaptor.capabilities import Capability, unsupported
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import ConfigError, EngineError, InvalidRequest, ModelError, WeightUpdateError
from verl_adaptor.protocols import EngineModel, InFlight, SampleRequest
from verl_adaptor.samples import Prompt, SamplingParams, WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer
from verl_adaptor.weights import digests
from verl_adaptor_openai.client import Absent, Client
from verl_adaptor_openai.options import OpenAIOptions

_RPC = "/collective_rpc"
_CLOSED_RPC = (
    "the server's development endpoints are closed; start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
    "verl_adaptor_openai.worker.PolicyWorker"
)
_ENDS = ("stop", "length", "abort")

Key = tuple[str, int]


class OpenAIEngine(InferenceEngine):
    """Generates and scores on a server that somebody else has started.

    A vLLM server that was started with `PolicyWorker` samples as every engine here does and takes new weights. Of any other it
    is asked whether its completions bring token ids and log-probs; they are then at temperature 1, so no other is taken.

    Args:
        path: the folder of the model that the server serves: for its tokenizer, its limits and the shapes of its weights.
        config: what is asked of every engine; ``max_batch_size`` is how many requests are at the server at a time.
        options: an `OpenAIOptions`.
        spec: its declaration.

    Raises:
        ConfigError: the address is wrong, or the server serves no such model.
        ModelError: the server serves another model than that of `path`, or answers without token ids or log-probs.
        EngineError: the server does not answer.
    """

    def __init__(self, path: str, config: EngineConfig, options: Config | None, spec: BackendSpec) -> None:
        super().__init__(path, config, options, spec)
        self._own = cast(OpenAIOptions, options)
        model = load_config(path, config.trust_remote_code)
        self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        drawn = outline(path, config.trust_remote_code)
        self._running: dict[Key, Future[None]] = {}
        self._arrived: queue.SimpleQueue[tuple[Key, dict[str, Any] | Exception]] = queue.SimpleQueue()
        self._place: tempfile.TemporaryDirectory[str] | None = None
        """Where the files of an update lie, once the server is known to see it."""
        self._temperature: float | None = None
        """What the server takes log-probs of prompts at, where this engine has told it."""
        self._client = Client(self._own, config.max_batch_size)
        try:
            self._served, longest = self._client.wait(self._find())
            limit = max_model_len(model, config.max_model_len, path)
            self.model = EngineModel(
                vocab_size=drawn.vocab_size,
                # one less than the server's: a sequence is scored as a prompt, after which it generates a token
                max_model_len=limit if longest is None else min(limit, longest - 1),
                eos_token_ids=eos_token_ids(model, _generation_config(path), self.tokenizer),
                tensors=drawn.tensors,
                tied=drawn.tied,
            )
            self._names = self._install()
            if self._own.reload:
                self._prepare()
                self._load(folder_update(path, 0, config.trust_remote_code))
            self._client.wait(self._probe())
        except BaseException:
            self._client.close()
            raise

    # -- what the server is --------------------------------------------------------------------------------------

    async def _find(self) -> tuple[str, int | None]:
        """The served model's name, and its longest sequence where the server tells."""
        answer = await self._client.get("/v1/models")
        cards = answer.get("data", ()) if isinstance(answer, dict) else ()
        served = {card["id"]: card for card in cards if isinstance(card, dict) and "id" in card}
        name = self._own.served_model or (next(iter(served)) if len(served) == 1 else None)
        if name not in served:
            asked = f"served_model={name!r} is not served" if name else "served_model is not set"
            raise ConfigError(
                f"{asked} and {self._own.base_url} serves {', '.join(served) or 'none'}; name one of these."
            )
        longest = served[name].get("max_model_len")
        return name, longest if isinstance(longest, int) else None

    def _install(self) -> Mapping[str, str]:
        """Make the server sample as every engine here; the names that requests bring their seed under.

        Where it cannot be, the declaration is narrowed to what is left.
        """
        sampled = sampled_ids(self.model.vocab_size, self.model.eos_token_ids, self.tokenizer)
        try:
            paused = self._client.wait(self._client.get("/is_paused"))
            answers: list[Any] = self._client.wait(self._call("openai_install", sampled, self.config.seed))
            refused = next((a["refused"] for a in answers if "refused" in a), None)
        except Absent:
            refused = _CLOSED_RPC
        except EngineError as error:  # vLLM without the extension answers 500
            refused = f"the server does not know PolicyWorker ({error}); start vLLM with it, as the README says"
        if refused is None:
            if paused.get("is_paused") and not self._own.reload:
                raise EngineError(
                    f"{self._own.base_url} is paused: a weight update failed half-way, or somebody holds it. Set reload=True for "
                    "the model as it is in its folder, or resume it (POST /resume)."
                )
            return dict(answers[0])
        lost = unsupported(refused)
        self.spec = dataclasses.replace(
            self.spec, capabilities={**self.spec.capabilities, Capability.UPDATE_WEIGHTS: lost}
        )
        if self._own.reload:
            raise ConfigError(f"reload=True cannot be: {refused}; or leave it out.")
        return {}

    @property
    def _is_policy(self) -> bool:
        """Whether log-probs are the tempered policy's, and weights can be sent."""
        return bool(self._names)

    async def _probe(self) -> None:
        """Raise `ModelError` for a server of another model, or one that answers without what training needs."""
        last = self.model.vocab_size - 1
        try:
            choice = await self._client.complete({**self._common((last, last)), "max_tokens": 1, "logprobs": 0})
            found, _ = _tokens(choice, self._own.base_url)
        except InvalidRequest as error:
            raise ModelError(
                f"{self._own.base_url} does not take token id {last} of {self.path}: {error} Start it with that model."
            ) from error
        if not found:
            raise ModelError(f"{self._own.base_url} answers a completion without a token; see the server's log.")

    async def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of `PolicyWorker` on all of the server's workers. Raises as `Client.post`."""
        limit = self._own.update_timeout_s if timeout_s is None else timeout_s
        answer = await self._client.post(_RPC, {"method": method, "args": list(arguments)}, limit)
        return list(answer["results"]) if isinstance(answer, dict) else []

    # -- requests ------------------------------------------------------------------------------------------------

    def _check_request(self, prompt: Prompt, params: SamplingParams) -> None:
        super()._check_request(prompt, params)
        if not self._is_policy and params.temperature not in (0.0, 1.0):
            raise InvalidRequest(
                f"temperature={params.temperature:g}: the log-probs of this server are at temperature 1, not at this one; "
                f"allowed: 1 and 0. For others: {self.spec.support(Capability.UPDATE_WEIGHTS).detail}."
            )

    def _common(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {"model": self._served, "prompt": list(prompt), "return_token_ids": True}

    def _body(self, sample: SampleRequest) -> dict[str, Any]:
        """One sample as a completion of OpenAI's, with vLLM's additions where they differ from what a server does unasked."""
        params = sample.params
        body = {
            **self._common(sample.prompt_token_ids),
            "stream": True,
            "logprobs": 0,
            "max_tokens": params.max_tokens,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": True,  # EOS is among stop_token_ids, where it is to end the response
            "stop_token_ids": sorted(sample.stop_token_ids),
            "top_k": params.top_k,
            "min_tokens": params.min_tokens,
            "repetition_penalty": params.repetition_penalty,
            "min_p": 0.0,
            "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()} or None,
        }
        if self._is_policy:
            extra = {self._names["seed"]: sample.seed, self._names["temperature"]: params.temperature}
            return {**body, "temperature": 1.0 if params.temperature else 0.0, "vllm_xargs": extra}
        return {**body, "temperature": params.temperature, "seed": sample.seed}

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        for sample in samples:
            self._running[sample.key] = self._client.start(self._stream_one(sample.key, self._body(sample)))

    async def _stream_one(self, key: Key, body: Mapping[str, Any]) -> None:
        try:
            async for choice in self._client.stream(body):
                self._arrived.put((key, choice))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._arrived.put((key, error))

    def _step(self) -> list[Delta]:
        limit = self._own.request_timeout_s + 1.0  # each stream ends itself before
        try:
            arrived = [self._arrived.get(timeout=limit)]
        except queue.Empty:
            raise EngineError(f"{self._own.base_url} sent nothing for {limit:.0f} s; see that it runs.") from None
        arrived += [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
        return [delta for key, choice in arrived if key in self._running for delta in self._deltas(key, choice)]

    def _deltas(self, key: Key, choice: dict[str, Any] | Exception) -> list[Delta]:
        if isinstance(choice, Exception):
            raise choice
        tokens, log_probs = _tokens(choice, self._own.base_url)
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _ENDS:
            raise EngineError(f"{self._own.base_url} ended a completion with finish_reason={reason!r}; see its log.")
        if reason is not None:
            del self._running[key]
        elif not tokens:
            return []
        return [Delta(request_id=key[0], index=key[1], token_ids=tokens, log_probs=log_probs, finish_reason=reason)]

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if request := self._running.pop(key, None):
                request.cancel()  # which closes its connection, and that aborts it on the server

    # -- score ---------------------------------------------------------------------------------------------------

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        if not self._is_policy and temperature != 1:
            raise InvalidRequest(
                f"temperature={temperature:g}: this server scores at temperature 1 only. For others: "
                f"{self.spec.support(Capability.UPDATE_WEIGHTS).detail}."
            )
        if self._is_policy and temperature != self._temperature:
            self._client.wait(self._call("adaptor_score_at", temperature))
            self._temperature = temperature
        return self._client.wait(self._scores(token_ids))

    async def _scores(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*map(self._score_one, token_ids)))

    async def _score_one(self, ids: Sequence[int]) -> list[float]:
        body = {**self._common(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choice = await self._client.complete(body)
        try:
            rows = choice["prompt_logprobs"][1:]
            return [float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True)]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._own.base_url} gives no log-probs of a prompt's tokens (prompt_logprobs); score on another engine."
            ) from error

    # -- weights -------------------------------------------------------------------------------------------------

    def update_weights(self, update: WeightUpdate, *, in_flight: InFlight = "wait") -> None:
        """As every engine's. Other clients' requests are finished first, and theirs that come meanwhile wait.

        Raises:
            UnsupportedCapability: the server has no way for new weights.
        """
        if not self.spec.support(Capability.UPDATE_WEIGHTS):
            raise self._unsupported(Capability.UPDATE_WEIGHTS)
        super().update_weights(update, in_flight=in_flight)

    def _check_update(self, update: WeightUpdate) -> None:
        """And that its files can be written where the server reads them."""
        super()._check_update(update)
        self._prepare()

    def _prepare(self) -> None:
        self._forget()
        try:
            self._place = tempfile.TemporaryDirectory(prefix="verl-adaptor-weights-", dir=self._own.weight_folder)
        except OSError as error:
            raise WeightUpdateError(
                f"weight_folder={self._own.weight_folder!r} cannot be written ({error.strerror}); name a folder that can."
            ) from error
        if set(self._client.wait(self._call("adaptor_sees", self._place.name))) != {"True"}:
            raise WeightUpdateError(
                f"the server does not see {self._place.name}; set weight_folder to one on a file system that it shares."
            )

    def _load(self, update: WeightUpdate) -> None:
        """Where it fails half-way the server stays paused, so that it serves no torn weights to anybody."""
        limit = self._own.update_timeout_s
        self._client.wait(self._client.post("/pause?mode=wait", None, limit))
        super()._load(update)
        cleared = self._client.wait(self._client.post("/reset_prefix_cache?reset_running_requests=true", None, limit))
        if not (isinstance(cleared, dict) and cleared.get("success")):
            raise EngineError(f"{self._own.base_url} did not clear its prefix cache ({cleared}); start it anew.")
        self._client.wait(self._client.post("/resume", None, limit))
        self._forget()

    def _begin_load(self) -> None:
        self._client.wait(self._call("adaptor_begin"))

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        """As a file. The server's digest of what it has read is compared with that of what came here."""
        assert self._place is not None  # made by `_prepare`
        file = Path(self._place.name) / "bucket.safetensors"
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket.items()}
        try:
            save_file(tensors, file)
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(
                f"{file} cannot be written ({error}); set weight_folder to a folder with room."
            ) from error
        sent = digests(tensors)
        for read in self._client.wait(self._call("adaptor_load_file", str(file), True)):
            if read != sent:
                raise WeightUpdateError(f"the server read other bytes from {file} than were written; start it anew.")

    def _finish_load(self) -> None:
        self._client.wait(self._call("adaptor_finish"))

    def _forget(self) -> None:
        if self._place is not None:
            self._place.cleanup()
            self._place = None

    def _release(self) -> None:
        self._forget()
        self._client.close()


def _tokens(choice: Mapping[str, Any], url: str | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probs of a choice's tokens.

    Raises:
        ModelError: it has none, or one is no number.
    """
    ids, told = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if ids is None and not choice.get("text"):  # the end of a stream
        return (), ()
    if not isinstance(ids, list) or (told is None and ids):
        raise ModelError(
            f"{url} answers without {'token ids (return_token_ids)' if ids is None else 'log-probs'}, and a response is never "
            "tokenized anew here; serve the model with vLLM, or with a server that gives them."
        )
    log_probs = told or []
    if len(ids) != len(log_probs) or not all(isinstance(value, int | float) and value == value for value in log_probs):
        raise EngineError(
            f"{url} gave log-probs {log_probs} for tokens {ids}; check the served weights, and the last weight update."
        )
    return tuple(ids), tuple(map(float, log_probs))


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
