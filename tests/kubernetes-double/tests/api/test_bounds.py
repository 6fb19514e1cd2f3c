"""Whole numbers and their bounds in custom kinds, judged as the server does with float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.api.resources.bounds import boundary_problems

Object = dict[str, Any]


def wrong(value: float, **node: Any) -> list[str]:
    schema = {"properties": {"at": {"items": {"type": "integer", **node}}}}
    return list(boundary_problems(schema, {"at": [value]}))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"format": "int64", "maximum": 2**63 - 1}, "Maximum boundary"),
        ({"format": "int64", "minimum": -(2**63)}, "Minimum boundary"),
        ({"format": "int64", "minimum": -9.223372036854776e18}, "Minimum boundary"),
        ({"format": "int64", "minimum": 0.5}, "Minimum boundary"),
        ({"format": "int32", "maximum": 2**31}, "Maximum boundary"),
        ({"maximum": 1e19}, "Maximum boundary"),
        ({"format": "int64", "minimum": -(2**53), "maximum": 2**53}, ""),
        ({"format": "int32", "maximum": 2**31 - 1}, ""),
    ],
)
def test_bounds_that_are_no_number_of_the_field(node: Object, text: str) -> None:
    form = f" with format {node['format']}" if "format" in node else " (default format)"
    expected = [f"{text} value must be of type integer{form} in at[0]"] if text else []
    assert wrong(1, **node) == expected


@given(st.integers(-(2**70), 2**70))
def test_bounds_of_every_size(bound: int) -> None:
    """Within 2^53 a float64 is the number itself; at 2^63 none is."""
    found = bool(wrong(0, format="int64", maximum=bound))
    if abs(bound) <= 2**53:
        assert not found
    elif abs(bound) >= 2**63:
        assert found
    assert bool(wrong(bound, format="int64")) == (not -(2**63) <= bound < 2**63)
