"""Which version of a framework is installed, and whether it was measured to work. Looks at metadata, imports nothing."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from verl_adaptor.capabilities import BackendSpec, Role, Support, SupportLevel
from verl_adaptor.errors import BackendNotInstalled, BackendVersionError

UNMEASURED = "VERL_ADAPTOR_UNMEASURED"
"""Set to 1, this variable lets versions outside their measured range in, with a warning: how a new version is measured."""

logger = logging.getLogger(__name__)


class Framework(NamedTuple):
    """An installed framework."""

    distribution: str
    version: str


def installed(spec: BackendSpec) -> Framework | None:
    """The first of the spec's alternative distributions that is installed; None if none is, or the spec names none."""
    for name in filter(None, (part.strip() for part in spec.distribution.split("|"))):
        try:
            return Framework(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def in_range(version: str, version_range: str) -> bool:
    """PEP 440, pre-releases included; what is no version is outside of any range.

    >>> in_range("2.13.0+cpu", ">=2.9,<2.14"), in_range("5.20.0", ">=5.5,<5.20"), in_range("main", ">=1")
    (True, False, False)
    """
    try:
        return not version_range or SpecifierSet(version_range).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def check_version(spec: BackendSpec) -> Framework | None:
    """The installed framework, inside the measured range (C01).

    Raises:
        BackendNotInstalled: none of the spec's distributions is installed.
        BackendVersionError: the installed version is outside the range, and `UNMEASURED` is not set.
    """
    found = installed(spec)
    if found is None and spec.distribution:
        missing = importlib.metadata.PackageNotFoundError(spec.distribution)
        wanted = spec.distribution.replace("|", " or ")
        raise BackendNotInstalled(
            f"backend {spec.name!r} needs {wanted}, which is not installed; install it with: {spec.install}"
        ) from missing
    if found is not None and not in_range(found.version, spec.version_range):
        fact = (
            f"backend {spec.name!r} was measured to work with {found.distribution} {spec.version_range}, and "
            f"{found.version} is installed"
        )
        if os.environ.get(UNMEASURED, "0") == "0":
            raise BackendVersionError(
                f"{fact}; install one in the range with: {spec.install}. {UNMEASURED}=1 tries it all the same."
            )
        logger.warning("%s; %s lets it in.", fact, UNMEASURED)
    return found


def usable(support: Support, framework: Framework | None, device: str, role: Role) -> bool:
    """True if the capability is there with this version, in this role and, as far as can be told before loading, on this
    device.

    ONLY in a mode, or on a device while `device` is ``auto``, is left to the backend, which sees the machine.
    """
    if support.level == SupportLevel.SINCE and framework is not None:
        return in_range(framework.version, f">={support.detail}")
    if support.level == SupportLevel.ONLY:
        if support.detail in _ROLES:
            return support.detail == role
        chosen = device.partition(":")[0]
        return chosen == "auto" or support.detail not in _DEVICES or chosen == support.detail
    return bool(support)


_DEVICES = ("cpu", "cuda")
_ROLES = ("inference", "training")
