"""A shared cache of the cluster's objects, kept up to date by watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiException

from kubernetes_double.logs import Log
from kubernetes_double.nodes.client import ALL, Kind, Object, Objects

log = Log("cluster.informer")

Key = tuple[str, str]
Listener = Callable[[Kind, Object], None]
_PAUSE_S = 0.2
_GONE = 410


def key_of(item: Object) -> Key:
    """Namespace and name of an object."""
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def revision_of(item: Object) -> int:
    """The resource version as a number, which servers increment."""
    return int(item["metadata"]["resourceVersion"])


class Informer:
    """Caches objects of the relevant kinds. Callers must not modify them.

    Writes go through here too: their results enter the cache immediately, so that no controller
    acts on a state older than its own write.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._held: dict[Kind, dict[Key, Object]] = {kind: {} for kind in ALL}
        self._gone: set[str] = set()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each change; removed objects have `deleted: True` at the top."""
        self._listeners.append(listener)

    def get(self, kind: Kind, key: Key) -> Object | None:
        """One object."""
        return self._held[kind].get(key)

    def all(self, kind: Kind, namespace: str | None = None) -> Iterator[Object]:
        """All objects of a kind, sorted by name; of one namespace if given."""
        for (where, _), item in sorted(self._held[kind].items()):
            if namespace is None or where == namespace:
                yield item

    def owned(self, kind: Kind, owner: Object) -> list[Object]:
        """Objects whose controller is `owner`."""
        uid = owner["metadata"]["uid"]
        items = self.all(kind, owner["metadata"].get("namespace", ""))
        return [item for item in items if (controller_of(item) or {}).get("uid") == uid]

    async def create(self, kind: Kind, body: Object) -> Object:
        """Create an object and cache it."""
        return self._see(kind, await self.objects.create(kind, body))

    async def patch(self, kind: Kind, of: Object, body: Object, *, status: bool = False) -> Object:
        """Patch an object and cache it."""
        return self._see(kind, await self.objects.patch(kind, of, body, status=status))

    async def delete(self, kind: Kind, of: Object, *, grace_s: int | None = None) -> None:
        """Delete an object; one with a grace period is cached as being deleted."""
        answer = await self.objects.delete(kind, of, grace_s=grace_s)
        leaving = answer.get("metadata", {}).get("deletionTimestamp")
        if leaving and answer.get("kind") == kind.name and grace_s != 0:
            self._see(kind, answer)

    async def start(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """List all objects, then watch them in tasks of the group, which are returned."""
        versions = {kind: await self._relist(kind) for kind in ALL}
        return [group.create_task(self._follow(kind, since)) for kind, since in versions.items()]

    async def _follow(self, kind: Kind, since: str) -> None:
        while True:
            try:
                since = since or await self._relist(kind)
                async for event, item in self.objects.watch(kind, since):
                    since = item["metadata"]["resourceVersion"]
                    if event != "BOOKMARK":
                        self._see(kind, item, removed=event == "DELETED")
            except (ApiException, aiohttp.ClientError, TimeoutError) as error:
                log.warning("watch ended", kind=kind.name, error=repr(error))
                await asyncio.sleep(_PAUSE_S)
                if getattr(error, "status", 0) == _GONE:
                    since = ""

    async def _relist(self, kind: Kind) -> str:
        items, since = await self.objects.list(kind)
        present = {key_of(item) for item in items}
        for key, item in list(self._held[kind].items()):
            if key not in present and revision_of(item) <= int(since):
                self._see(kind, item, removed=True)
        for item in items:
            self._see(kind, item)
        return since

    def _see(self, kind: Kind, item: Object, *, removed: bool = False) -> Object:
        key, uid = key_of(item), item["metadata"]["uid"]
        held = self._held[kind].get(key)
        if uid in self._gone or (held and not removed and revision_of(held) >= revision_of(item)):
            return item
        if removed:
            self._gone.add(uid)
            if held is not None and held["metadata"]["uid"] == uid:
                del self._held[kind][key]
            item = {**item, "deleted": True}
        else:
            self._held[kind][key] = item
        for listener in self._listeners:
            listener(kind, item)
        return item


def controller_of(item: Object) -> dict[str, Any] | None:
    """The owner reference of an object's controller."""
    owners = item["metadata"].get("ownerReferences", [])
    return next((owner for owner in owners if owner.get("controller")), None)


def owner_reference(kind: Kind, of: Object) -> list[Object]:
    """The owner references that assign an object to its controller."""
    return [
        {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "name": of["metadata"]["name"],
            "uid": of["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def matches(selector: dict[str, Any] | None, labels: dict[str, str] | None) -> bool:
    """Whether labels satisfy `matchLabels` and `matchExpressions`; no selector matches nothing."""
    if selector is None:
        return False
    labels = labels or {}
    if any(
        labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()
    ):
        return False
    return all(_expressed(e, labels) for e in selector.get("matchExpressions") or [])


def _expressed(expression: dict[str, Any], labels: dict[str, str]) -> bool:
    name, values = expression["key"], expression.get("values") or []
    match expression["operator"]:
        case "In":
            return labels.get(name) in values
        case "NotIn":
            return labels.get(name) not in values
        case "Exists":
            return name in labels
        case _:
            return name not in labels
