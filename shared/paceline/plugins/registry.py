"""Finds plug-ins by name, and functions that an operator has listed.

A distribution names its plug-ins by descriptors (groups `paceline.methods` and `paceline.plugins`,
see `paceline.plugins.descriptors`), or each by an entry point in `paceline.<kind>`, with one of the
same name in `paceline.options.<kind>` for its options. The latter are found first.

Whatever a job names is found here, except what is in its own code, which only sealed processes of
that job import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel

from paceline.errors import InvalidError, UnlistedError
from paceline.errors.extras import not_installed
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline.plugins.descriptors import DESCRIBED, Method, Plugins
from paceline.plugins.descriptors import KINDS as KINDS
from paceline.plugins.descriptors import SLOTS as SLOTS
from paceline.plugins.environments import EnvironmentPlugin
from paceline.plugins.loading import attribute

# Kinds that an operator may list functions for: rewards run in child processes of reward workers,
# slots of the objective in the job's own trainer. The others run in processes that jobs share, or
# belong to the installation.
FROM_MODULES = frozenset({"rewards", *SLOTS})
_OURS = "paceline"  # the distribution
_DESCRIPTORS: dict[str, type[Plugins] | type[Method]] = {"plugins": Plugins, "methods": Method}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed plug-in or recipe."""

    name: str
    target: str
    """`module:attribute`."""
    point: EntryPoint
    """Leads to it: its own, or that of its descriptor."""
    options: type[BaseModel] | str = ""
    """What describes its options, or `module:attribute` of that; empty if nothing does."""
    rival: str = ""
    """The target of another plug-in that is declared with the same name in the same way."""

    @property
    def module(self) -> str:
        """Of the target."""
        return self.target.partition(":")[0]

    def load(self) -> Any:
        """Import the target; raises whatever its module raises."""
        return _loaded(self.target)

    def load_options(self) -> Any:
        """What describes its options; None if nothing does."""
        if not isinstance(self.options, str):
            return self.options
        return _loaded(self.options) if self.options else None


def _loaded(target: str) -> Any:
    return EntryPoint(name="", value=target, group="").load()


def installed(kind: str) -> dict[str, Installed]:
    """All installed plug-ins of one plural kind (`rewards`, `filters`, ...), or `recipes`, by name.

    Without those whose name has a colon: such a name always is `module:attribute`.
    """
    found: dict[str, Installed] = {}
    for layer in _layers(kind):
        found = {**layer, **found}
    return found


def built_in(kind: str) -> dict[str, Installed]:
    """As `installed`, of those that Paceline itself brings."""
    own = installed(kind).items()
    return {name: each for name, each in own if each.point.dist and each.point.dist.name == _OURS}


def get(kind: str, name: str) -> Installed | None:
    """An installed plug-in or recipe; None if there is none of this name.

    Raises:
        InvalidError: there are two of this name.
    """
    found = next((layer[name] for layer in _layers(kind) if name in layer), None)
    if found is not None and found.rival:
        raise InvalidError(
            f"{kind}: {name!r} is the name of two that are installed, {found.rival} and "
            f"{found.target}; uninstall or rename one of them"
        )
    return found


def unreadable() -> dict[str, str]:
    """What is wrong with the descriptors that cannot be read, by their targets."""
    return {
        target: reason
        for group in _DESCRIPTORS
        for target, reason in _descriptors(group).unreadable.items()
    }


def refresh() -> None:
    """Look for installed plug-ins again."""
    for cached in (_scanned, _plain, _descriptors):
        cached.cache_clear()


@cache
def _scanned() -> Any:  # its type depends on the release of Python
    return entry_points()


def _points(group: str) -> list[EntryPoint]:
    return [*_scanned().select(group=f"paceline.{group}")]


def _layers(kind: str) -> Iterator[Mapping[str, Installed]]:
    """Plug-ins by name; the first of a name counts, so those who find it import no more."""
    yield _plain(kind)
    if kind in DESCRIBED:
        yield from (_descriptors(group).plugins[kind] for group in _DESCRIPTORS)


@cache
def _plain(kind: str) -> dict[str, Installed]:
    """Plug-ins with entry points of their own, and methods, whose names are those of recipes."""
    points = [*_points(kind), *(_points("methods") if kind == "recipes" else ())]
    options = {each.name: each.value for each in _points(f"options.{kind}")}
    return _by_name(
        Installed(each.name, each.value, each, options.get(each.name, ""))
        for each in points
        if ":" not in each.name
    )


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """The descriptors of one group."""

    plugins: Mapping[str, Mapping[str, Installed]]  # by kind and name
    unreadable: Mapping[str, str]  # reasons by target


@cache
def _descriptors(group: str) -> _Descriptors:
    """Import the descriptors of a group. One that cannot be read leaves the others usable."""
    plugins: list[tuple[str, Installed]] = []
    unreadable: dict[str, str] = {}
    for point in _points(group):
        try:
            plugins += [*_declared(point, _DESCRIPTORS[group])]
        except (Exception, SystemExit) as error:  # the supervisor boundary of a descriptor
            unreadable[point.value] = reason = f"{type(error).__name__}: {error}"
            _log.warning("the descriptor %s cannot be read: %s", point.value, reason)
    by_kind = {kind: _by_name(each for own, each in plugins if own == kind) for kind in DESCRIBED}
    return _Descriptors(by_kind, unreadable)


def _declared(
    point: EntryPoint, wanted: type[Plugins] | type[Method]
) -> Iterator[tuple[str, Installed]]:
    """Kinds and plug-ins of a descriptor; raises whatever its module raises."""
    descriptor = point.load()
    if not isinstance(descriptor, wanted):
        raise TypeError(f"it is not a {wanted.__name__} but {descriptor!r}")
    for kind, plugins in descriptor.parts.items():
        for name, plugin in plugins.items():
            options = plugin.options or plugin.target
            if isinstance(options, str):
                options = _absolute(options, point.module)
            yield kind, Installed(name, _absolute(plugin.target, point.module), point, options)


def _absolute(target: str, package: str) -> str:
    return package + target if target.startswith(".") else target


def _by_name(plugins: Iterable[Installed]) -> dict[str, Installed]:
    found: dict[str, Installed] = {}
    for each in plugins:
        other = found.setdefault(each.name, each)
        if other.target != each.target:
            found[each.name] = replace(each, rival=other.target)
    return found


def find(kind: str, name: str, *, allowed: AllowedTargets = NO_TARGETS) -> Any:
    """Import the plug-in `name` of a kind, or a function that is `allowed`.

    Raises:
        InvalidError: as `check`, or the module lacks the attribute.
        ModuleNotFoundError: the plug-in needs a package that is not installed here.
    """
    check(kind, name, allowed=allowed)
    try:
        return attribute(name) if ":" in name else _one(kind, name).load()
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
    return name if ":" in name else _one(kind, name).target


def options_of(kind: str, name: str) -> Any:
    """What describes a plug-in's options (see `paceline.config.options`); None: nothing."""
    if kind == "environments":
        target = environment(name).options
        return attribute(target) if target else None
    plugin = get(kind, name)
    return None if plugin is None else plugin.load_options()


def check(kind: str, name: str, *, allowed: AllowedTargets = NO_TARGETS) -> None:
    """Check that a job may name a plug-in of a kind, without importing it.

    Raises:
        UnlistedError: it is a function of a module that is not `allowed`.
        InvalidError: no such plug-in is installed, or two are.
    """
    if (kind in FROM_MODULES and name in allowed) or get(kind, name) is not None:
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
    unread = "".join(f"; {each} cannot be read: {why}" for each, why in unreadable().items())
    raise InvalidError(
        f"{kind}: {name!r} is not installed; installed: {known}{hint if ':' in name else unread}"
    )


def _one(kind: str, name: str) -> Installed:
    """What `check` accepts and is not a listed function."""
    found = get(kind, name)
    assert found is not None, (kind, name)
    return found
