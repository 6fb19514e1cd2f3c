"""Checks references and patterns of a JSON schema before it validates anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

_REFERENCES = ("$ref", "$dynamicRef")
# Keywords whose schemas are applied to the same value, not to a part of it.
_SAME_VALUE = ("not", "if")
_SAME_VALUE_AFTER_IF = ("then", "else")
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_VALUE_MAPS = ("dependentSchemas", "dependencies")


def check_parts(schema: dict[str, Any], kind: Any) -> None:
    """Check what the metaschema leaves open: references, what they lead to, and patterns.

    Args:
        schema: fits its metaschema.
        kind: its validator class.

    Raises:
        ValueError: a reference leads nowhere or, for the same value, back to itself; or a pattern
            does not compile.
        jsonschema.exceptions.SchemaError: what a reference leads to is no schema.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    meta = kind.META_SCHEMA
    alone = "draft-0" in str(meta.get("$schema"))  # in these nothing beside a $ref counts
    dialect = specification_with(str(meta.get("$id", meta.get("id"))), default=DRAFT202012)
    root = dialect.create_resource(schema)
    uri = root.id() or ""
    # Otherwise each reference to an anchor would search the whole schema for it.
    registry = Registry[Any]().with_resource(uri, root).crawl()
    seen, targets = set[int](), [(root, registry.resolver(uri))]
    applied = dict[int, set[int]]()  # to the same value, by schema
    while targets:
        resource, resolver = targets.pop()
        if id(resource.contents) in seen:
            continue
        if resource is not root:  # it may be where the metaschema expects no schema
            kind.check_schema(resource.contents)
        for part, at in _parts(resource, resolver, seen):
            _check_patterns(part)
            also = applied.setdefault(id(part), set())
            if not (alone and "$ref" in part):
                also.update(map(id, _for_same_value(part)))
            for keyword in _REFERENCES:
                if not isinstance(text := part.get(keyword), str):
                    continue
                target = _target(at, text)
                targets.append((dialect.create_resource(target.contents), target.resolver))
                if keyword == "$ref":  # where others lead depends on what has led to them
                    also.add(id(target.contents))
    try:
        TopologicalSorter(applied).prepare()
    except CycleError:
        raise ValueError("a $ref leads back to itself for the same value") from None


def _parts(resource: Any, resolver: Any, seen: set[int]) -> Iterator[tuple[dict[str, Any], Any]]:
    """All schemas within one that are objects, each with what resolves its references."""
    pending = [(resource, resolver)]
    while pending:
        node, at = pending.pop()
        seen.add(id(node.contents))
        if isinstance(node.contents, dict):
            yield node.contents, at
            pending += [(inner, at.in_subresource(inner)) for inner in node.subresources()]


def _for_same_value(part: dict[str, Any]) -> Iterator[Any]:
    names = (*_SAME_VALUE, *(_SAME_VALUE_AFTER_IF if "if" in part else ()))
    yield from (part[name] for name in names if name in part)
    schemas = [part.get(name) for name in (*_SAME_VALUE_LISTS, *_SAME_VALUE_MAPS)]
    for value in schemas:  # some drafts do not know all of these keywords, and check nothing
        if isinstance(value, list | dict):
            yield from value.values() if isinstance(value, dict) else value


def _target(resolver: Any, text: str) -> Any:
    from referencing.exceptions import Unresolvable

    try:
        target = resolver.lookup(text)
    except (Unresolvable, ValueError, TypeError):  # the latter two: of pointers into other values
        raise ValueError(f"$ref {text[:200]!r} leads nowhere in the schema") from None
    return target


def _check_patterns(part: dict[str, Any]) -> None:
    for pattern in (part.get("pattern"), *(part.get("patternProperties") or ())):
        if not isinstance(pattern, str):
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {pattern[:200]!r}: {error}") from None
