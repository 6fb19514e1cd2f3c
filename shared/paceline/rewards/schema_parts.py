"""What a JSON schema refers to and matches with, checked before it validates anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_REFERENCES = ("$ref", "$dynamicRef")


def check_parts(schema: dict[str, Any], kind: Any) -> None:
    """Check what the metaschema leaves open: references, what they lead to, and patterns.

    Args:
        schema: fits its metaschema.
        kind: its validator class.

    Raises:
        ValueError: a reference leads nowhere, or a pattern does not compile.
        jsonschema.exceptions.SchemaError: what a reference leads to is no schema.
    """
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012, specification_with

    meta = kind.META_SCHEMA
    dialect = specification_with(str(meta.get("$id", meta.get("id"))), default=DRAFT202012)
    root = dialect.create_resource(schema)
    uri = root.id() or ""
    # Otherwise each reference to an anchor would search the whole schema for it.
    registry = Registry[Any]().with_resource(uri, root).crawl()
    seen, targets = set[int](), [(root, registry.resolver(uri))]
    while targets:
        resource, resolver = targets.pop()
        if id(resource.contents) in seen:
            continue
        if resource is not root:  # it may be where the metaschema expects no schema
            kind.check_schema(resource.contents)
        for part, at in _parts(resource, resolver, seen):
            _check_patterns(part)
            for text in (part[each] for each in _REFERENCES if isinstance(part.get(each), str)):
                found = _target(at, text)
                targets.append((dialect.create_resource(found.contents), found.resolver))


def _parts(resource: Any, resolver: Any, seen: set[int]) -> Iterator[tuple[dict[str, Any], Any]]:
    """All schemas within one that are objects, each with what resolves its references."""
    pending = [(resource, resolver)]
    while pending:
        each, at = pending.pop()
        seen.add(id(each.contents))
        if isinstance(each.contents, dict):
            yield each.contents, at
            pending += [(inner, at.in_subresource(inner)) for inner in each.subresources()]


def _target(resolver: Any, text: str) -> Any:
    from referencing.exceptions import Unresolvable

    try:
        found = resolver.lookup(text)
    except (Unresolvable, ValueError, TypeError):  # the latter two: of pointers into other values
        raise ValueError(f"$ref {text[:200]!r} leads nowhere in the schema") from None
    return found


def _check_patterns(part: dict[str, Any]) -> None:
    for pattern in (part.get("pattern"), *(part.get("patternProperties") or ())):
        if not isinstance(pattern, str):
            continue
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {pattern[:200]!r}: {error}") from None
