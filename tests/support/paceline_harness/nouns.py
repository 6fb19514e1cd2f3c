"""Hypothesis strategies for any dataclass or named tuple, derived from its field types."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
NUMBERS: Mapping[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 10**9),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: TEXTS,
    bytes: st.binary(max_size=8),
}


def nouns(kind: type, basic: Mapping[type, st.SearchStrategy[Any]] | None = None) -> Any:
    """Instances of a class; `basic` overrides the strategies for numbers and strings."""
    return _of(kind, {**NUMBERS, **(basic or {})})


def _of(hint: Any, basic: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if hint in basic:
        return basic[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if a is types.NoneType else _of(a, basic) for a in args])
    if origin is tuple:
        return st.lists(_of(args[0], basic), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(_of(args[0], basic), _of(args[1], basic), max_size=3)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = get_type_hints(hint)
        names = [f.name for f in fields(hint)] if is_dataclass(hint) else [*hints]
        return st.builds(cast("Any", hint), **{name: _of(hints[name], basic) for name in names})
    return st.sampled_from(list(hint))  # an enumeration
