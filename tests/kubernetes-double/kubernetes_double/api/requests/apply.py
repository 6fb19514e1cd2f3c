"""Server-side apply: merges a manager's fields, drops abandoned ones, detects conflicts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from kubernetes_double.api.policy.ownership import (
    Manager,
    Managers,
    Path,
    Paths,
    difference,
    dotted,
    granular,
    key_step,
    leaves,
    with_parents,
)
from kubernetes_double.api.requests.errors import StatusError, cause
from kubernetes_double.api.resources.schemas import Node, Schema

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Applied:
    """The object after an apply, with its field ownership."""

    value: Object
    managers: Managers


def apply(
    schema: Schema,
    live: Object,
    wanted: Object,
    manager: Manager,
    *,
    managers: Managers,
    force: bool = False,
) -> Applied:
    """Apply `wanted` for a manager.

    Raises:
        StatusError: 409, a field owned by another manager would change (unless `force`).
    """
    root = schema.resolve(schema.root)
    merged: Object = _merge(schema, root, live, wanted)
    mine = frozenset(leaves(schema, wanted))
    others: Paths = frozenset[Path]().union(*(one.paths for one in managers.others(manager)))
    last = with_parents(managers.find(manager).paths)
    gone = last - with_parents(mine) - with_parents(others)
    merged = _prune(schema, root, merged, gone, ())
    found = difference(schema, live, merged)
    disputes = {one: one.paths & found.changed for one in managers.others(manager)}
    disputes = {one: paths for one, paths in disputes.items() if paths}
    if disputes and not force:
        raise _refusal(disputes)
    return Applied(merged, managers.give(manager, mine, found.changed | found.removed))


def _refusal(disputes: dict[Manager, Paths]) -> StatusError:
    """A conflict as apimachinery words it, `pkg/util/managedfields/internal/conflict.go`."""
    conflicts = [(one.title, dotted(path)) for one in disputes for path in sorted(disputes[one])]
    causes = [
        cause("FieldManagerConflict", f"conflict with {title}", path) for title, path in conflicts
    ]
    if len(conflicts) == 1:
        ((title, path),) = conflicts
        message = f"Apply failed with 1 conflict: conflict with {title}: {path}"
    else:
        lines = [
            line
            for one in sorted(disputes, key=lambda one: one.name)
            for line in (
                f"conflicts with {one.title}:",
                *(f"- {dotted(path)}" for path in sorted(disputes[one])),
            )
        ]
        message = f"Apply failed with {len(conflicts)} conflicts: " + "\n".join(lines)
    return StatusError(409, "Conflict", message, details={"causes": causes})


def _merge(schema: Schema, node: Node, live: Any, wanted: Any) -> Any:
    if isinstance(wanted, dict) and isinstance(live, dict):
        if wanted and not granular(node, wanted):
            return copy.deepcopy(wanted)
        merged: Object = dict(live)
        for name, value in wanted.items():
            child = schema.child(node, name) or {}
            merged[name] = _merge(schema, child, live.get(name), value)
        return merged
    if isinstance(wanted, list) and isinstance(live, list) and granular(node, wanted):
        return _merge_items(schema, node, live, wanted)
    return copy.deepcopy(wanted)


def _merge_items(schema: Schema, node: Node, live: list[Any], wanted: list[Any]) -> list[Any]:
    """Merge lists: applied items in their order, the others at their positions."""
    item = schema.item(node)
    old = {key_step(node, one): one for one in live}
    new = {key_step(node, one): one for one in wanted}
    merged: list[Any] = []
    waiting = iter(new.items())
    for key, one in old.items():
        if key not in new:
            merged.append(one)
            continue
        for name, value in waiting:
            merged.append(_merge(schema, item, old.get(name), value))
            if name == key or name in old:
                break
    merged.extend(_merge(schema, item, old.get(name), value) for name, value in waiting)
    return merged


def _prune(schema: Schema, node: Node, value: Any, gone: Paths, path: Path) -> Any:
    if not gone or not granular(node, value):
        return value
    if isinstance(value, dict):
        kept = {
            name: _prune(schema, schema.child(node, name) or {}, one, gone, (*path, f"f:{name}"))
            for name, one in value.items()
            if (*path, f"f:{name}") not in gone
        }
        return kept
    item = schema.item(node)
    steps = [((*path, key_step(node, one)), one) for one in value]
    return [_prune(schema, item, one, gone, step) for step, one in steps if step not in gone]
