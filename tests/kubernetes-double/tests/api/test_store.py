"""The store: revisions increase, and a past state plus later changes is the present state."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.resources.registry import Catalog
from kubernetes_double.api.storage.listing import Query, Watch, list_objects
from kubernetes_double.api.storage.store import Store

SETTINGS = Catalog().find("", "v1", "configmaps")
assert SETTINGS
NAMES = st.sampled_from(["a", "b", "c", "d"])
NAMESPACES = st.sampled_from(["x", "y"])
COLOURS = st.sampled_from(["red", "blue"])


def settings(namespace: str, name: str, colour: str) -> Any:
    metadata = {"name": name, "namespace": namespace, "labels": {"colour": colour}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def content(objects: list[Any]) -> dict[tuple[str, str], str]:
    return {
        (o["metadata"].get("namespace", ""), o["metadata"]["name"]): o["metadata"][
            "resourceVersion"
        ]
        for o in objects
    }


class Life(RuleBasedStateMachine):
    """Random writes; earlier lists are checked against later watches."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(keep=10_000)
        self.revisions = [self.store.revision]
        self.lists: list[tuple[Query, Any]] = []

    @rule(namespace=NAMESPACES, name=NAMES, colour=COLOURS)
    def write(self, namespace: str, name: str, colour: str) -> None:
        stored = self.store.put("configmaps", (namespace, name), settings(namespace, name, colour))
        assert stored["metadata"]["resourceVersion"] == str(self.store.revision)
        self.revisions.append(self.store.revision)

    @rule(namespace=NAMESPACES, name=NAMES)
    def remove(self, namespace: str, name: str) -> None:
        if self.store.get("configmaps", (namespace, name)):
            gone = self.store.remove("configmaps", (namespace, name))
            assert gone["metadata"]["resourceVersion"] == str(self.store.revision)
            self.revisions.append(self.store.revision)

    @rule(namespace=st.sampled_from(["", "x"]), labels=st.sampled_from(["", "colour=red"]))
    def look(self, namespace: str, labels: str) -> None:
        assert SETTINGS
        query = Query(SETTINGS, namespace, labels)
        self.lists.append((query, list_objects(self.store, query)))

    @invariant()
    def revisions_grow(self) -> None:
        assert all(a < b for a, b in zip(self.revisions, self.revisions[1:], strict=False))

    @invariant()
    def a_list_and_its_watch_give_the_present(self) -> None:
        for query, listed in self.lists:
            seen = content(listed["items"])
            watch = Watch(self.store, query, int(listed["metadata"]["resourceVersion"]))
            for event in watch.pending():
                ((key, revision),) = content([event["object"]]).items()
                assert (event["type"] == "ADDED") is (key not in seen)
                seen.pop(key, None)
                if event["type"] != "DELETED":
                    seen[key] = revision
            assert seen == content(list_objects(self.store, query)["items"])

    @invariant()
    def past_moments_can_be_listed(self) -> None:
        for query, listed in self.lists:
            revision = listed["metadata"]["resourceVersion"]
            again = list_objects(self.store, query, revision=revision, match="Exact")
            assert again == listed


TestLife = Life.TestCase


@given(st.integers(1, 7), st.sets(st.text(string.ascii_lowercase, min_size=1, max_size=3)))
def test_pages_together_are_the_list(limit: int, names: set[str]) -> None:
    assert SETTINGS
    store, query = Store(), Query(SETTINGS)
    for name in names:
        store.put("configmaps", ("x", name), settings("x", name, "red"))
    whole = list_objects(store, query)["items"]
    found: list[Any] = []
    token = ""
    while True:
        page = list_objects(store, query, limit=limit, token=token)
        assert len(page["items"]) <= limit
        found += page["items"]
        token = page["metadata"].get("continue", "")
        store.put("configmaps", ("x", "zzzz"), settings("x", "zzzz", "red"))
        if not token:
            break
    assert found == whole


def test_history_is_bounded() -> None:
    assert SETTINGS
    store = Store(keep=10)
    for turn in range(100):
        store.put("configmaps", ("x", "a"), settings("x", "a", f"c{turn}"))
    assert len(store.changes(store.revision - 5)) == 5
    with pytest.raises(StatusError) as caught:
        store.changes(store.revision - 11)
    assert (caught.value.code, caught.value.reason) == (410, "Expired")


def test_forgotten_history_leaves_the_present() -> None:
    assert SETTINGS
    store = Store()
    first = store.put("configmaps", ("x", "a"), settings("x", "a", "red"))
    store.put("configmaps", ("x", "a"), settings("x", "a", "blue"))
    store.expire()
    assert store.changes(store.revision) == []
    with pytest.raises(StatusError):
        store.changes(int(first["metadata"]["resourceVersion"]))
    assert len(list_objects(store, Query(SETTINGS))["items"]) == 1
