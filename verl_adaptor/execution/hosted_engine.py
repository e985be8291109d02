"""`HostedEngine`: an engine as its `RemoteEngine` drives it, on each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_adaptor.errors import VerlAdaptorError
from verl_adaptor.protocols import InferenceEngine, SampleRequest
from verl_adaptor.samples import WeightUpdate
from verl_adaptor.weights import Layout, attach, digests, read

if TYPE_CHECKING:
    from torch import Tensor

News = tuple[str, int, list[int], list[float], str | None]
"""Request id, index, tokens, log-probs and finish reason of what one call has added to a sample."""


class HostedEngine:
    """The primitives of an engine, without its doors: requests are checked, followed and delivered where they are made.

    All ranks are told of all requests, and each takes those of its replica; ranks that share a model run the same steps in
    step, and the first of them reports.

    Args:
        engine: this rank's.
        exported: for an engine on a trainer's weights: what that trainer has exported last.
    """

    def __init__(self, engine: InferenceEngine, exported: Callable[[], WeightUpdate] | None = None) -> None:
        self._engine = engine
        self._exported = exported
        self._samples: dict[tuple[str, int], SampleRequest] = {}
        self._memory: Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """The model's limits, what the engine can do, the version served, and the replica of this rank."""
        engine = self._engine
        able = dict(engine.capabilities)
        return {"model": engine.model, "able": able, "version": engine.policy_version, "replica": engine.place[0]}

    # -- requests ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """See `InferenceEngine._wake`; on all ranks at once, because it may be a collective."""
        self._engine._wake()

    def rest(self) -> None:
        """See `InferenceEngine._rest`."""
        self._engine._rest()

    def admit(self, samples: Sequence[tuple[int, SampleRequest]]) -> None:
        """Take in those for this rank's replica.

        Args:
            samples: each with the replica that is to serve it.
        """
        own = [sample for replica, sample in samples if replica == self._engine.place[0]]
        self._samples.update((sample.key, sample) for sample in own)
        self._engine._admit(own)

    def step(self, count: int) -> list[News] | tuple[str, str]:
        """Up to `count` steps; what they added, on the rank that reports, else nothing.

        A step that fails is an answer too (class and sentence): the other replicas' ranks have done theirs.
        """
        added: dict[tuple[str, int], News] = {}
        try:
            for _ in range(count):
                if not self._samples:
                    break
                self._advance(added)
        except VerlAdaptorError as error:
            return type(error).__name__, str(error)
        return list(added.values()) if self._engine.place[1] else []

    def _advance(self, added: dict[tuple[str, int], News]) -> None:
        for delta in self._engine._step():
            key = delta.request_id, delta.index
            _, _, tokens, log_probs, _ = added.get(key, (*key, [], [], None))
            tokens += delta.token_ids
            log_probs += delta.log_probs
            added[key] = (*key, tokens, log_probs, delta.finish_reason)
            self._samples[key].take(delta, self._engine.policy_version)
            if delta.finish_reason is not None:
                del self._samples[key]

    def drop(self, keys: Sequence[tuple[str, int]]) -> None:
        """Forget these samples, whichever ranks have them."""
        for key in keys:
            self._samples.pop(key, None)
        self._engine._drop(keys)

    def score(
        self, rows: Sequence[Sequence[int]], owners: Sequence[int], temperature: float
    ) -> dict[int, list[float]] | None:
        """Row number -> log-probs of the rows that this rank's replica was given; nothing on ranks that do not report.

        Args:
            rows: token ids, all of them on every rank.
            owners: the replica of each row.
            temperature: divides the logits.
        """
        self._engine._check_lent()  # on all ranks, whichever have rows: a rank alone that raises ends the group
        replica, reports = self._engine.place
        own = [number for number, owner in enumerate(owners) if owner == replica]
        if self._engine.scores_together:
            scores = self._engine._score(rows, temperature)
            return {number: scores[number] for number in own} if reports else None
        scores = self._engine._score([rows[number] for number in own], temperature) if own else []
        return dict(zip(own, scores, strict=True)) if reports else None

    # -- weights -------------------------------------------------------------------------------------------------

    def exported(self) -> int:
        """The version that the trainer has exported last."""
        return self._newest().version

    def adopt(self, version: int) -> None:
        """Serve what the trainer has exported last, as this version."""
        self._engine._load(self._newest())
        self._engine._version = version

    def _newest(self) -> WeightUpdate:
        if self._exported is None:
            raise TypeError("an engine with weights of its own is handed buckets")
        return self._exported()

    def begin_load(self, memory: tuple[str, int] | None) -> None:
        """New weights come; through the shared memory of this path and size, if there is any."""
        self._memory = attach(*memory) if memory is not None else None
        self._engine._begin_load()

    def load_shared(self, layout: Layout, digest: bool) -> dict[str, int]:
        """Load what lies in shared memory; the digests of what was read, if asked for."""
        if self._memory is None:
            raise TypeError("begin_load was given no shared memory")
        return self.load_bucket(read(self._memory, layout), digest)

    def load_bucket(self, bucket: Mapping[str, Tensor], digest: bool) -> dict[str, int]:
        """Load these; their digests, if asked for."""
        found = digests(bucket) if digest else {}
        self._engine._load_bucket(bucket)
        return found

    def finish_load(self, version: int) -> None:
        """All have come."""
        self._memory = None
        self._engine._finish_load()
        self._engine._version = version

    # -- life ----------------------------------------------------------------------------------------------------

    def sleep(self, tags: Sequence[str]) -> None:
        """See `InferenceEngine.sleep`."""
        self._engine.sleep(tags)

    def wake_up(self, tags: Sequence[str]) -> None:
        """See `InferenceEngine.wake_up`."""
        self._engine.wake_up(tags)

    def close(self) -> None:
        """Close this rank's engine."""
        self._samples.clear()
        self._engine.close()
