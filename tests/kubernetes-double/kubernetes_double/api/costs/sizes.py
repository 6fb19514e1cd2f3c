"""Bounds on the size of values: from a schema, and by range arithmetic.

Sizes from a schema, and defaults where it declares none: apiserver,
`pkg/cel/common/schemas.go` and `pkg/cel/limits.go`. Ranges: cel-go, `checker/cost.go`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kubernetes_double.api.resources.schemas import Node

REQUEST_BYTES = 3 * 1024 * 1024
"""The largest request that a server accepts, which bounds sizes that the schema does not."""
MOST = 2**64 - 1
"""Costs and sizes are 64-bit and saturate."""
_TEXT_BYTES = 2
_FORMATS = {
    # CEL type, maximum text length, minimum bytes in JSON.
    "duration": ("duration", 32, 3),
    "date": ("timestamp", 12, 12),
    "date-time": ("timestamp", 32, 21),
}


class Size(NamedTuple):
    """A range of sizes: characters of text, bytes, list items or map entries."""

    low: int
    high: int

    def plus(self, other: Size) -> Size:
        """The size of both together."""
        return Size(min(self.low + other.low, MOST), min(self.high + other.high, MOST))

    def times(self, other: Size) -> Size:
        """The product of both sizes."""
        return Size(min(self.low * other.low, MOST), min(self.high * other.high, MOST))

    def or_else(self, other: Size) -> Size:
        """The range that covers both sizes."""
        return Size(min(self.low, other.low), max(self.high, other.high))


UNKNOWN = Size(0, MOST)
SCALAR = Size(1, 1)


def scaled(amount: int, factor: float) -> int:
    """A fraction of an amount, rounded up in floating point like the server."""
    return min(math.ceil(float(amount) * factor), MOST)


@dataclass(frozen=True)
class Kind:
    """A CEL type with the size bounds from a schema."""

    name: str
    most: int = 0
    """The size of the largest value; none for numbers, booleans and objects with listed fields."""
    least_bytes: int = 1
    """Size of the smallest value in JSON."""
    item: Kind | None = None
    """Type of a list's items or a map's values."""
    fields: Mapping[str, Kind] = field(default_factory=dict[str, "Kind"])

    @property
    def scalar(self) -> bool:
        """Whether all values have the same size."""
        return self.name in ("bool", "int", "uint", "double", "timestamp", "duration")


DYN, TEXT, BYTES = Kind("dyn"), Kind("string", 0, _TEXT_BYTES), Kind("bytes", 0, _TEXT_BYTES)
BOOL, INT, DOUBLE = Kind("bool", 0, 4), Kind("int"), Kind("double")
_NUMBERS = {"boolean": BOOL, "integer": INT, "number": DOUBLE}


def declared(node: Node, *, whole: bool = False) -> Kind | None:
    """The type of a schema, None if hidden from rules; `whole` for a root with metadata."""
    if node.get("x-kubernetes-int-or-string"):
        return Kind("dyn", _length(node))
    kind = node.get("type")
    if kind == "array":
        return _list(node)
    if kind == "object":
        rest = node.get("additionalProperties")
        return _map(node, rest) if isinstance(rest, dict) else _object(node, whole)
    return _text(node) if kind == "string" else _NUMBERS.get(str(kind))


def _child(node: Node) -> Kind | None:
    return declared(node, whole=bool(node.get("x-kubernetes-embedded-resource")))


def _length(node: Node) -> int:
    """Maximum length of text; a character may take four bytes."""
    if "maxLength" in node:
        return max(int(node["maxLength"]), 0) * 4
    return REQUEST_BYTES - _TEXT_BYTES


def _text(node: Node) -> Kind:
    form = node.get("format", "")
    if form == "byte":
        most = int(node.get("maxLength", REQUEST_BYTES - _TEXT_BYTES))
        return Kind("bytes", max(most, 0), _TEXT_BYTES)
    if form in _FORMATS:
        return Kind(*_FORMATS[form])
    if node.get("enum") and "maxLength" not in node:
        longest = max(
            (len(one.encode()) for one in node["enum"] if isinstance(one, str)), default=0
        )
        return Kind("string", longest, _TEXT_BYTES)
    return Kind("string", _length(node), _TEXT_BYTES)


def _list(node: Node) -> Kind | None:
    item = _child(node.get("items") or {})
    if item is None:
        return None
    fit = (REQUEST_BYTES - 2) // (item.least_bytes + 1)
    return Kind("list", max(int(node.get("maxItems", fit)), 0), 2, item)


def _map(node: Node, rest: Node) -> Kind | None:
    value = _child(rest)
    if value is None:
        return None
    # Besides its value, an entry has a key, quotes, a colon and a comma.
    fit = (REQUEST_BYTES - 2) // (value.least_bytes + 6)
    return Kind("map", max(int(node.get("maxProperties", fit)), 0), 2, value)


def _object(node: Node, whole: bool) -> Kind:
    properties: Mapping[str, Node] = node.get("properties") or {}
    if whole:
        properties = _with_metadata(properties)
    fields = {name: kind for name, one in properties.items() if (kind := _child(one))}
    needed = {
        name: kind
        for name, kind in fields.items()
        if name in node.get("required", ()) and "default" not in properties[name]
    }
    least = 2 + sum(len(name) + kind.least_bytes + 4 for name, kind in needed.items())
    return Kind("object", 0, least, fields={_escaped(name): kind for name, kind in fields.items()})


def _with_metadata(properties: Mapping[str, Node]) -> Mapping[str, Node]:
    """Properties at the root as visible to rules.

    Names are unbounded unless the schema declares a bound: the estimate limits them to 253
    characters only from 1.37 on, and definitions must also work on older servers.
    """
    text = {"type": "string"}
    inner = properties.get("metadata", {}).get("properties") or {}
    places = (
        (properties, "kind"),
        (properties, "apiVersion"),
        (inner, "name"),
        (inner, "generateName"),
    )
    if all(place.get(name, {}).get("type") == "string" for place, name in places):
        return properties
    metadata = {"type": "object", "properties": {"name": text, "generateName": text}}
    return {**properties, "kind": text, "apiVersion": text, "metadata": metadata}


_KEYWORD = re.compile(
    "true|false|null|in|as|break|const|continue|else|for|function|if|import|let|loop|package|"
    "namespace|return|var|void|while"
)
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))


def _escaped(name: str) -> str:
    """A field's name as escaped in rules (apiserver, `pkg/cel/escaping.go`)."""
    if _KEYWORD.fullmatch(name):
        return f"__{name}__"
    for plain, escape in _ESCAPES:
        name = escape.join(name.split(plain))
    return name
