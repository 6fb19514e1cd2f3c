"""What code of a job answers with can be served as JSON and protobuf, or is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.enums import ScoreStatus
from paceline.isolation.code.ledger_messages import advantages_of
from paceline.isolation.frames import HEAD, FrameError, frame
from paceline.isolation.reading import parsed
from paceline.platform import wire
from paceline.plugins import Advantages, EpisodeBatch
from paceline.types import Score
from paceline.v1 import types_pb2
from paceline_experience.jobs.own_tasks import row_of
from paceline_experience.ledger.advantages.estimate import checked
from paceline_experience.ledger.records import row_text
from paceline_reward.scores import as_score, infra_error, score_from_json, score_to_json

WRONG_NAMES = (
    "\ud800",
    "a\ud800b",
    "a\0b",
    "\x1b[2J",
    "line\nbreak",
    "\u202ereversed",
    "",
    "x" * 129,
)
# Text with lone surrogates and control characters, which hypothesis leaves out by itself.
TEXT = st.text(st.characters() | st.sampled_from("\ud800\udfff\0\x1b\u202e\n"), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
BATCH = EpisodeBatch(
    rewards=np.zeros(2),
    groups=np.zeros(2, np.int64),
    lengths=np.ones(2, np.int64),
    answers=("", ""),
    tasks=np.zeros(2, np.int64),
    truncated=np.zeros(2, bool),
)


def served(values: dict[str, Any]) -> None:
    """As `/metrics` and the events do, of a row that was stored."""
    row = json.loads(row_text(step=1, kind="train", values=values).encode())
    json.dumps(wire.from_struct(wire.to_struct(row["values"])), ensure_ascii=False).encode()


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_note_has_a_printable_name(name: str) -> None:
    with pytest.raises(ValueError, match="a note named"):
        checked(Advantages(np.zeros(2), notes={name: 1.0}), BATCH)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_part_of_a_score_has_a_printable_name(name: str) -> None:
    score = as_score(Score(reward=1.0, parts={name: 1.0}))
    assert score.status is ScoreStatus.INFRA_ERROR
    assert "returned a part" in score.detail
    wire.to_proto(score, types_pb2.Score).SerializeToString()


def test_a_score_has_few_parts() -> None:
    many = Score(reward=1.0, parts={f"part-{at}": 1.0 for at in range(101)})
    assert "101 parts; at most 100" in as_score(many).detail


@pytest.mark.parametrize("place", ["raw_answer", "normalised_answer", "detail"])
def test_texts_of_a_score_are_made_encodable(place: str) -> None:
    texts: dict[str, Any] = {place: "a\ud800b"}
    score = as_score(Score(reward=1.0, parts={}, **texts))
    assert (score.status, getattr(score, place)) == (ScoreStatus.OK, "a?b")
    assert infra_error("a\ud800b").detail == "a?b"


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, "a\x1bb"), (0, "\ud800"), (1, "a\0b"), (2, '"\\ud800"'), (4, "a\nb")],
)
def test_a_task_can_be_shown(at: int, value: str) -> None:
    row: list[Any] = ["id", "environment", "{}", 0, "domain"]
    names = ("task_id", "environment", "payload", "seed", "domain")
    assert row_of(dict(zip(names, row, strict=True))) == row
    row[at] = value
    with pytest.raises(Exception, match="unreadable task"):
        row_of(dict(zip(names, row, strict=True)))


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_answer_of_a_process_can_be_stored_and_served(value: object) -> None:
    body = json.dumps({"notes": value, "memory": {}}).encode()  # with escapes, as hostile code may
    with suppress(FrameError):
        found = parsed(body)
        json.dumps(found, ensure_ascii=False).encode()
        with suppress(TypeError, ValueError, AttributeError, OverflowError):
            given_back = advantages_of(found, {"values": np.zeros(2)})
            served(dict(checked(given_back, BATCH).notes))


@settings(max_examples=300, deadline=None)
@given(JSON, st.dictionaries(TEXT, st.floats() | TEXT, max_size=3), TEXT)
def test_any_score_can_be_sent(reward: object, parts: dict[str, Any], text: str) -> None:
    raw: dict[str, Any] = {"reward": reward, "parts": parts, "raw_answer": text, "detail": text}
    score = score_from_json(raw)
    message = wire.to_proto(score, types_pb2.Score)
    again = types_pb2.Score.FromString(message.SerializeToString())
    json.dumps(score_to_json(wire.from_proto(again, Score)), ensure_ascii=False).encode()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False) | TEXT, max_size=3))
def test_any_row_can_be_served(values: dict[str, Any]) -> None:
    served(values)


def test_a_frame_of_honest_code_replaces_what_utf_8_lacks() -> None:
    found = parsed(frame({"text": "a\ud800b"})[HEAD.size :])
    assert found == {"text": "a?b"}
