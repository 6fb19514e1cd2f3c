"""Recipes: fragments of a job file with a published method's parts and defaults.

A job that names recipes gets their values wherever it has none of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from paceline.config.base import KIND_CHARS
from paceline.config.documents import read_yaml
from paceline.errors import ConfigError, InvalidError
from paceline.errors.wording import shown
from paceline.plugins import Method, registry

MAX_RECIPES = 16
JOINED = frozenset(
    {
        "reward",
        "experience.filters",
        "experience.advantage_shaping",
        "trainer.objective.shaping",
        "trainer.objective.corrections",
        "trainer.objective.regularisers",
        "trainer.hooks",
    }
)
"""Lists of which every recipe may add its own entries; other values can have one only."""
APPENDED = frozenset({"reward"})
"""Lists to which recipes add even where the job has its own: what it must have anyway."""

Fragment = Mapping[str, Any]
_ABSENT = object()
_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Recipe:
    """An installed recipe."""

    name: str
    method: Method
    about: str  # docstring of the method's package
    text: str  # its YAML file

    @property
    def title(self) -> str:
        """The first line of the method's description, without a period."""
        return self.about.partition("\n")[0].rstrip(".")

    def fragment(self) -> dict[str, Any]:
        """The values of a job file that it sets.

        Raises:
            InvalidError: its file is not a mapping in YAML.
        """
        return _read(self.text, self.name)


def _read(text: str, name: str) -> dict[str, Any]:
    recipe = read_yaml(text, what=f"recipe {name!r}")
    if not isinstance(recipe, dict):
        raise InvalidError(f"recipe {name!r}: its file has no mapping of fields")
    for field in sorted(JOINED):
        if not isinstance(_at(recipe, field, []), list):
            raise InvalidError(f"recipe {name!r}: its {field} is not a list")
    return cast(dict[str, Any], recipe)


@cache
def recipe(name: str) -> Recipe:
    """An installed recipe by name; imports the package of its method.

    Raises:
        InvalidError: there is none of this name, there are two, or it cannot be read.
    """
    installed = registry.get("recipes", name)
    if installed is None:
        raise InvalidError(f"{shown(name)} is not installed; {_instead_of(name)}")
    try:
        method = installed.load()
        if not isinstance(method, Method):
            raise TypeError(f"{installed.target} is not a Method")
        text = (files(installed.module) / method.recipe).read_text(encoding="utf-8")
    except (ImportError, AttributeError, TypeError, OSError, ValueError) as error:
        raise InvalidError(f"{name!r} cannot be read: {error}") from None
    return Recipe(name, method, inspect.getdoc(sys.modules[installed.module]) or name, text)


def has_own_recipes(raw: Any) -> bool:
    """Whether a decoded job file names recipes that are files beside it."""
    return isinstance(raw, dict) and any(map(_is_file, _names(cast(Fragment, raw).get("recipe"))))


def with_recipes(raw: Any, *, folder: Path | None = None) -> Any:
    """A decoded job file with the values of its recipes wherever it has none of its own.

    `folder`: where recipes are whose names end in `.yaml`; the result no longer names these. None:
    there are none, as in an installation.

    Recipes follow each other from left to right: lists in `JOINED` are joined, other values must be
    equal unless the job has its own. The result has the same recipes and laying them again changes
    nothing. What is not a job with recipes is returned as it is, for validation to refuse.

    Raises:
        ConfigError: a recipe is not installed, or two set a value differently.
    """
    if not isinstance(raw, dict):
        return raw
    job = cast(dict[str, Any], raw)
    names = _names(job.get("recipe"))
    if not names:
        return job
    try:
        left = [(name, _left_to(_fragment(name, folder), job)) for name in names]
    except InvalidError as error:
        raise ConfigError(f"recipe: {error.message}") from None
    composed: dict[str, Any] = {}
    for index, (_, fragment) in enumerate(left):
        _compose(composed, fragment, left[: index + 1])
    resolved = _under(job, composed)
    if folder is not None and any(map(_is_file, names)):
        resolved["recipe"] = [name for name in names if not _is_file(name)]
    return resolved


def _is_file(name: str) -> bool:
    return name.endswith(_FILES)


def _fragment(name: str, folder: Path | None) -> dict[str, Any]:
    if folder is None or not _is_file(name):
        return recipe(name).fragment()
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidError(f"{folder / name}: no such file") from None
    except (OSError, ValueError) as error:
        raise InvalidError(f"{folder / name}: {error}") from None
    return _read(text, name)


def _names(value: Any) -> Sequence[str]:
    names: Any = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or len(cast("list[Any]", names)) > MAX_RECIPES:
        return ()
    entries = cast("list[Any]", names)
    fit = all(isinstance(entry, str) and len(entry) <= KIND_CHARS for entry in entries)
    return entries if fit else ()


def _left_to(fragment: Fragment, job: Fragment, path: str = "") -> dict[str, Any]:
    """The values of a recipe's fragment that the job does not set itself."""
    left: dict[str, Any] = {}
    for key, value in fragment.items():
        field = f"{path}{key}"
        if key not in job:
            left[key] = value
        elif field in APPENDED:
            left[key] = [item for item in value if _part(item) not in _parts(job[key])]
        elif (own := _mapping(job[key], like=value)) is not None and _same_kind(own, value):
            kind = {"kind": value["kind"]} if "kind" in value else {}
            left[key] = kind | _left_to(value, own, f"{field}.")
    return left


def _compose(
    into: dict[str, Any], fragment: Fragment, so_far: Sequence[tuple[str, Fragment]], path: str = ""
) -> None:
    """Add a fragment to those before it; `so_far` has all of them by name, for messages."""
    for key, value in fragment.items():
        field = f"{path}{key}"
        below: Any = into.get(key, _ABSENT)
        if below is _ABSENT:
            into[key] = _copied(value)
        elif field in JOINED:
            into[key] = [*below, *(item for item in value if _is_new(item, below, field, so_far))]
        elif isinstance(below, dict) and (more := _mapping(value, like=below)) is not None:
            if not _same_kind(below, more):
                raise _conflict(field, so_far, (below, more))
            _compose(cast(dict[str, Any], below), more, so_far, f"{field}.")
        elif below != value:
            raise _conflict(field, so_far, (below, value))


def _is_new(
    entry: Any, among: Sequence[Any], field: str, so_far: Sequence[tuple[str, Fragment]]
) -> bool:
    """Whether no entry is of the same plug-in; raises if one is, with other options."""
    for other in among:
        if _part(other) == _part(entry):
            if _spec(other) != _spec(entry):
                raise _conflict(field, so_far, (other, entry))
            return False
    return True


def _under(job: Fragment, below: Fragment, path: str = "") -> dict[str, Any]:
    """The job's values over others, in the job's order."""
    merged = dict(job)
    for key, value in below.items():
        field = f"{path}{key}"
        if key not in merged:
            merged[key] = value
        elif field in APPENDED and isinstance(merged[key], list):
            merged[key] = [*merged[key], *value]
        elif (own := _mapping(merged[key], like=value)) is not None:
            merged[key] = _under(own, value, f"{field}.")
    return merged


def _conflict(
    field: str, so_far: Sequence[tuple[str, Fragment]], values: tuple[Any, Any]
) -> ConfigError:
    first = next(name for name, fragment in so_far if _at(fragment, field, _ABSENT) is not _ABSENT)
    both = " and ".join(shown(value) for value in values)
    return ConfigError(
        f"recipe: {first!r} and {so_far[-1][0]!r} set {field} to {both}; set it in the job itself"
    )


def _at(fragment: Any, field: str, default: Any) -> Any:
    """The value of a dotted field."""
    for key in field.split("."):
        if not isinstance(fragment, dict) or key not in fragment:
            return default
        fragment = cast(dict[str, Any], fragment)[key]
    return fragment


def _mapping(value: Any, *, like: Any) -> dict[str, Any] | None:
    """A section as a mapping; a plug-in may be written as its name. None if it is neither."""
    if not isinstance(like, dict):
        return None
    if isinstance(value, dict):
        return cast(dict[str, Any], value)
    return {"kind": value} if isinstance(value, str) and "kind" in like else None


def _same_kind(one: Fragment, other: Fragment) -> bool:
    return one.get("kind") == other.get("kind") or "kind" not in one or "kind" not in other


def _parts(entries: Any) -> list[Any]:
    return (
        [_part(entry) for entry in cast("list[Any]", entries)] if isinstance(entries, list) else []
    )


def _part(entry: Any) -> Any:
    """The identity of an entry in its list: `name`, as parts of the reward have it, or `kind`."""
    spec = _spec(entry)
    return spec.get("name") or spec.get("kind") if isinstance(spec, dict) else spec


def _spec(entry: Any) -> Any:
    return {"kind": entry} if isinstance(entry, str) else entry


def _copied(value: Any) -> Any:
    """A value whose mappings can be added to."""
    if not isinstance(value, dict):
        return value
    return {key: _copied(item) for key, item in cast(dict[str, Any], value).items()}


def _instead_of(name: str) -> str:
    installed = sorted(registry.installed("recipes"))
    close = get_close_matches(name, installed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"installed: {', '.join(installed)}"
