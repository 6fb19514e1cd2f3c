"""Why a pod does or does not fit a node."""

from typing import Any

import pytest

from kubernetes_double.nodes.workloads.scheduler import needs_of, quantity, why_not

Object = dict[str, Any]


def node(**spec: Any) -> Object:
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    status |= {"allocatable": {"pods": "2", "cpu": "2", "nvidia.com/gpu": "1"}}
    return {"metadata": {"name": "a", "labels": {"zone": "x"}}, "spec": spec, "status": status}


def pod(requests: Object | None = None, **spec: Any) -> Object:
    containers = [{"name": "main", "resources": {"requests": requests or {}}}]
    return {"metadata": {"name": "p"}, "spec": {"containers": containers, **spec}}


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), (3, 3), ("1Ki", 1024), ("1k", 1000), ("1.5Gi", 1.5 * 2**30)],
)
def test_quantities(text: str | int, value: float) -> None:
    assert quantity(text) == value


def test_requests_of_a_pod_and_limits_in_their_place() -> None:
    made = pod({"cpu": "500m"})
    made["spec"]["containers"][0]["resources"]["limits"] = {"cpu": "4", "nvidia.com/gpu": "1"}
    assert needs_of(made) == {"pods": 1, "cpu": 0.5, "nvidia.com/gpu": 1}


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (pod({"cpu": "2"}), ""),
        (pod({"cpu": "2500m"}), "Insufficient cpu"),
        (pod({"nvidia.com/gpu": "2"}), "Insufficient nvidia.com/gpu"),
        (pod({"amd.com/gpu": "1"}), "Insufficient amd.com/gpu"),
        (pod(nodeSelector={"zone": "x"}), ""),
        (pod(nodeSelector={"zone": "y"}), "node(s) didn't match Pod's node affinity/selector"),
    ],
)
def test_resources_and_selectors(wanted: Object, reason: str) -> None:
    assert why_not(wanted, node(), []) == reason


def test_what_others_use_counts() -> None:
    other = pod({"cpu": "1500m"}, nodeName="a")
    elsewhere = pod({"cpu": "1500m"}, nodeName="b")
    assert why_not(pod({"cpu": "1"}), node(), [elsewhere]) == ""
    assert why_not(pod({"cpu": "1"}), node(), [other]) == "Insufficient cpu"
    assert why_not(pod(), node(), [other, other]) == "Insufficient pods"


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_taints(toleration: Object, fits: bool) -> None:
    tainted = node(taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    assert (why_not(pod(tolerations=[toleration]), tainted, []) == "") is fits


def test_cordoned_and_lost_nodes_take_nothing() -> None:
    lost = node()
    lost["status"]["conditions"] = []
    assert "unschedulable" in why_not(pod(), node(unschedulable=True), [])
    assert "not ready" in why_not(pod(), lost, [])
