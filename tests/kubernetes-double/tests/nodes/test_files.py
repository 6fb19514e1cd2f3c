"""Environment, hosts files and volumes, without namespaces."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.client import CONFIG_MAP, Kind
from kubernetes_double.nodes.kubelet.environment import (
    command_of,
    environment_of,
    expand,
    field_of,
)
from kubernetes_double.nodes.kubelet.hosts import hosts_of
from kubernetes_double.nodes.kubelet.proxy import rules_of
from kubernetes_double.nodes.kubelet.volumes import File, publish

Object = dict[str, Any]
POD: Object = {
    "metadata": {"name": "p", "labels": {"a": "1", "b/c": "2"}},
    "spec": {"serviceAccountName": "robot"},
}


def nothing(kind: Kind, name: str) -> Object | None:
    return None


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("$(A)-$(B)", "1-$(B)"),
        ("$$(A)", "$(A)"),
        ("$A ${A} $", "$A ${A} $"),
        ("$$$(A)", "$1"),
        ("$(A", "$(A"),
    ],
)
def test_references_are_expanded_as_kubernetes_does(text: str, seen: str) -> None:
    assert expand(text, {"A": "1"}) == seen


@given(text=st.text(alphabet="ab()"))
def test_text_without_dollars_stays(text: str) -> None:
    assert expand(text, {"a": "1"}) == text


def test_fields() -> None:
    assert field_of(POD, "metadata.labels['b/c']") == "2"
    assert field_of(POD, "metadata.annotations['none']") == ""
    assert field_of(POD, "metadata.labels") == 'a="1"\nb/c="2"\n'
    assert field_of(POD, "spec.serviceAccountName") == "robot"
    with pytest.raises(NotFoundError, match="no such field"):
        field_of(POD, "status.podIP")


def test_what_is_missing_is_named() -> None:
    source = {"configMapKeyRef": {"name": "c", "key": "k"}}
    container: Object = {"name": "main", "env": [{"name": "X", "valueFrom": source}]}
    with pytest.raises(NotFoundError, match="configmap 'c' not found"):
        environment_of(container, pod=POD, base={}, lookup=nothing)

    def other_key(kind: Kind, name: str) -> Object | None:
        return {"data": {"other": "1"}} if kind is CONFIG_MAP else None

    with pytest.raises(NotFoundError, match="'c' has no key 'k'"):
        environment_of(container, pod=POD, base={}, lookup=other_key)
    with pytest.raises(NotFoundError, match="no command"):
        command_of({"name": "main"}, {})


def test_later_variables_see_earlier_ones() -> None:
    env = [
        {"name": "A", "value": "$(B)"},
        {"name": "B", "value": "2"},
        {"name": "C", "value": "$(B)"},
    ]
    found = environment_of({"name": "m", "env": env}, pod=POD, base={"Z": "0"}, lookup=nothing)
    assert found == {"Z": "0", "A": "$(B)", "B": "2", "C": "2"}


def slice_of(service: str, namespace: str, *endpoints: Object) -> Object:
    labels = {"kubernetes.io/service-name": service}
    metadata = {"name": service, "namespace": namespace, "labels": labels}
    return {"metadata": metadata, "endpoints": list(endpoints)}


def service(name: str, address: str) -> Object:
    spec = {"clusterIP": address, "ports": [{"port": 80}]}
    return {"metadata": {"name": name, "namespace": "here"}, "spec": spec}


def test_names_of_services_and_of_their_pods() -> None:
    up = {"addresses": ["1.1.1.1"], "conditions": {"ready": True}, "hostname": "db-0"}
    down = {"addresses": ["1.1.1.2"], "conditions": {"ready": False}, "hostname": "db-1"}
    slices = [slice_of("db", "here", up, down), slice_of("web", "here", up)]
    services = [service("db", "None"), service("web", "10.0.0.7")]
    lines = [line.split() for line in hosts_of("here", services, slices).splitlines()]
    names = {address: rest for address, *rest in lines}
    assert {"db", "db.here.svc.cluster.local", "db-0.db", "db-0.db.here"} <= set(names["1.1.1.1"])
    assert "1.1.1.2" not in names
    assert names["10.0.0.7"][:2] == ["web", "web.here"]
    there = hosts_of("there", services, slices)
    assert " db " not in there
    assert " db.here " in there


def test_connections_to_a_service_go_to_its_ready_pods() -> None:
    one, two, down = (
        {"addresses": [f"1.1.1.{n}"], "conditions": {"ready": n < 3}} for n in (1, 2, 3)
    )
    entry = {**slice_of("web", "here", one, two, down), "ports": [{"port": 8080}]}
    alone = {**slice_of("db", "here", one), "ports": [{"port": 8080}]}
    services = [service("web", "10.0.0.7"), service("db", "None"), service("empty", "10.0.0.8")]
    rules = [line for line in rules_of(services, [entry, alone]).splitlines() if "-d " in line]
    first, second = rules
    assert "-d 10.0.0.7/32 -p tcp -m tcp --dport 80 " in first
    assert first.endswith("--probability 0.500000 -j DNAT --to-destination 1.1.1.1:8080")
    assert second.endswith("--probability 1.000000 -j DNAT --to-destination 1.1.1.2:8080")


def test_ports_of_a_service_are_found_by_name() -> None:
    up = {"addresses": ["1.1.1.1"], "conditions": {"ready": True}}
    ports = [{"name": "metrics", "port": 9001}, {"name": "http", "port": 9002}]
    entry = {**slice_of("web", "here", up), "ports": ports}
    web = service("web", "10.0.0.7")
    web["spec"]["ports"] = [{"name": "http", "port": 80}, {"name": "grpc", "port": 81}]
    (rule,) = [line for line in rules_of([web], [entry]).splitlines() if "-d " in line]
    assert "--dport 80 " in rule
    assert rule.endswith("--to-destination 1.1.1.1:9002")


def test_files_are_swapped_as_one(tmp_path: Path) -> None:
    publish(tmp_path, {"a": File(b"1"), "deep/b": File(b"1", 0o400)}, group=None)
    opened = (tmp_path / "..data").resolve()
    assert (tmp_path / "deep" / "b").stat().st_mode & 0o777 == 0o400
    publish(tmp_path, {"a": File(b"2"), "c": File(b"2")}, group=None)
    assert {path.name for path in tmp_path.iterdir() if path.name[:2] != ".."} == {"a", "c"}
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes() == b"2"
    assert not opened.exists(), "what was shown before is removed"


def test_unchanged_files_are_left_alone(tmp_path: Path) -> None:
    publish(tmp_path, {"a": File(b"1")}, group=None)
    before = (tmp_path / "..data").resolve()
    publish(tmp_path, {"a": File(b"1")}, group=None)
    assert (tmp_path / "..data").resolve() == before
