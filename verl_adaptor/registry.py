"""Finds backends. The only file that knows pluggy and entry points.

Every distribution may bring backends through the entry-point group ``verl_adaptor``; the built-in ones come in by the
same door. Each plug-in is loaded under a guard of its own: one that fails is kept in `Registry.broken` with its
distribution and exception, and the others never notice (law R1). Two claims to one name are an error for whoever asks
for that name, and for nobody else (law R2).

``VERL_ADAPTOR_PLUGINS=none`` leaves only the built-in backends; ``=a,b`` adds the plug-ins with these distribution or
entry-point names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from verl_adaptor import hookspecs
from verl_adaptor.capabilities import BackendSpec, Capability, Role, Support, SupportLevel
from verl_adaptor.errors import BackendError, BrokenPlugin, ConfigError, DuplicateBackend, UnknownBackend, nearest

PLUGINS_VARIABLE = "VERL_ADAPTOR_PLUGINS"
BUILT_IN = "verl-adaptor"
"""The distribution whose plug-ins no variable switches off."""


@dataclass(frozen=True)
class Source:
    """Where a plug-in comes from."""

    distribution: str
    version: str = ""
    entry_point: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.distribution, self.version) if part)


IN_PROCESS = Source("(registered in this process)")


@dataclass(frozen=True)
class Entry:
    """One backend and who brought it."""

    spec: BackendSpec
    source: Source


@dataclass(frozen=True)
class Broken:
    """One plug-in that could not be loaded: told, and not only logged (C33)."""

    source: Source
    error: BaseException

    def __str__(self) -> str:
        where = f" (entry point {self.source.entry_point!r})" if self.source.entry_point else ""
        return f"{self.source}{where}: {type(self.error).__name__}: {self.error}"


@dataclass
class Registry:
    """What was found: backends, and plug-ins that are broken."""

    entries: list[Entry]
    broken: list[Broken]

    @classmethod
    def discover(cls, chosen: str | None = None) -> Registry:
        """Load all plug-ins, each under its own guard.

        Args:
            chosen: as ``VERL_ADAPTOR_PLUGINS``; None reads that variable.
        """
        found = cls([], [])
        chosen = os.environ.get(PLUGINS_VARIABLE) if chosen is None else chosen
        for source, entry_point in _choose(_entry_points(), chosen, found.broken):
            try:
                found.entries += [Entry(spec, source) for spec in _specs(entry_point)]
            except (Exception, SystemExit) as error:  # whatever foreign code does, it must not break the others
                found.broken.append(Broken(source, error))
        return found

    def find(self, name: str, role: Role | None = None) -> BackendSpec:
        """The one backend with this name or alias, in this role if one is given.

        Raises:
            UnknownBackend: no such name, or it does not play this role.
            DuplicateBackend: two distributions claim it.
            BrokenPlugin: a plug-in of this name is installed but failed to load.
        """
        if not isinstance(name, str):
            raise ConfigError(f"backend={name!r} is not a name; give one of: {', '.join(self.names(role))}.")
        claims = [entry for entry in self.entries if name in entry.spec.names]
        if len(claims) > 1:
            raise DuplicateBackend(duplicate_sentence(name, claims))
        if not claims:
            raise self._unknown(name, role)
        spec = claims[0].spec
        if role and role not in spec.roles:
            raise UnknownBackend(
                f"backend {name!r} is for {' and '.join(spec.roles)} only; for {role} there are: {', '.join(self.names(role))}."
            )
        return spec

    def names(self, role: Role | None = None) -> list[str]:
        """Every name and alias that `find` answers to in this role."""
        taken = self.duplicates()
        usable = (entry.spec for entry in self.entries if role is None or role in entry.spec.roles)
        return sorted(name for spec in usable for name in spec.names if name not in taken)

    def duplicates(self) -> dict[str, list[Entry]]:
        """Name -> the entries that claim it, where there are several."""
        claims: dict[str, list[Entry]] = {}
        for entry in self.entries:
            for name in entry.spec.names:
                claims.setdefault(name, []).append(entry)
        return {name: entries for name, entries in claims.items() if len(entries) > 1}

    def supporting(self, capability: Capability, role: Role) -> list[str]:
        """Backends of this role that declare a capability; one that has it only somewhere says where."""
        answers = ((entry.spec, entry.spec.support(capability)) for entry in self.entries if role in entry.spec.roles)
        return [
            spec.name if support or support.detail == role else f"{spec.name} (only {support.detail})"
            for spec, support in answers
            if support
            or (support.level == SupportLevel.ONLY and support.detail not in ({"inference", "training"} - {role}))
        ]

    def register(self, spec: BackendSpec) -> None:
        """Add a backend without packaging; a second one of the same name replaces the first."""
        check_spec(spec)
        self.entries = [e for e in self.entries if e.source != IN_PROCESS or e.spec.name != spec.name]
        self.entries.append(Entry(spec, IN_PROCESS))

    def _unknown(self, name: str, role: Role | None) -> BackendError:
        """A typo is told with the names nearest to it (C32)."""
        for broken in self.broken:
            if name in (broken.source.entry_point, broken.source.distribution):
                error = BrokenPlugin(
                    f"backend {name!r} could not be loaded from {broken}. Mend or uninstall that plug-in."
                )
                error.__cause__ = broken.error
                return error
        hint = f"{len(self.broken)} plug-in(s) could not be loaded: see `verl-adaptor backends`." if self.broken else ""
        return UnknownBackend(
            f"no {f'{role} ' if role else ''}backend is named {name!r}; {nearest(name, self.names(role))}. {hint}".rstrip()
        )


@functools.cache
def registry() -> Registry:
    """The registry of this process, discovered at first use. ``registry.cache_clear()`` makes it look again."""
    return Registry.discover()


def get_spec(name: str, role: Role | None = None) -> BackendSpec:
    """What is known about a backend; see `Registry.find`."""
    return registry().find(name, role)


def register(spec: BackendSpec) -> None:
    """Make a backend known in this process only: for notebooks and tests. Packages use the entry point instead."""
    registry().register(spec)


def duplicate_sentence(name: str, claims: Iterable[Entry]) -> str:
    """Who claims the name, and what to do."""
    who = " and ".join(f"{entry.source} (as {entry.spec.name!r})" for entry in claims)
    return f"backend name {name!r} is claimed by {who}; uninstall one, or choose with {PLUGINS_VARIABLE}."


# -- discovery ---------------------------------------------------------------------------------------------------


def _entry_points() -> list[tuple[Source, importlib.metadata.EntryPoint]]:
    """The entry points of our group with where they come from, the built-in ones first."""
    points = importlib.metadata.entry_points(group=hookspecs.GROUP)
    found = [(_source(point), point) for point in points]
    return sorted(found, key=lambda item: (item[0].distribution != BUILT_IN, item[0].distribution, item[1].name))


def _source(point: importlib.metadata.EntryPoint) -> Source:
    """Name and version of the distribution, also where its METADATA file is missing or empty."""
    try:
        metadata: Any = point.dist.metadata if point.dist else {}
        return Source(metadata["Name"] or "(unnamed)", metadata["Version"] or "", point.name)
    except KeyError:
        return Source("(unnamed)", "", point.name)


def _choose(
    found: list[tuple[Source, importlib.metadata.EntryPoint]], chosen: str | None, broken: list[Broken]
) -> list[tuple[Source, importlib.metadata.EntryPoint]]:
    """Those that ``VERL_ADAPTOR_PLUGINS`` admits; a name in it that nothing has is reported, not ignored."""
    if not (chosen or "").strip():
        return found
    wanted = {_normal(name) for name in str(chosen).split(",") if name.strip()} - {"none"}
    for name in sorted(wanted - {_normal(n) for source, _ in found for n in (source.distribution, source.entry_point)}):
        known = nearest(name, (source.distribution for source, _ in found))
        broken.append(Broken(Source(PLUGINS_VARIABLE), LookupError(f"no plug-in is named {name!r}; {known}.")))
    return [
        (source, point)
        for source, point in found
        if _normal(source.distribution) == BUILT_IN
        or {_normal(source.distribution), _normal(source.entry_point)} & wanted
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _specs(entry_point: importlib.metadata.EntryPoint) -> list[BackendSpec]:
    """Load one plug-in and call its hook, in a plug-in manager of its own so that no other's hooks take part."""
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(entry_point.load(), entry_point.name)
    manager.check_pending()
    if not manager.hook.verl_adaptor_backends.get_hookimpls():
        raise BrokenPlugin(f"{entry_point.value} implements no hook; mark verl_adaptor_backends with @hookimpl.")
    answers = manager.hook.verl_adaptor_backends() or [None]  # pluggy drops an answer that is None
    for answer in answers:
        if not isinstance(answer, list | tuple):
            raise BrokenPlugin(f"verl_adaptor_backends returned {answer!r}; it must return a list of BackendSpec.")
    specs = [spec for answer in answers for spec in answer]
    for spec in specs:
        check_spec(spec)
    return specs


# -- what a spec must be -----------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_OBJECT = re.compile(r"[\w.]+:[\w.]+")


def check_spec(spec: object) -> None:
    """Raise `BrokenPlugin` with every fault of a spec."""
    if not isinstance(spec, BackendSpec):
        raise BrokenPlugin(f"{spec!r} is no BackendSpec; verl_adaptor_backends must return a list of BackendSpec.")
    faults = list(_faults(spec))
    if faults:
        raise BrokenPlugin(f"the BackendSpec named {spec.name!r} is wrong: {'; '.join(faults)}.")


def _faults(spec: BackendSpec) -> Iterator[str]:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not isinstance(spec.aliases, tuple):
        yield f"aliases={spec.aliases!r} must be a tuple of names"
    for name in (spec.name, *spec.aliases):
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            yield f"{name!r} is no name (letters, digits and _.+- only)"
    if not spec.roles:
        yield "it has neither an engine nor a trainer"
    for field in ("engine", "trainer", "engine_options", "trainer_options"):
        value = getattr(spec, field)
        if value is not None and not (isinstance(value, str) and _OBJECT.fullmatch(value)):
            yield f"{field}={value!r} must read 'package.module:Name'"
    try:
        SpecifierSet(spec.version_range)
    except (InvalidSpecifier, AttributeError, TypeError):
        yield f"version_range={spec.version_range!r} is no PEP 440 specifier such as '>=1.0,<2.0'"
    if spec.version_range and not spec.distribution:
        yield "version_range needs distribution, whose version it is about"
    if spec.distribution and not spec.install:
        yield "distribution needs install, the command that installs it"
    yield from _capability_faults(spec.capabilities)


def _capability_faults(capabilities: Mapping[Any, Any]) -> Iterator[str]:
    if not isinstance(capabilities, Mapping):
        yield f"capabilities={capabilities!r} must map Capability to Support"
        return
    known = [str(capability) for capability in Capability]
    for key, support in capabilities.items():
        if key not in known:
            yield f"capabilities has the key {key!r}, which is no Capability; {nearest(str(key), known)}"
        if not isinstance(support, Support):
            yield f"capabilities[{key!s}]={support!r} is no Support (use FULL, since, only, unsupported, not_implemented)"
