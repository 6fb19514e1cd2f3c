from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.weights.model_config import MAX_CHARS, canonical, difference

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_window": None,
    "eos_token_id": [2, 7],
    "torch_dtype": "float32",
}


def said(folder: Path, **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    return canonical(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            "rope_parameters.rope_theta is 10000.0 here and 500000.0 in the trainer",
        ),
        ({"sliding_window": 4096}, "sliding_window is null here and 4096 in the trainer"),
        ({"eos_token_id": 2}, "eos_token_id is [2, 7] here and 2 in the trainer"),
        ({"head_dim": 64}, "head_dim is missing here and 64 in the trainer"),
        ({"torch_dtype": "bfloat16", "transformers_version": "5.9"}, ""),
        (
            {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
            "a is missing here and 1 in the trainer; b is missing here and 2 in the trainer; "
            "c is missing here and 3 in the trainer; 2 more differ",
        ),
    ],
)
def test_a_difference_is_told_with_both_values(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    expected = f"config.json: {told}" if told else ""
    assert difference(said(tmp_path), said(tmp_path, **changes)) == expected


def test_what_is_not_known_is_not_compared(tmp_path: Path) -> None:
    assert difference("", said(tmp_path)) == difference(said(tmp_path), "") == ""
    assert canonical(tmp_path / "none.json") == ""
    for text in ("[]", "{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        assert canonical(tmp_path / "config.json") == ""


def test_a_long_configuration_is_compared_by_its_digest(tmp_path: Path) -> None:
    first, second = (said(tmp_path, long=letter * MAX_CHARS) for letter in "ab")
    assert len(first) < 100
    assert difference(first, first) == ""
    assert "(digest) is " in difference(first, second)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
CONTENTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(CONTENTS, CONTENTS)
def test_equal_configurations_are_equal_and_others_differ(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    texts = [json.dumps(each, sort_keys=True) for each in (first, second)]
    assert bool(difference(*texts)) == (texts[0] != texts[1])
