"""The one hook.

A plug-in is a distribution with an entry point in the group ``verl_adaptor`` that names a module holding

    @verl_adaptor.hookspecs.hookimpl
    def verl_adaptor_backends():
        return [BackendSpec(name="mine", engine="my_package.engine:MyEngine", ...)]

The built-in backends come in by the same door.
"""

from __future__ import annotations

import pluggy

from verl_adaptor.capabilities import BackendSpec

GROUP = "verl_adaptor"
"""Name of the entry-point group and of the pluggy project."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def verl_adaptor_backends() -> list[BackendSpec]:  # type: ignore[empty-body]
    """The backends this distribution offers. Runs at discovery: build specs, import no framework."""
