"""Writes Kubernetes events on the objects of a job, which `kubectl describe` shows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from paceline.errors import NotFoundError, PacelineError
from paceline.platform.telemetry.logs import Log
from paceline_controller.runtimes.kubernetes.names import MANAGER
from paceline_controller.runtimes.kubernetes.resources import EVENTS, Kind, Object

MAX_NOTE_BYTES = 1024
MAX_WAITING = 1000
# As in Kubernetes' own components: repeats within this time form a series.
SERIES_S = 360.0
_MAX_SERIES = 1000
log = Log("events")


class Sink(Protocol):
    """The part of `KubernetesClient` that writes events."""

    @property
    def namespace(self) -> str:
        """Namespace of the events."""
        ...

    async def create(self, kind: Kind, body: Object) -> Object:
        """Create an event."""
        ...

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        """Count another occurrence of an event."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """An event to report about a job, or about the installation if `job_id` is empty."""

    job_id: str
    reason: str  # one word in CamelCase
    note: str
    warning: bool = False
    about: Object | None = None  # reference to the object, if known


@dataclass(slots=True)
class _Series:
    name: str
    count: int
    last: datetime


class Events:
    """Writes events in the background, one at a time; failures are only logged."""

    def __init__(
        self,
        sink: Sink,
        *,
        identity: str,
        regarding: Callable[[str], Object | None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        suffix: Callable[[], str] = lambda: secrets.token_hex(5),
    ) -> None:
        self._sink = sink
        self._identity = identity
        self._regarding = regarding
        self._now = now
        self._suffix = suffix
        self._queue: asyncio.Queue[ClusterEvent] = asyncio.Queue(MAX_WAITING)
        self._series: dict[tuple[str, str, str], _Series] = {}

    def record(
        self,
        job_id: str,
        reason: str,
        note: str,
        *,
        warning: bool = False,
        about: Object | None = None,
    ) -> None:
        """Queue an event; it is dropped if the queue is full."""
        try:
            self._queue.put_nowait(ClusterEvent(job_id, reason, note, warning, about))
        except asyncio.QueueFull:
            log.warning("event dropped", job=job_id, reason=reason)

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            happening = await self._queue.get()
            try:
                await self.write(happening)
            except PacelineError as error:
                log.warning("event not written", reason=happening.reason, error=error)

    async def write(self, happening: ClusterEvent) -> None:
        """Write a new event, or count another occurrence in its series.

        Raises:
            PacelineError: the server did not accept it.
        """
        about = happening.about or self._regarding(happening.job_id)
        if about is None:
            return
        key = (about["uid"], happening.reason, happening.note)
        known, now = self._series.get(key), self._now()
        if known and (now - known.last).total_seconds() < SERIES_S:
            known.count, known.last = known.count + 1, now
            series = {"count": known.count, "lastObservedTime": _micro(now)}
            try:
                await self._sink.patch(EVENTS, known.name, {"series": series})
                return
            except NotFoundError:  # events live for an hour only
                del self._series[key]
        body = self._body(happening, about, now)
        await self._sink.create(EVENTS, body)
        self._remember(key, _Series(body["metadata"]["name"], 1, now))

    def _remember(self, key: tuple[str, str, str], series: _Series) -> None:
        self._series[key] = series
        if len(self._series) > _MAX_SERIES:
            del self._series[next(iter(self._series))]

    def _body(self, happening: ClusterEvent, about: Object, now: datetime) -> Object:
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {
                "name": f"{about['name'][:200]}.{self._suffix()}",
                "namespace": self._sink.namespace,
            },
            "eventTime": _micro(now),
            "reportingController": f"paceline.dev/{MANAGER}",
            "reportingInstance": self._identity[:128],
            "action": happening.reason,
            "reason": happening.reason,
            "type": "Warning" if happening.warning else "Normal",
            "regarding": about,
            "note": _cut(happening.note),
        }


def reference(body: Object) -> Object:
    """The object reference of an event (`regarding`)."""
    metadata = body["metadata"]
    return {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "name": metadata["name"],
        "namespace": metadata.get("namespace", ""),
        "uid": metadata["uid"],
    }


def _micro(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cut(note: str) -> str:
    """A note within the size limit of the server; keeps the end, which says more."""
    data = note.encode()
    if len(data) <= MAX_NOTE_BYTES:
        return note
    return "…" + data[-(MAX_NOTE_BYTES - 3) :].decode(errors="ignore")
