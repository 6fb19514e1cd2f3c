"""Field ownership: sets of paths, and their form in `metadata.managedFields`.

A path is a tuple of steps in FieldsV1 syntax: `f:spec`, `k:{"name":"c"}`, `v:"x"`. A set contains
the leaves that were set, and the items of lists that merge by key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kubernetes_double.api.resources.schemas import Node, Schema

Object = dict[str, Any]
Path = tuple[str, ...]
Paths = frozenset[Path]

IGNORED = (
    *("name", "namespace", "uid", "creationTimestamp", "generation", "resourceVersion"),
    *("managedFields", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds"),
)
KEY_DEFAULTS = {"protocol": "TCP"}
ITEM = object()
"""The value of a path to a whole list item."""


def key_step(node: Node, item: Any) -> str:
    """The step for an item of a merging list: by its keys, or by its value."""
    keys = node.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(item, dict):
        return f"v:{json.dumps(item, separators=(',', ':'), sort_keys=True)}"
    named = {key: item.get(key, KEY_DEFAULTS.get(key)) for key in keys}
    present = {key: value for key, value in named.items() if value is not None}
    return f"k:{json.dumps(present, separators=(',', ':'), sort_keys=True)}"


def granular(node: Node, value: Any) -> bool:
    """Whether the parts of a value have separate owners."""
    if isinstance(value, dict):
        return bool(value) and node.get("x-kubernetes-map-type") != "atomic"
    if isinstance(value, list):
        return bool(value) and node.get("x-kubernetes-list-type") in ("map", "set")
    return False


def leaves(schema: Schema, obj: Object) -> dict[Path, Any]:
    """Everything in an object that can be owned: path to value."""
    metadata = {k: v for k, v in obj.get("metadata", {}).items() if k not in IGNORED}
    body = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    if metadata:
        body["metadata"] = metadata
    root = schema.resolve(schema.root)
    return dict(_leaves(schema, root, body, ())) if body else {}


def _leaves(schema: Schema, node: Node, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not granular(node, value):
        yield path, value
    elif isinstance(value, dict):
        for name, one in value.items():
            child = schema.child(node, name) or {}
            yield from _leaves(schema, child, one, (*path, f"f:{name}"))
    else:
        item = schema.item(node)
        for one in value:
            step = (*path, key_step(node, one))
            yield step, ITEM
            if isinstance(one, dict):
                yield from _leaves(schema, item, one, step)


@dataclass(frozen=True, slots=True)
class Difference:
    """Paths set and removed by a write."""

    changed: Paths
    removed: Paths


def difference(schema: Schema, old: Object, new: Object) -> Difference:
    """The paths that a write added or changed, and those it removed."""
    before, after = leaves(schema, old), leaves(schema, new)
    changed = {p for p, v in after.items() if p not in before or before[p] != v}
    return Difference(frozenset(changed), frozenset(before.keys() - after.keys()))


def with_parents(paths: Iterable[Path]) -> Paths:
    """A set of paths together with all their parents."""
    return frozenset(path[:end] for path in paths for end in range(1, len(path) + 1))


def to_fields(paths: Paths) -> Object:
    """Convert paths to FieldsV1."""
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for step in path:
            node = node.setdefault(step, {})
    for path in paths:
        node = tree
        for step in path:
            node = node[step]
        if node:
            node["."] = {}
    return tree


def from_fields(tree: Object, path: Path = ()) -> Paths:
    """Parse paths from FieldsV1."""
    found: set[Path] = set()
    for step, below in tree.items():
        if step == ".":
            found.add(path)
        elif below:
            found |= from_fields(below, (*path, step))
        else:
            found.add((*path, step))
    return frozenset(found)


def dotted(path: Path) -> str:
    """A path as in conflict messages: `.spec.containers[name="c"].image`."""
    text = ""
    for step in path:
        kind, _, rest = step.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            pairs = json.loads(rest).items()
            text += f"[{','.join(f'{key}={json.dumps(value)}' for key, value in pairs)}]"
        else:
            text += f"[={rest}]"
    return text


@dataclass(frozen=True, slots=True)
class Manager:
    """One entry of managedFields."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""
    paths: Paths = frozenset()
    time: str = ""

    def same(self, other: Manager) -> bool:
        """Whether both are the same manager of the same subresource."""
        mine = (self.name, self.operation, self.api_version, self.subresource)
        return mine == (other.name, other.operation, other.api_version, other.subresource)

    @property
    def title(self) -> str:
        """The manager as in conflict messages: one that applies has no version there."""
        door = f' with subresource "{self.subresource}"' if self.subresource else ""
        version = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.name}"{door}{version}'


@dataclass
class Managers:
    """All entries of an object."""

    entries: list[Manager] = field(default_factory=list[Manager])

    @staticmethod
    def of(obj: Object) -> Managers:
        """Read the entries of an object, dropping empty ones."""
        return Managers(
            [
                Manager(
                    one.get("manager", ""),
                    one["operation"],
                    one.get("apiVersion", ""),
                    one.get("subresource", ""),
                    from_fields(one.get("fieldsV1", {})),
                    one.get("time", ""),
                )
                for one in obj["metadata"].get("managedFields", ())
                if one.get("operation")
            ]
        )

    def find(self, manager: Manager) -> Manager:
        """The entry of a manager, or an empty one."""
        return next((one for one in self.entries if one.same(manager)), manager)

    def others(self, manager: Manager) -> list[Manager]:
        """All entries except that of this manager."""
        return [one for one in self.entries if not one.same(manager)]

    def give(self, manager: Manager, paths: Paths, lost: Paths) -> Managers:
        """Give `paths` to `manager` and remove `lost` from all others."""
        rest = [replace(one, paths=one.paths - lost) for one in self.others(manager)]
        time = manager.time if self.find(manager).paths != paths else self.find(manager).time
        mine = replace(manager, paths=paths, time=time)
        order = {"Apply": 0, "Update": 1}
        kept = sorted([*rest, mine], key=lambda one: order.get(one.operation, 2))
        return Managers([one for one in kept if one.paths])

    def listed(self) -> list[Object]:
        """The entries as `managedFields`."""
        return [_entry(one) for one in self.entries]


def _entry(one: Manager) -> Object:
    entry: Object = {
        "manager": one.name,
        "operation": one.operation,
        "apiVersion": one.api_version,
        "time": one.time,
        "fieldsType": "FieldsV1",
        "fieldsV1": to_fields(one.paths),
    }
    if one.subresource:
        entry["subresource"] = one.subresource
    return entry


def after_update(
    schema: Schema, managers: Managers, manager: Manager, old: Object, new: Object
) -> Managers:
    """Ownership after a write other than apply: the writer owns the fields it changed."""
    found = difference(schema, old, new)
    mine = (managers.find(manager).paths | found.changed) - found.removed
    return managers.give(manager, mine, found.changed | found.removed)
