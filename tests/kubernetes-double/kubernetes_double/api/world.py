"""The API's operations without transport, on a clock that tests set."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from kubernetes_double.api.policy.admission import Admission
from kubernetes_double.api.policy.collector import Collector
from kubernetes_double.api.resources.kinds import Kinds
from kubernetes_double.api.storage.objects import Objects, Place, WriteOptions
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]


class World:
    """Objects by the rules of the server, with its controllers; `time` is now."""

    def __init__(self, kinds: Kinds) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.store = Store()
        self.kinds = kinds
        self.objects = Objects(self.store, kinds, Admission(self.store), now=lambda: self.time)
        self.collector = Collector(self.objects)
        self.make("namespaces", {"metadata": {"name": "default"}})
        self.collector.sweep()

    def after(self, seconds: float) -> None:
        """Let time pass."""
        self.time += timedelta(seconds=seconds)

    def place(self, storage: str, name: str, door: str = "") -> Place:
        """An object of the resource that is stored as `storage`, in the namespace `default`."""
        resource = next(r for r in self.kinds.catalog if r.storage == storage)
        return Place(resource, "default" if resource.namespaced else "", name, door)

    def make(self, storage: str, body: Object) -> Object:
        """Create an object.

        Raises:
            StatusError: the server refuses it.
        """
        place = self.place(storage, "")
        return self.objects.create(place.resource, place.namespace, body, WriteOptions())

    def apply(self, manager: str, storage: str, body: Object, *, force: bool = False) -> Object:
        """Apply an object as a field manager.

        Raises:
            StatusError: the server refuses it, or other managers own its fields.
        """
        place = self.place(storage, body["metadata"]["name"])
        options = WriteOptions(manager=manager, force=force)
        return self.objects.apply(place, body, options)[1]
