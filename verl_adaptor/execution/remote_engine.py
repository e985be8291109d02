"""`RemoteEngine`: an engine whose ranks are processes of their own, used like one that is here."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_adaptor import errors
from verl_adaptor.capabilities import BackendSpec
from verl_adaptor.config import Config, EngineConfig
from verl_adaptor.errors import EngineError, WeightUpdateError, WorkerError
from verl_adaptor.execution.group import WorkerGroup
from verl_adaptor.execution.remote_trainer import Recipe
from verl_adaptor.protocols import InferenceEngine, SampleRequest
from verl_adaptor.samples import Delta, WeightUpdate
from verl_adaptor.tokenizer import load_tokenizer
from verl_adaptor.weights import SharedBucket

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

STEPS = 8
"""Steps a call where nobody looks at each token: each call costs a round trip to the ranks."""


class RemoteEngine(InferenceEngine):
    """Every primitive runs on all ranks of a worker group; what is asked of all engines is checked and followed here.

    With several replicas a request goes to the one that runs the fewest, all samples of a prompt to the same.

    Args:
        path, config, options, spec: as every engine's.
        group: the ranks.
        recipe: how to build the engine there; None for an engine that a trainer has made on its own weights.
        owns_group: close the group with the engine.
        key: the object's name on the group, for a trainer's.
        source: whose exports it serves and no other's; empty: anybody's.
    """

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        options: Config | None,
        spec: BackendSpec,
        *,
        group: WorkerGroup,
        recipe: Recipe | None,
        owns_group: bool = False,
        key: str | None = None,
        source: str = "",
    ) -> None:
        super().__init__(path, config, options, spec)
        self._group = group
        self._owns_group = owns_group
        self._is_trainers = recipe is None
        self._key = key or group.new_key(f"{spec.name} engine")
        self._source = source
        self._coming: WeightUpdate | None = None
        self._shared: SharedBucket | None = None
        self._way = ""
        try:
            if recipe is not None:
                group.create(self._key, recipe.builder, recipe.arguments)
            places = group.call_each(self._key, "facts")
            self.tokenizer = load_tokenizer(path, config.trust_remote_code)
        except BaseException:
            self._release()
            raise
        self.spec = dataclasses.replace(spec, capabilities=places[0]["able"])  # a trainer's spec may tell of no engine
        self.model = places[0]["model"]
        self._version = places[0]["version"]
        self._replicas = 1 + max(place["replica"] for place in places)
        self._serving: dict[tuple[str, int], int] = {}
        """Running sample -> its replica."""

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, samples: Sequence[SampleRequest]) -> None:
        load = Counter(self._serving.values())
        chosen: dict[str, int] = {}
        for sample in samples:
            if sample.request_id not in chosen:
                chosen[sample.request_id] = min(range(self._replicas), key=load.__getitem__)
            load[chosen[sample.request_id]] += 1
        placed = [(chosen[sample.request_id], _plain(sample)) for sample in samples]
        self._call("admit", placed)
        self._serving |= {sample.key: chosen[sample.request_id] for sample in samples}

    def _step(self) -> list[Delta]:
        each = any(sample.streams or sample.wants_text for sample in self._dispatch.samples.values())
        deltas: list[Delta] = []
        for found in self._each("step", 1 if each else STEPS):
            if isinstance(found, tuple):
                kind, sentence = found
                raise getattr(errors, kind)(sentence)
            deltas += [_delta(*news) for news in found]
        for delta in deltas:
            if delta.finish_reason is not None:
                self._serving.pop((delta.request_id, delta.index), None)
        return deltas

    def _drop(self, keys: Sequence[tuple[str, int]]) -> None:
        gone = [key for key in keys if self._serving.pop(key, None) is not None]
        if gone and self._group.usable:
            self._call("drop", gone)

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        rows = [list(map(int, row)) for row in token_ids]
        load: Counter[int] = Counter()
        owners = []
        for row in rows:
            owners.append(min(range(self._replicas), key=load.__getitem__))
            load[owners[-1]] += len(row)
        scores: dict[int, list[float]] = {}
        for found in self._each("score", rows, owners, temperature):
            scores |= found or {}
        return [scores[number] for number in range(len(rows))]

    def _wake(self) -> None:
        self._call("wake")

    def _rest(self) -> None:
        if self._group.usable:
            self._call("rest")

    # -- weights -------------------------------------------------------------------------------------------------

    def _check_update(self, update: WeightUpdate) -> None:
        if self._source and update.source[0] != self._source:
            raise WeightUpdateError(
                "this engine runs on its trainer's own weights and can serve no others; export from that trainer, or make an "
                "engine with create_inference_engine."
            )
        super()._check_update(update)
        if self._source and (version := self._call("exported")) != update.source[1]:
            raise WeightUpdateError(
                f"the update is what the trainer exported as version {update.source[1]}, and it has exported version {version} "
                "since; use that."
            )

    def _load(self, update: WeightUpdate) -> None:
        if self._source:
            self._adopt(update)
            return
        self._coming = update
        try:
            super()._load(update)
        finally:
            self._coming = self._shared = None

    def _adopt(self, update: WeightUpdate) -> None:
        self._call("adopt", update.version)

    def _arriving(self, update: WeightUpdate, *, verify: bool = True) -> Iterator[dict[str, Tensor]]:
        return super()._arriving(update, verify=False)  # digests are compared where the tensors arrive

    def _begin_load(self) -> None:
        self._shared = shared = self._room(self._update.largest_bucket)
        try:
            self._call("begin_load", shared and (str(shared.path), shared.size))
        finally:
            if shared is not None:
                shared.unlink()

    def _room(self, size: int) -> SharedBucket | None:
        """Shared memory for the largest bucket; None where the ranks cannot see it, or it has no room: then buckets are
        arguments of the calls, through Ray's object store. The log says which, once a change."""
        shared, why = None, "its ranks are on other machines, or one of them is this process"
        if size and self._group.workers.share_memory:
            try:
                shared, why = SharedBucket(size), "its ranks are other processes of this machine"
            except WeightUpdateError as error:
                why = str(error)
        way = "through shared memory" if shared is not None else "with each call"
        if way != self._way:
            logger.info("weights reach the %s %s: %s", self._key, way, why)
            self._way = way
        return shared

    def _load_bucket(self, bucket: Mapping[str, Tensor]) -> None:
        digest = bool(self._update.digests)
        if self._shared is None:
            found = self._each("load_bucket", dict(bucket), digest)
        else:
            found = self._each("load_shared", self._shared.write(bucket), digest)
        for arrived in found if digest else ():
            self._compare(self._update, arrived)

    def _finish_load(self) -> None:
        self._call("finish_load", self._update.version)

    @property
    def _update(self) -> WeightUpdate:
        if self._coming is None:
            raise WeightUpdateError("no update is under way; call update_weights().")
        return self._coming

    # -- sleep, close --------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `InferenceEngine.sleep`."""
        with self._lock:
            self._check_serving()
            self._settle("wait")
            self._call("sleep", tuple(tags))
            self._asleep = True

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """See `InferenceEngine.wake_up`."""
        with self._lock:
            self._check_open()
            self._call("wake_up", tuple(tags))
            self._asleep = False

    def _call(self, method: str, *args: Any) -> Any:
        """A method on all ranks; the first one's answer. Raises `EngineError` where a rank has died or does not answer."""
        with _as_engine():
            return self._group.call(self._key, method, *args)

    def _each(self, method: str, *args: Any) -> list[Any]:
        """The same; every rank's answer."""
        with _as_engine():
            return self._group.call_each(self._key, method, *args)

    def _break_off(self) -> None:
        if not self._is_trainers:
            self._group.workers.interrupt()

    def _release(self) -> None:
        if self._owns_group:
            self._group.close()
        else:
            self._group.drop(self._key)


@contextmanager
def _as_engine() -> Iterator[None]:
    """What fails on the ranks has failed in an engine."""
    try:
        yield
    except WorkerError as error:
        raise EngineError(str(error)) from error


def _plain(sample: SampleRequest) -> SampleRequest:
    """What crosses: the request without what follows it here."""
    return SampleRequest(
        request_id=sample.request_id,
        index=sample.index,
        group_id=sample.group_id,
        prompt_token_ids=sample.prompt_token_ids,
        params=sample.params,
        seed=sample.seed,
        stop_token_ids=sample.stop_token_ids,
    )


def _delta(request_id: str, index: int, tokens: Iterable[int], log_probs: Iterable[float], reason: Any) -> Delta:
    return Delta(
        request_id=request_id, index=index, token_ids=tuple(tokens), log_probs=tuple(log_probs), finish_reason=reason
    )
