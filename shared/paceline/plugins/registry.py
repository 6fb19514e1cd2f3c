"""Finds plug-ins by entry-point name, and functions that an operator has listed.

Whatever a job names is found here, except what is in its own code, which only sealed processes of
that job import.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.errors import InvalidError, UnlistedError
from paceline.extras import not_installed
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
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
# Kinds that an operator may list functions for: rewards run in child processes of reward workers,
# slots of the objective in the job's own trainer. The others run in processes that jobs share, or
# belong to the installation.
FROM_MODULES = frozenset({"rewards", *SLOTS})


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """Entry points of one plural kind (`rewards`, `filters`, ...), by name.

    Without those whose name has a colon: such a name always is `module:attribute`.
    """
    points = entry_points(group=f"paceline.{kind}")
    return {point.name: point for point in points if ":" not in point.name}


def find(kind: str, name: str, *, allowed: AllowedTargets = NO_TARGETS) -> Any:
    """Import the plug-in `name` of a kind, or a function that is `allowed`.

    Raises:
        InvalidError: as `check`, or the module lacks the attribute.
        ModuleNotFoundError: the plug-in needs a package that is not installed here.
    """
    check(kind, name, allowed=allowed)
    try:
        return attribute(name) if ":" in name else installed(kind)[name].load()
    except ModuleNotFoundError as error:
        told = f"{kind}: {name!r}: {not_installed(error)}"
        raise ModuleNotFoundError(told, name=error.name) from None
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


def target(kind: str, name: str, *, allowed: AllowedTargets = NO_TARGETS) -> str:
    """The `module:attribute` of what `find` imports; raises as `check`."""
    check(kind, name, allowed=allowed)
    return name if ":" in name else installed(kind)[name].value


def options_of(kind: str, name: str) -> Any:
    """What describes a plug-in's options (see `paceline.config.options`); None: nothing."""
    if kind == "environments":
        target = environment(name).options
        return attribute(target) if target else None
    point = installed(f"options.{kind}").get(name)
    return None if point is None else point.load()


def check(kind: str, name: str, *, allowed: AllowedTargets = NO_TARGETS) -> None:
    """Check that a job may name a plug-in of a kind, without importing it.

    Raises:
        UnlistedError: it is a function of a module that is not `allowed`.
        InvalidError: no such plug-in is installed.
    """
    if name in installed(kind) or (kind in FROM_MODULES and name in allowed):
        return
    known = ", ".join(sorted(installed(kind))) or "none"
    if ":" in name and kind in FROM_MODULES:
        own = "name a folder of yours with it as `code: {path: ...}`, " if kind == "rewards" else ""
        raise UnlistedError(
            f"{kind}: {name!r} is not a function that jobs may name here; {own}install it as a "
            "plug-in, or have the operator list it in `plugins.allowed` of the settings "
            f"(`--allow {name}` of paceline run, up and validate); listed: {allowed}; "
            f"installed: {known}"
        )
    hint = "; of installed modules, only rewards and slots of the objective may be named"
    raise InvalidError(
        f"{kind}: {name!r} is not installed; installed: {known}{hint if ':' in name else ''}"
    )
