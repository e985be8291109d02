"""Findings on the screen, and whether a command refuses for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verl_adaptor.findings import Finding


def show(findings: Sequence[Finding], *, as_json: bool, **facts: Any) -> bool:
    """Print them; True if none is an error.

    Args:
        findings: in the order they are to be read.
        as_json: one object, with `facts` beside ``findings``.
        facts: what was looked at.
    """
    if as_json:
        print(json.dumps({**facts, "findings": [asdict(f) for f in findings]}, indent=2))
    for f in findings if not as_json else ():
        print(f"{f.severity:8} {f.id:18} {f.fact}" + (f" ({', '.join(f.reports)})" if f.reports else ""))
        if f.cure:
            print(f"{'':28}cure: {f.cure}")
    return all(f.severity != "error" for f in findings)
