"""Lists: selectors, pages, and deletion of whole collections."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def labelled(clients: Any) -> Any:
    for name, labels in {
        "a": {"app": "x", "tier": "front"},
        "b": {"app": "x", "tier": "back"},
        "c": {"app": "y"},
        "d": {},
    }.items():
        clients.settings(name, metadata={"labels": labels})
    return clients


def names(clients: Any, **selectors: Any) -> list[str]:
    found = clients.core.list_namespaced_config_map(clients.namespace, **selectors).items
    return [one.metadata.name for one in found if one.metadata.name != "kube-root-ca.crt"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("app=x", "ab"),
        ("app==x,tier=back", "b"),
        ("app!=x", "cd"),
        ("tier", "ab"),
        ("!tier", "cd"),
        ("app in (x,y)", "abc"),
        ("app notin (x)", "cd"),
        ("app,tier notin (front)", "bc"),
    ],
)
def test_labels_select(labelled: Any, selector: str, expected: str) -> None:
    assert names(labelled, label_selector=selector) == list(expected)


def test_fields_select(labelled: Any, pod: Any) -> None:
    assert names(labelled, field_selector="metadata.name=b") == ["b"]
    assert names(labelled, field_selector="metadata.name!=b,metadata.name!=c") == ["a", "d"]
    namespace = labelled.namespace
    for name in ("one", "two"):
        labelled.core.create_namespaced_pod(namespace, pod(name))
    labelled.core.patch_namespaced_pod_status("two", namespace, {"status": {"phase": "Failed"}})

    def pods(selector: str) -> list[str]:
        found = labelled.core.list_namespaced_pod(namespace, field_selector=selector).items
        return [one.metadata.name for one in found]

    assert pods("status.phase=Pending") == ["one"]
    assert pods("status.phase!=Pending") == ["two"]
    assert pods("spec.nodeName=") == ["one", "two"]
    everywhere = labelled.core.list_pod_for_all_namespaces(
        field_selector=f"metadata.namespace={namespace}"
    )
    assert len(everywhere.items) == 2


def test_events_are_found_by_their_object(clients: Any) -> None:
    body = {
        "metadata": {"generateName": "one-", "namespace": clients.namespace},
        "regarding": {"kind": "Job", "name": "one", "namespace": clients.namespace},
        "reason": "Started",
        "note": "it starts",
        "type": "Normal",
        "action": "Start",
        "reportingController": "double.example/contract",
        "reportingInstance": "test",
        "eventTime": "2026-01-01T00:00:00.000000Z",
    }
    clients.kind("events.k8s.io/v1", "Event").create(body, namespace=clients.namespace)
    listed = clients.core.list_namespaced_event(
        clients.namespace, field_selector="involvedObject.name=one,involvedObject.kind=Job"
    )
    (event,) = listed.items
    assert (event.message, event.reason) == ("it starts", "Started")
    assert event.reporting_component == "double.example/contract"


@pytest.mark.parametrize("selector", ["spec.image=x", "nonsense"])
def test_other_fields_select_nothing(clients: Any, refusal: Any, selector: str) -> None:
    listing = clients.core.list_namespaced_pod
    found = refusal(listing, clients.namespace, field_selector=selector)
    assert (found.code, found.reason) == (400, "BadRequest")


def test_pages_are_of_one_moment(labelled: Any) -> None:
    listing = labelled.core.list_namespaced_config_map
    selector = {"label_selector": "app"}
    first = listing(labelled.namespace, limit=2, **selector)
    assert [one.metadata.name for one in first.items] == ["a", "b"]
    labelled.settings("bb", metadata={"labels": {"app": "z"}})
    labelled.core.delete_namespaced_config_map("c", labelled.namespace)
    token = first.metadata._continue
    second = listing(labelled.namespace, limit=2, _continue=token, **selector)
    assert [one.metadata.name for one in second.items] == ["c"]
    assert not second.metadata._continue
    assert second.metadata.resource_version == first.metadata.resource_version


def test_a_selected_collection_is_deleted(labelled: Any) -> None:
    labelled.core.delete_collection_namespaced_config_map(
        labelled.namespace, label_selector="app=x"
    )
    assert names(labelled) == ["c", "d"]
