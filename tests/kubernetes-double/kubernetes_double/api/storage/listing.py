"""Paginated lists and resumable watches."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes_double.api.requests.errors import StatusError, bad_request, expired
from kubernetes_double.api.resources.conversion import from_storage
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.storage.selectors import Predicate, field_selector, label_selector
from kubernetes_double.api.storage.store import Change, Store

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """A selection of objects from a collection, with selectors as in the URL."""

    resource: Resource
    namespace: str = ""
    labels: str = ""
    fields: str = ""
    selectable: tuple[str, ...] = ()

    def predicate(self) -> Predicate:
        """The selectors as a predicate. Raises a 400 for invalid ones."""
        by_label = label_selector(self.labels)
        by_field = field_selector(self.fields, self.resource.storage, self.selectable)
        return lambda obj: by_label(obj) and by_field(obj)


def revision_of(text: str) -> int:
    """Parse a resource version. Raises a 400 if invalid."""
    if not text.isdigit():
        raise bad_request(f"invalid resource version {text!r}: want a number")
    return int(text)


def list_objects(
    store: Store,
    query: Query,
    *,
    limit: int = 0,
    token: str = "",
    revision: str = "",
    match: str = "",
) -> Object:
    """A page of the collection, as of the time when the first page was read.

    Raises 400 for a wrong token, selector or revision, 410 for a page of forgotten history.
    """
    at, start = store.revision, ("", "")
    if token:
        at, start = _read_token(token)
    elif match == "Exact":
        at = revision_of(revision)
    elif revision_of(revision or "0") > store.revision:
        raise StatusError(504, "Timeout", f"Too large resource version: {revision}")
    matches = query.predicate()
    try:
        found = store.snapshot(query.resource.storage, query.namespace, at)
    except StatusError as error:
        if not token:
            raise
        raise expired("The provided continue parameter is too old") from error
    rest = [one for one in found if matches(one) and _key(one) > start]
    page = rest[:limit] if limit else rest
    metadata: Object = {"resourceVersion": str(at)}
    if len(page) < len(rest):
        metadata["continue"] = _write_token(at, _key(page[-1]))
        metadata["remainingItemCount"] = len(rest) - len(page)
    return _as_list(query.resource, page, metadata)


def _as_list(resource: Resource, page: list[Object], metadata: Object) -> Object:
    items = [from_storage(resource, one) for one in page]
    if not resource.custom:
        hidden = ("apiVersion", "kind")
        items = [{k: v for k, v in one.items() if k not in hidden} for one in items]
    kind = f"{resource.kind}List"
    return {"kind": kind, "apiVersion": resource.api_version, "metadata": metadata, "items": items}


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _write_token(revision: int, key: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(json.dumps([revision, *key]).encode()).decode()


def _read_token(text: str) -> tuple[int, tuple[str, str]]:
    try:
        revision, namespace, name = json.loads(base64.urlsafe_b64decode(text))
        return int(revision), (str(namespace), str(name))
    except ValueError as error:
        raise bad_request("continue key is not valid: take it from the page before") from error


@dataclass
class Watch:
    """The events of a collection from a revision on; `revision` is how far it has been read."""

    store: Store
    query: Query
    revision: int

    def __post_init__(self) -> None:
        self._matches = self.query.predicate()

    def initial(self) -> Iterator[Object]:
        """An ADDED event per existing object, for a watch that starts without a revision."""
        self.revision = self.store.revision
        for one in self.store.all(self.query.resource.storage, self.query.namespace):
            if self._matches(one):
                yield self._event("ADDED", one)

    def pending(self) -> list[Object]:
        """Events since the last call. Raises 410 if the history no longer has them."""
        changes = self.store.changes(self.revision)
        self.revision = self.store.revision
        return [event for change in changes if (event := self._translate(change))]

    def bookmark(self, **annotations: str) -> Object:
        """A BOOKMARK event with the current revision."""
        resource = self.query.resource
        metadata: Object = {"resourceVersion": str(self.revision), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        body = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return {"type": "BOOKMARK", "object": body}

    def _translate(self, change: Change) -> Object | None:
        if change.storage != self.query.resource.storage:
            return None
        if self.query.namespace not in ("", change.key[0]):
            return None
        before = change.before is not None and self._matches(change.before)
        if change.after is not None and self._matches(change.after):
            return self._event("MODIFIED" if before else "ADDED", change.after)
        if not before:
            return None
        return self._event("DELETED", change.last or _left(change))

    def _event(self, kind: str, obj: Object) -> Object:
        return {"type": kind, "object": from_storage(self.query.resource, obj)}


def _left(change: Change) -> Object:
    """The DELETED object of a selection it has left: its old state at the new revision."""
    before = change.before or {}
    metadata = {**before["metadata"], "resourceVersion": str(change.revision)}
    return {**before, "metadata": metadata}
