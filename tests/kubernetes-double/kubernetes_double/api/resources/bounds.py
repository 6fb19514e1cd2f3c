"""Whole numbers of a custom kind and their bounds, as the server compares them.

`minimum` and `maximum` of a definition are float64. Before the server compares a value with one, it
writes the bound with the digits that identify it and reads that as a number of the field's type and
format (kube-openapi, `pkg/validation/validate/values.go`, `IsValueValidAgainstRange`). A bound of
2^63 - 1 becomes 9223372036854776000, which is no int64: every object with the field is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

Node = dict[str, Any]
BITS = {"int32": 32, "int64": 64}


def boundary_problems(node: Node, value: Any, path: str = "") -> Iterator[str]:
    """What the server says of whole numbers, and of bounds, that their format has no room for."""
    if isinstance(value, dict):
        for name, one in value.items():
            child = node.get("properties", {}).get(name) or node.get("additionalProperties")
            if isinstance(child, dict):
                yield from boundary_problems(child, one, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from boundary_problems(node.get("items") or {}, one, f"{path}[{index}]")
    elif node.get("type") == "integer" and type(value) in (int, float):
        numbers = {"Checked": value}
        for bound in ("minimum", "maximum"):
            if node.get(bound) is not None:
                numbers[f"{bound.capitalize()} boundary"] = float(node[bound])
        for what, number in numbers.items():
            if not _fits(number, BITS.get(node.get("format", ""), 64)):
                yield f"{what} value must be of type integer{_form(node)} in {path}"


def _fits(number: float, bits: int) -> bool:
    written = Decimal(repr(number))  # the shortest text that identifies it, as in Go
    return written == written.to_integral_value() and -(1 << bits - 1) <= written < 1 << bits - 1


def _form(node: Node) -> str:
    return f" with format {node['format']}" if "format" in node else " (default format)"
