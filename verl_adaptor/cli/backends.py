"""``verl-adaptor backends``: every backend, where it comes from, whether it is usable here, and what it can do.

Reads specs and package metadata only; no framework is imported.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from verl_adaptor.capabilities import BackendSpec, Capability
from verl_adaptor.preflight.versions import in_range, installed
from verl_adaptor.registry import Entry, Registry, duplicate_sentence, registry


def backends(*, as_json: bool = False) -> None:
    """Print the listing, as tables or as one JSON object."""
    listing = describe(registry())
    if as_json:
        print(json.dumps(listing, indent=2))
    else:
        _print_tables(listing)


def describe(known: Registry) -> dict[str, Any]:
    """The listing as built-ins: ``backends``, ``broken`` plug-ins and ``duplicates``."""
    return {
        "backends": [_describe(entry, known) for entry in known.entries],
        "broken": [
            {
                "distribution": broken.source.distribution,
                "version": broken.source.version,
                "entry_point": broken.source.entry_point,
                "error": f"{type(broken.error).__name__}: {broken.error}",
            }
            for broken in known.broken
        ],
        "duplicates": [
            {
                "name": name,
                "distributions": [str(entry.source) for entry in claims],
                "error": duplicate_sentence(name, claims),
            }
            for name, claims in known.duplicates().items()
        ],
    }


def _describe(entry: Entry, known: Registry) -> dict[str, Any]:
    spec, framework = entry.spec, installed(entry.spec)
    taken = known.duplicates()
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "summary": spec.summary,
        "roles": list(spec.roles),
        "status": "duplicate name" if spec.name in taken else status(spec),
        "distribution": entry.source.distribution,
        "distribution_version": entry.source.version,
        "framework": framework.distribution if framework else spec.distribution,
        "framework_version": framework.version if framework else None,
        "supported_range": spec.version_range,
        "install": spec.install,
        "capabilities": {str(c): str(spec.support(c)) for c in Capability},
        "zero_stages": list(spec.zero_stages),
        "gradient_syncs": list(spec.gradient_syncs),
        "process_effects": list(spec.process_effects),
    }


def status(spec: BackendSpec) -> str:
    """``ok``, ``not installed`` or ``version outside``: whether the factory would take this backend here."""
    framework = installed(spec)
    if framework is None:
        return "not installed" if spec.distribution else "ok"
    return "ok" if in_range(framework.version, spec.version_range) else "version outside"


# -- tables ------------------------------------------------------------------------------------------------------


def _print_tables(listing: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    table = Table("backend", "aliases", "roles", "status", "from", "framework", "supported", "install")
    for row in listing["backends"]:
        framework = " ".join(filter(None, (row["framework"], row["framework_version"])))
        origin = " ".join(filter(None, (row["distribution"], row["distribution_version"])))
        cure = "" if row["status"] == "ok" else row["install"]
        cells = (row["name"], ", ".join(row["aliases"]), ", ".join(row["roles"]), row["status"], origin, framework)
        table.add_row(*cells, row["supported_range"], cure)
    console.print(table)
    console.print(_capability_table(listing["backends"]))
    for broken in listing["broken"]:
        where = " ".join(filter(None, (broken["distribution"], broken["version"], broken["entry_point"])))
        console.print(f"broken plug-in {where}: {broken['error']}", soft_wrap=True)
    for duplicate in listing["duplicates"]:
        console.print(duplicate["error"], soft_wrap=True)


def _capability_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("capability", *(row["name"] for row in rows))
    for capability in Capability:
        table.add_row(str(capability), *(Text(row["capabilities"][capability]) for row in rows))
    return table
