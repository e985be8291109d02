"""`conformance_suite`: every law for one backend, as a test class, in one line.

    from verl_adaptor.testing import conformance_suite

    TestMine = conformance_suite("mine")

The class is built here, law by law, so that an author can neither forget nor shadow one. Skips come from the
BackendSpec alone: a role the backend does not play is left out; a capability declared UNSUPPORTED, or for a device that is
not here, must raise `UnsupportedCapability`; NOT_IMPLEMENTED is a strict xfail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch

from verl_adaptor.capabilities import BackendSpec, Capability, Role, Support, SupportLevel
from verl_adaptor.errors import ConfigError, UnsupportedCapability, nearest
from verl_adaptor.registry import get_spec
from verl_adaptor.testing import laws_adapters, laws_inference, laws_pairs, laws_saving, laws_training
from verl_adaptor.testing.bench import Bench
from verl_adaptor.testing.laws import LAWS, Law

DECLARED, NOT_HERE = "declared", "not_here"
"""Properties of a test whose law is not kept: what the spec declares, and the device that this machine would need."""
DEVICES: Mapping[str, Callable[[], bool]] = {"cuda": torch.cuda.is_available}

_MODULES = (laws_inference, laws_training, laws_saving, laws_adapters, laws_pairs)  # importing them fills LAWS


def conformance_suite(
    backend: str,
    *,
    family: str = "llama",
    model: Mapping[str, Any] | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    trainer_settings: Mapping[str, Any] | None = None,
    roles: Collection[Role] | None = None,
    laws: Collection[str] | None = None,
) -> type:
    """A test class with one method a law.

    Args:
        backend: a registered name.
        family: which tiny model, see `verl_adaptor.testing.models`.
        model: config keys that differ from the family's, e.g. ``{"num_hidden_layers": 4}``.
        engine_settings: given to every engine, e.g. ``{"tensor_parallel_size": 2}``.
        trainer_settings: given to every trainer, e.g. ``{"data_parallel_size": 2}``.
        roles: check these roles only; None checks all that the backend plays.
        laws: check these laws only, by number or name; None checks all.

    Raises:
        ConfigError: there is no such law.
    """
    unknown = set(laws or ()) - {name for law in LAWS for name in (law.number, law.name)}
    if unknown:
        raise ConfigError(f"laws={sorted(unknown)} are unknown; {nearest(min(unknown), [law.name for law in LAWS])}.")
    spec = get_spec(backend)
    on_cpu = "cpu" in {settings.get("device") for settings in (engine_settings, trainer_settings) if settings}

    def setup_class(cls: Any) -> None:
        cls.bench = Bench(
            spec, family=family, model=model, engine_settings=engine_settings, trainer_settings=trainer_settings
        )

    def teardown_class(cls: Any) -> None:
        cls.bench.close()

    methods: dict[str, Any] = {"setup_class": classmethod(setup_class), "teardown_class": classmethod(teardown_class)}
    for law in LAWS:
        chosen = laws is None or law.number in laws or law.name in laws
        if chosen and set(law.roles) <= set(spec.roles if roles is None else roles):
            methods[f"test_{law.number}_{law.name}"] = _method(law, spec, on_cpu=on_cpu)
    return type(f"Test{spec.name.title()}Conformance", (), methods)


def _method(law: Law, spec: BackendSpec, *, on_cpu: bool) -> Callable[..., None]:
    """The law as a test method, in the form that the declared support asks for."""
    away = {needed: device for needed in law.needs if (device := _missing_device(spec.support(needed), on_cpu=on_cpu))}
    supports = {needed: spec.support(needed) for needed in law.needs}
    lacking = {c: support for c, support in supports.items() if c in away or not (support or support.detail in DEVICES)}
    unfinished = [c for c, support in lacking.items() if support.level is SupportLevel.NOT_IMPLEMENTED]

    def keeps(self: Any) -> None:
        law.check(self.bench)

    def refuses(self: Any, record_property: Callable[[str, object], None]) -> None:
        declared = ", ".join(f"{c}: {s}" for c, s in lacking.items())
        record_property(DECLARED, declared)
        if away:
            record_property(NOT_HERE, ", ".join(sorted(set(away.values()))))
        refused = law.refused or _refusals(lacking)
        if refused is None:
            pytest.skip(f"{spec.name} declares {declared}")
        with pytest.raises(UnsupportedCapability):
            refused(self.bench)

    method: Callable[..., None] = refuses if lacking and not unfinished else keeps
    method.__name__ = f"test_{law.number}_{law.name}"
    method.__doc__ = f"{law.number}: {law.check.__doc__}"
    if unfinished:
        return pytest.mark.xfail(strict=True, reason=f"not implemented: {', '.join(unfinished)}")(method)
    return method


def _missing_device(support: Support, *, on_cpu: bool) -> str:
    """The device that it is declared for, and that this machine has not or the settings do not use; else empty."""
    wanted = support.detail if support.level is SupportLevel.ONLY and support.detail in DEVICES else ""
    return wanted if wanted and (on_cpu or not DEVICES[wanted]()) else ""


def _refusals(lacking: Mapping[Capability, object]) -> Callable[[Bench], Any] | None:
    """How to ask for a capability that must be refused: trainer settings that need it."""
    asks: dict[Capability, dict[str, Any]] = {
        Capability.PACKING: {"packing": True},
        Capability.TOKEN_BUDGET: {"max_tokens_per_micro_batch": 64},
        Capability.ACTIVATION_CHECKPOINTING: {"activation_checkpointing": True},
        Capability.BF16: {"dtype": "bfloat16"},
        Capability.VALUE_HEAD: {"head": "value"},
        Capability.LORA: {"lora_rank": 4},
    }
    for capability in lacking:
        if capability in asks:
            return lambda bench: bench.trainer(**asks[capability])
    return None
