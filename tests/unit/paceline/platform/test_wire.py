"""Every domain type survives conversion to protobuf and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from paceline import types as t
from paceline.errors import InvalidError
from paceline.platform import wire
from paceline.v1 import roster_pb2, types_pb2
from paceline.weights import placement, route
from paceline_harness.nouns import TEXTS, nouns

PAIRS: dict[type, type[Message]] = {
    t.Task: types_pb2.Task,
    t.Trajectory: types_pb2.Trajectory,
    t.EpisodeProgress: types_pb2.EpisodeProgress,
    t.Assignment: types_pb2.Assignment,
    t.Worker: types_pb2.Worker,
    t.PolicyVersion: types_pb2.PolicyVersion,
    t.Job: types_pb2.Job,
    route.Route: roster_pb2.Route,
    route.TransferReport: roster_pb2.ReportTransferRequest,
    placement.WeightPlacement: roster_pb2.ListWeightsReply,
}
SIMPLE = {
    int: st.integers(-1, 2**31 - 1),
    float: st.floats(allow_nan=False, width=32),  # log-probs are float32 on the wire
    object: st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    route.ChunkSource: st.integers(1, 9).flatmap(
        lambda n: st.builds(route.ChunkSource, TEXTS, st.integers(0, n - 1), st.just(n))
    ),
}


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_domain_type_survives_the_wire(kind: type, data: st.DataObject) -> None:
    noun: Any = data.draw(nouns(kind, SIMPLE))
    sent = wire.to_proto(noun, PAIRS[kind]).SerializeToString()
    assert wire.from_proto(PAIRS[kind].FromString(sent), kind) == noun


def test_message_only_fields_can_be_set() -> None:
    report = route.TransferReport("w", 1, "e", route.TransferEvent.DONE)
    message = wire.to_proto(report, roster_pb2.ReportTransferRequest)
    assert not message.HasField("base_version")
    message.job_id = "j"
    assert wire.from_proto(message, route.TransferReport) == report


def test_a_field_missing_in_the_message_is_reported() -> None:
    @dataclass(frozen=True)
    class Odd:
        nowhere: int

    with pytest.raises(TypeError, match=r"Task has no field nowhere for Odd\.nowhere"):
        wire.to_proto(Odd(1), types_pb2.Task)


def test_part_zero_of_zero_is_everything() -> None:
    found = wire.from_proto(roster_pb2.ChunkSource(endpoint="a"), route.ChunkSource)
    assert found == route.ChunkSource("a", 0, 1)


@pytest.mark.parametrize(("part", "parts"), [(2, 2), (-1, 2), (1, 0)])
def test_an_invalid_part_is_named(part: int, parts: int) -> None:
    with pytest.raises(InvalidError, match=f"part: {part} of {parts}"):
        wire.from_proto(roster_pb2.ChunkSource(part=part, parts=parts), route.ChunkSource)


def test_an_unknown_event_is_named() -> None:
    message = roster_pb2.ReportTransferRequest(event=cast("Any", 99))
    with pytest.raises(InvalidError, match="event: 99 is not known; allowed: done, moved"):
        wire.from_proto(message, route.TransferReport)
