from __future__ import annotations

import json
import math
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.documents import (
    MAX_DEPTH,
    MAX_INTEGER,
    MAX_VALUES,
    check,
    read_json,
    read_yaml,
)
from paceline.errors import InvalidError

# YAML does not support JSON's surrogate-pair escapes.
BASIC = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\0")
TEXT = st.text(BASIC, max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXT, below, max_size=4),
    max_leaves=20,
)
MEBI = 1 << 20


@given(VALUES)
def test_a_document_round_trips(value: Any) -> None:
    assert read_json(json.dumps(value), what="job") == value
    assert read_yaml(json.dumps(value), what="job") == value


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_document_is_read_or_refused(text: str | bytes) -> None:
    for read in (read_json, read_yaml):
        with suppress(InvalidError):
            check(read(text, what="job"), what="job")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:1:1", "1:1:1"),
        ("0x10", "0x10"),
        ("017", "017"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("2026-01-01", "2026-01-01"),
        ("1e-6", 1e-6),
        ("-12", -12),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("\u0661", "\u0661"),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("1: 2", {"1": 2}),
    ],
)
def test_scalars_are_those_of_json(text: str, value: Any) -> None:
    found = read_yaml(text, what="job")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [1]\nb: *a", "line 2, column 4: aliases"),
        ("!!python/object:os.system x", "line 1, column 1: tags"),
        ("!!binary x", "tags"),
        ("%TAG ! x\n---\n1", "directives"),
        ("--- 1\n--- 2", "more than one document"),
        ("? [1]\n: 2", "a key must be text"),
        ("a: 1\na: 2", "line 2, column 1: duplicate key"),
        ('"\\0"', "the character NUL"),
        ("9" * 30, "64 bits"),
        ("1e999", "not finite"),
        ("[" * (MAX_DEPTH + 1), f"at most {MAX_DEPTH} levels"),
    ],
)
def test_a_refused_yaml_document(text: str, message: str) -> None:
    with pytest.raises(InvalidError, match=r"^job: ") as caught:
        read_yaml(text, what="job")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "duplicate key"),
        ("NaN", "NaN is not a JSON number"),
        ("1e999", "not finite"),
        ("9" * 5_000, "64 bits"),
        ('"\\ud800"', "surrogate"),
        ('{"\\u0000": 1}', "NUL"),
        ("[" * MEBI, "nested too deeply"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested too deeply"),
        ("\xff".encode("latin-1"), "not UTF-8 at byte 0"),
    ],
)
def test_a_refused_json_document(text: str | bytes, message: str) -> None:
    with pytest.raises(InvalidError, match=r"^job: ") as caught:
        read_json(text, what="job")
    assert message in caught.value.message


@pytest.mark.parametrize(
    "piece", ["- 1\n", "a: ", "[1,", "{", "? ", "- ", "'", "&a ", "1:", "\\", "#\n", "x\n", "\t"]
)
def test_the_size_of_a_parsed_document_is_bounded(piece: str) -> None:
    """A repetitive document does not produce more values than are allowed."""
    made = Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        made[frame.f_code.co_name] += event == "call"

    sys.setprofile(note)
    try:
        with suppress(InvalidError):
            read_yaml(piece * (MEBI // len(piece)), what="job")
    finally:
        sys.setprofile(None)
    assert made["_node"] <= 2 * MAX_VALUES + 1
    assert made["_put"] <= made["_node"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_that_yaml_writes_are_read(value: float) -> None:
    assert math.isclose(read_yaml(yaml.safe_dump(value), what="job"), value, rel_tol=0)
