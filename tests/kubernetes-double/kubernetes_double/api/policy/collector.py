"""Garbage collection by owner references, and the default contents of namespaces."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from kubernetes_double.api.policy.deletion import FOREGROUND, ORPHAN, DeleteOptions, delete
from kubernetes_double.api.resources.custom import CLEANUP
from kubernetes_double.api.resources.kinds import DEFINITIONS
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.objects import Objects, Place
from kubernetes_double.api.storage.store import Change

Object = dict[str, Any]


@dataclass
class Collector:
    """Collects garbage; `sweep` takes all pending steps and returns whether there were any."""

    objects: Objects
    authority: str = ""
    """PEM text for `kube-root-ca.crt` of every namespace."""

    def sweep(self) -> bool:
        """One round over all objects."""
        before = self.objects.store.revision
        everything = self._everything()
        uids = {obj["metadata"]["uid"]: obj for _, obj in everything}
        for resource, obj in everything:
            self._visit(resource, obj, uids)
        self._dependents(everything)
        self._definitions()
        self._namespaces()
        return self.objects.store.revision != before

    def _everything(self) -> list[tuple[Resource, Object]]:
        store = self.objects.store
        served = {r.storage: r for r in self.objects.kinds.catalog.stored()}
        return [
            (served[name], obj)
            for name in store.collections()
            if name in served
            for obj in store.all(name)
        ]

    def _place(self, resource: Resource, obj: Object) -> Place:
        metadata = obj["metadata"]
        return Place(resource, metadata.get("namespace", ""), metadata["name"])

    def _alive(self, place: Place, obj: Object) -> bool:
        found = self.objects.store.get(place.resource.storage, place.key)
        return found is not None and found["metadata"]["uid"] == obj["metadata"]["uid"]

    def _visit(self, resource: Resource, obj: Object, uids: dict[str, Object]) -> None:
        """Delete a dependent without remaining owners."""
        owners = obj["metadata"].get("ownerReferences")
        place = self._place(resource, obj)
        if not owners or not self._alive(place, obj):
            return
        held = [one for one in owners if _is_owner(uids.get(one["uid"]), one, obj)]
        waiting = [one for one in held if _waits(uids[one["uid"]])]
        if len(held) > len(waiting) or "deletionTimestamp" in obj["metadata"]:
            return
        policy = "Foreground" if waiting else "Background"
        if any(name == ORPHAN for name in obj["metadata"].get("finalizers", ())):
            policy = "Orphan"
        delete(self.objects, place, DeleteOptions(propagation=policy, uid=obj["metadata"]["uid"]))

    def _dependents(self, everything: list[tuple[Resource, Object]]) -> None:
        """Release owners whose dependents are gone (Foreground) or disowned (Orphan)."""
        for resource, owner in everything:
            finalizers = owner["metadata"].get("finalizers", ())
            if "deletionTimestamp" not in owner["metadata"]:
                continue
            uid = owner["metadata"]["uid"]
            if ORPHAN in finalizers:
                for kind, one in self._of(uid):
                    self._disown(kind, one, uid)
                self._finish(resource, owner, ORPHAN)
            elif FOREGROUND in finalizers and not any(
                _blocks(one, uid) for _, one in self._of(uid)
            ):
                self._finish(resource, owner, FOREGROUND)

    def _of(self, uid: str) -> list[tuple[Resource, Object]]:
        return [
            (kind, one)
            for kind, one in self._everything()
            if any(ref["uid"] == uid for ref in one["metadata"].get("ownerReferences", ()))
        ]

    def _edit(self, resource: Resource, obj: Object, name: str, value: list[Any]) -> None:
        place = self._place(resource, obj)
        current = self.objects.store.get(resource.storage, place.key)
        if current is None or current["metadata"]["uid"] != obj["metadata"]["uid"]:
            return
        new = copy.deepcopy(current)
        new["metadata"][name] = value
        if not value:
            del new["metadata"][name]
        self.objects.settle(place, new)

    def _disown(self, resource: Resource, obj: Object, uid: str) -> None:
        kept = [ref for ref in obj["metadata"]["ownerReferences"] if ref["uid"] != uid]
        self._edit(resource, obj, "ownerReferences", kept)

    def _finish(self, resource: Resource, owner: Object, finalizer: str) -> None:
        kept = [name for name in owner["metadata"]["finalizers"] if name != finalizer]
        self._edit(resource, owner, "finalizers", kept)

    def _definitions(self) -> None:
        """Remove deleted definitions after all of their objects."""
        catalog = self.objects.kinds.catalog
        resource = catalog.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
        for one in self.objects.store.all(DEFINITIONS):
            if resource is None or "deletionTimestamp" not in one["metadata"]:
                continue
            left = self.objects.store.all(one["metadata"]["name"])
            for served in (r for r in catalog.stored() if r.storage == one["metadata"]["name"]):
                for obj in left:
                    if "deletionTimestamp" not in obj["metadata"]:
                        delete(self.objects, self._place(served, obj), DeleteOptions())
            if not left and CLEANUP in one["metadata"].get("finalizers", ()):
                self._finish(resource, one, CLEANUP)

    def _namespaces(self) -> None:
        for one in self.objects.store.all("namespaces"):
            name = one["metadata"]["name"]
            if "deletionTimestamp" in one["metadata"]:
                self._empty(name, one)
            else:
                self._furnish(name)

    def _furnish(self, namespace: str) -> None:
        """Create what every namespace has: its default account and the server's CA certificate."""
        catalog = self.objects.kinds.catalog
        account = catalog.find("", "v1", "serviceaccounts")
        settings = catalog.find("", "v1", "configmaps")
        wanted = [(account, "default", {})]
        if self.authority:
            wanted.append((settings, "kube-root-ca.crt", {"data": {"ca.crt": self.authority}}))
        for resource, name, content in wanted:
            if resource and self.objects.store.get(resource.storage, (namespace, name)) is None:
                self.objects.found(resource, namespace, {"metadata": {"name": name}, **content})

    def _empty(self, namespace: str, obj: Object) -> None:
        left = False
        for resource, one in self._everything():
            if one["metadata"].get("namespace") != namespace:
                continue
            left = True
            place = self._place(resource, one)
            if "deletionTimestamp" not in one["metadata"] and self._alive(place, one):
                delete(self.objects, place, DeleteOptions(propagation="Background"))
        if not left and not obj["metadata"].get("finalizers"):
            resource = self.objects.kinds.catalog.find("", "v1", "namespaces")
            if resource:
                self.objects.remove(Place(resource, "", namespace))


def matters(change: Change) -> bool:
    """Whether a change can require a sweep."""
    if change.after is None or change.storage == "namespaces":
        return True
    metadata = change.after["metadata"]
    return "deletionTimestamp" in metadata or "ownerReferences" in metadata


def _is_owner(found: Object | None, reference: Object, dependent: Object) -> bool:
    """Whether a reference is valid: a namespaced owner must be in its dependent's namespace."""
    if found is None or found["metadata"]["name"] != reference["name"]:
        return False
    namespace = found["metadata"].get("namespace")
    return namespace is None or namespace == dependent["metadata"].get("namespace")


def _waits(owner: Object) -> bool:
    metadata = owner["metadata"]
    return "deletionTimestamp" in metadata and FOREGROUND in metadata.get("finalizers", ())


def _blocks(dependent: Object, uid: str) -> bool:
    references = dependent["metadata"]["ownerReferences"]
    return any(ref["uid"] == uid and ref.get("blockOwnerDeletion") for ref in references)
