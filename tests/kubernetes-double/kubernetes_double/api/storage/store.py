"""Objects, one revision counter, and a bounded history from which watches resume."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kubernetes_double.api.requests.errors import expired

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace ("" for cluster-wide kinds) and name."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write. `after` is None for a removal, `before` None for a creation."""

    revision: int
    storage: str
    key: Key
    before: Object | None
    after: Object | None
    last: Object | None = None
    """For a removal: the object's last state, with the revision of the removal."""


@dataclass
class Store:
    """Objects by collection. Returned objects are shared: callers must copy before modifying them.

    `keep` bounds the number of changes from which a watch can resume.
    """

    keep: int = 4096
    revision: int = 1
    _objects: dict[str, dict[Key, Object]] = field(default_factory=dict[str, dict[Key, Object]])
    _history: list[Change] = field(default_factory=list[Change])
    _oldest: int = 1
    _listeners: list[Callable[[Change], None]] = field(
        default_factory=list[Callable[[Change], None]]
    )

    def get(self, storage: str, key: Key) -> Object | None:
        """One object, or None."""
        return self._objects.get(storage, {}).get(key)

    def all(self, storage: str, namespace: str = "") -> list[Object]:
        """A collection (of one namespace, or of all), by namespace and name."""
        return _select(self._objects.get(storage, {}), namespace)

    def collections(self) -> list[str]:
        """The names of collections that have objects."""
        return [name for name, held in self._objects.items() if held]

    def put(self, storage: str, key: Key, new: Object) -> Object:
        """Store an object under the next revision; returns it as stored."""
        self.revision += 1
        metadata = {**new["metadata"], "resourceVersion": str(self.revision)}
        stored = {**new, "metadata": metadata}
        held = self._objects.setdefault(storage, {})
        before = held.get(key)
        held[key] = stored
        self._record(Change(self.revision, storage, key, before, stored))
        return stored

    def remove(self, storage: str, key: Key, last: Object | None = None) -> Object:
        """Remove an object; returns its last state with the revision of the removal."""
        before = self._objects[storage].pop(key)
        self.revision += 1
        final = last or before
        metadata = {**final["metadata"], "resourceVersion": str(self.revision)}
        final = {**final, "metadata": metadata}
        self._record(Change(self.revision, storage, key, before, None, final))
        return final

    def listen(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call `listener` after each change; returns a function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def changes(self, after: int) -> list[Change]:
        """The changes after a revision, oldest first.

        Raises:
            StatusError: 410, the history no longer reaches back so far.
        """
        if after < self._oldest:
            message = f"too old resource version: {after} ({self._oldest})"
            raise expired(message)
        start = bisect_right(self._history, after, key=lambda change: change.revision)
        return self._history[start:]

    def snapshot(self, storage: str, namespace: str, revision: int) -> list[Object]:
        """A collection as it was at a revision.

        Raises:
            StatusError: 410, the history no longer reaches back so far.
        """
        objects = dict(self._objects.get(storage, {}))
        for change in reversed(self.changes(revision)):
            if change.storage != storage:
                continue
            if change.before is None:
                objects.pop(change.key, None)
            else:
                objects[change.key] = change.before
        return _select(objects, namespace)

    def expire(self) -> None:
        """Drop the history, so that watches cannot resume from earlier revisions."""
        self._history.clear()
        self._oldest = self.revision

    def _record(self, change: Change) -> None:
        self._history.append(change)
        if len(self._history) > self.keep:
            cut = len(self._history) - self.keep // 2
            self._oldest = self._history[cut - 1].revision
            del self._history[:cut]
        for listener in list(self._listeners):
            listener(change)


def _select(objects: dict[Key, Object], namespace: str) -> list[Object]:
    keys = sorted(key for key in objects if not namespace or key[0] == namespace)
    return [objects[key] for key in keys]
