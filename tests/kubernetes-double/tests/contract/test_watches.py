"""Watches: resume from any revision, selectors, timeouts."""

from __future__ import annotations

from typing import Any

from kubernetes import watch


def events(clients: Any, seconds: int = 2, **options: Any) -> list[tuple[str, str]]:
    """Events on the test's ConfigMaps from a watch of this many seconds."""
    listing = clients.core.list_namespaced_config_map
    stream: Any = watch.Watch().stream(
        listing, clients.namespace, timeout_seconds=seconds, **options
    )
    found = [(one["type"], one["object"].metadata.name) for one in stream]
    return [one for one in found if one[1] != "kube-root-ca.crt"]


def revision(clients: Any) -> str:
    return clients.core.list_namespaced_config_map(clients.namespace).metadata.resource_version


def edit(clients: Any, name: str, **change: Any) -> Any:
    return clients.core.patch_namespaced_config_map(name, clients.namespace, change)


def test_a_watch_continues_from_a_list(clients: Any) -> None:
    clients.settings("before")
    start = revision(clients)
    clients.settings("after", data={"a": "1"})
    edit(clients, "after", data={"a": "2"})
    clients.core.delete_namespaced_config_map("before", clients.namespace)
    assert events(clients, resource_version=start) == [
        ("ADDED", "after"),
        ("MODIFIED", "after"),
        ("DELETED", "before"),
    ]


def test_a_watch_resumes_between_two_events(clients: Any) -> None:
    made = clients.settings("one", data={"a": "1"})
    edit(clients, "one", data={"a": "2"})
    start = made.metadata.resource_version
    assert events(clients, resource_version=start) == [("MODIFIED", "one")]


def test_a_watch_without_revision_lists_existing_objects(clients: Any) -> None:
    clients.settings("one")
    assert events(clients) == [("ADDED", "one")]


def test_events_come_while_the_watch_is_open(clients: Any) -> None:
    start = revision(clients)
    clients.settings("one")
    listing = clients.core.list_namespaced_config_map
    watcher = watch.Watch()
    stream: Any = watcher.stream(
        listing, clients.namespace, resource_version=start, timeout_seconds=120
    )
    found: list[tuple[str, str]] = []
    for event in stream:
        name = event["object"].metadata.name
        if name == "one":  # the watch is open: it tells of what was before it
            clients.settings("two")
        if name != "kube-root-ca.crt":
            found.append((event["type"], name))
        if name == "two":
            watcher.stop()
    assert found == [("ADDED", "one"), ("ADDED", "two")]


def test_what_leaves_the_selection_is_deleted_to_the_watcher(clients: Any) -> None:
    clients.settings("one", metadata={"labels": {"app": "x"}})
    clients.settings("other", metadata={"labels": {"app": "y"}})
    start = revision(clients)
    edit(clients, "one", metadata={"labels": {"app": "y"}})
    edit(clients, "other", metadata={"labels": {"app": "x"}})
    clients.core.delete_namespaced_config_map("other", clients.namespace)
    found = events(clients, resource_version=start, label_selector="app=x")
    assert found == [("DELETED", "one"), ("ADDED", "other"), ("DELETED", "other")]


def test_one_object_is_watched_by_its_name(clients: Any) -> None:
    start = revision(clients)
    clients.settings("one")
    clients.settings("two")
    found = events(clients, resource_version=start, field_selector="metadata.name=two")
    assert found == [("ADDED", "two")]


def test_deletions_carry_their_own_revision(clients: Any) -> None:
    made = clients.settings("one")
    clients.core.delete_namespaced_config_map("one", clients.namespace)
    listing = clients.core.list_namespaced_config_map
    stream: Any = watch.Watch().stream(
        listing,
        clients.namespace,
        resource_version=made.metadata.resource_version,
        timeout_seconds=2,
    )
    (last,) = list(stream)
    assert last["type"] == "DELETED"
    seen = int(last["object"].metadata.resource_version)
    assert seen > int(made.metadata.resource_version)
