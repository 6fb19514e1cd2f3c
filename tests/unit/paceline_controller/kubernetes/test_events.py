"""Events are written once, repeated as a series, and never in the way."""

from datetime import UTC, datetime, timedelta
from typing import Any

import kubernetes_validate
import pytest

from paceline.errors import NotFoundError, UnavailableError
from paceline_controller.runtimes.kubernetes.events import MAX_NOTE_BYTES, ClusterEvent, Events
from paceline_controller.runtimes.kubernetes.resources import Kind

ABOUT = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "name": "trainer-a-1",
    "namespace": "ns",
    "uid": "u",
}


class Sink:
    namespace = "ns"

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.patched: list[tuple[str, dict[str, Any]]] = []
        self.gone = self.away = False

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        if self.away:
            raise UnavailableError("away")
        self.made.append(body)
        return body

    async def patch(
        self, kind: Kind, name: str, changes: dict[str, Any], *, subresource: str = ""
    ) -> dict[str, Any]:
        if self.gone:
            raise NotFoundError("gone")
        self.patched.append((name, changes))
        return {}


class Day:
    def __init__(self) -> None:
        self.at = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at


def events(sink: Sink, now: Day) -> Events:
    return Events(
        sink,
        identity="ctl-0",
        regarding=lambda job: ABOUT if job else None,
        now=now,
        suffix=lambda: f"{len(sink.made):x}",
    )


async def test_a_repeated_event_becomes_a_series() -> None:
    sink, now = Sink(), Day()
    writer = events(sink, now)
    happening = ClusterEvent("j", "Restarted", "why", warning=True)
    for _ in range(3):
        await writer.write(happening)
        now.at += timedelta(minutes=1)
    (body,) = sink.made
    kubernetes_validate.validate(body, "1.37", strict=True)
    assert body["type"] == "Warning"
    assert body["regarding"] == ABOUT
    assert [changes["series"]["count"] for _, changes in sink.patched] == [2, 3]
    now.at += timedelta(minutes=10)
    await writer.write(happening)
    assert len(sink.made) == 2


async def test_a_deleted_event_is_recreated() -> None:
    sink, now = Sink(), Day()
    writer = events(sink, now)
    happening = ClusterEvent("j", "Scaled", "from 1 to 2")
    await writer.write(happening)
    sink.gone = True
    await writer.write(happening)
    assert len(sink.made) == 2


async def test_long_notes_keep_their_end() -> None:
    sink, now = Sink(), Day()
    await events(sink, now).write(ClusterEvent("j", "Failed", "ä" * 2000 + "the end"))
    note = sink.made[0]["note"]
    assert len(note.encode()) <= MAX_NOTE_BYTES
    assert note.endswith("the end")


async def test_events_without_an_object_are_dropped() -> None:
    sink, now = Sink(), Day()
    await events(sink, now).write(ClusterEvent("", "Scaled", "x"))
    assert not sink.made


async def test_telling_never_waits_or_raises() -> None:
    sink, now = Sink(), Day()
    writer = events(sink, now)
    sink.away = True
    for _ in range(5000):
        writer.record("j", "Scaled", "x")
    with pytest.raises(UnavailableError):
        await writer.write(ClusterEvent("j", "Scaled", "x"))
