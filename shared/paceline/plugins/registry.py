"""Finds plug-ins by entry-point name, and a job's own code by `module:attribute`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.errors import InvalidError
from paceline.plugins.environments import EnvironmentPlugin
from paceline.plugins.loading import attribute

KINDS = (
    "environments",
    "topologies",
    "transforms",
    "rewards",
    "filters",
    "samplers",
    "allocators",
    "replays",
    "advantages",
    "proximals",
    "shapings",
    "corrections",
    "surrogates",
    "regularisers",
    "aggregations",
    "hooks",
    "engines",
    "trackers",
)
SLOTS = (
    *("proximals", "shapings", "corrections", "surrogates", "regularisers", "aggregations"),
    "hooks",
)
"""Kinds that the objective of a trainer is made of, and hooks of its steps."""
# Kinds that a job file without code may name as `module:attribute`: rewards run in child processes
# of reward workers, slots of the objective in the job's own trainer. The others run in processes
# that jobs share, or belong to the installation.
FROM_MODULES = frozenset({"rewards", *SLOTS})


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Entry points of one plural kind (`rewards`, `filters`, ...), by name."""
    return {point.name: point for point in entry_points(group=f"paceline.{kind}")}


def find(kind: str, name: str) -> Any:
    """Import the plug-in `name` of a kind.

    Raises:
        InvalidError: no such plug-in is installed, the kind does not allow `module:attribute`, or
            the module lacks the attribute.
    """
    check(kind, name)
    if ":" not in name:
        return installed(kind)[name].load()
    try:
        return attribute(name)
    except InvalidError as error:
        raise InvalidError(f"{kind}: {error}") from None


def environment(name: str) -> EnvironmentPlugin:
    """The descriptor of an environment; imports neither its tasks nor its world.

    Raises:
        InvalidError: no such plug-in is installed, or it is not an `EnvironmentPlugin`.
    """
    found = find("environments", name)
    if not isinstance(found, EnvironmentPlugin):
        raise InvalidError(f"environments: {name!r} is not an EnvironmentPlugin but {found!r}")
    return found


def target(kind: str, name: str) -> str:
    """The `module:attribute` of an installed plug-in; raises as `check`."""
    check(kind, name)
    return installed(kind)[name].value


def options_of(kind: str, name: str) -> Any:
    """What describes a plug-in's options (see `paceline.config.options`); None: nothing."""
    if kind == "environments":
        target = environment(name).options
        return attribute(target) if target else None
    point = installed(f"options.{kind}").get(name)
    return None if point is None else point.load()


def check(kind: str, name: str) -> None:
    """Raise `InvalidError` if `name` is not a plug-in of this kind, without importing it."""
    module, colon, attribute = name.partition(":")
    if name in installed(kind) or (kind in FROM_MODULES and module and attribute):
        return
    known = ", ".join(sorted(installed(kind))) or "none"
    hint = "; without code, only rewards and slots of the objective may be module:attribute"
    raise InvalidError(
        f"{kind}: {name!r} is not installed; installed: {known}{hint if colon else ''}"
    )
