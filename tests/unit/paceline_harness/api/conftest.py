from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from paceline_harness.cluster.api.policy.admission import Admission
from paceline_harness.cluster.api.policy.collector import Collector
from paceline_harness.cluster.api.resources.kinds import Kinds
from paceline_harness.cluster.api.storage.objects import Objects, Place, WriteOptions
from paceline_harness.cluster.api.storage.store import Store


class World:
    """The API's operations without transport, on a fake clock."""

    def __init__(self, kinds: Kinds) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.store = Store()
        self.kinds = kinds
        self.objects = Objects(self.store, kinds, Admission(self.store), now=lambda: self.time)
        self.collector = Collector(self.objects)
        self.make("namespaces", {"metadata": {"name": "default"}})
        self.collector.sweep()

    def after(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)

    def place(self, storage: str, name: str, door: str = "") -> Place:
        resource = next(r for r in self.kinds.catalog if r.storage == storage)
        return Place(resource, "default" if resource.namespaced else "", name, door)

    def make(self, storage: str, body: Any) -> Any:
        place = self.place(storage, "")
        return self.objects.create(place.resource, place.namespace, body, WriteOptions())

    def apply(self, manager: str, storage: str, body: Any, *, force: bool = False) -> Any:
        place = self.place(storage, body["metadata"]["name"])
        options = WriteOptions(manager=manager, force=force)
        return self.objects.apply(place, body, options)[1]


@pytest.fixture(scope="session")
def kinds() -> Kinds:
    return Kinds()


@pytest.fixture
def world(kinds: Kinds) -> World:
    return World(kinds)
