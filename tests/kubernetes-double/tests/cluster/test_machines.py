"""Nodes: scheduling, and the loss of a node."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kubernetes_double import Cluster, Node

Object = dict[str, Any]
Make = Callable[..., Object]
IDLE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
RESOURCES = {"cpu": "64", "memory": "256Gi", "pods": "110"}
GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def node_of(cluster: Cluster, pod: str) -> str:
    return ((cluster.get("Pod", pod) or {}).get("spec") or {}).get("nodeName", "")


def why_pending(cluster: Cluster, pod: str) -> str:
    conditions = (cluster.get("Pod", pod) or {}).get("status", {}).get("conditions", [])
    return " ".join(c.get("message", "") for c in conditions if c["type"] == "PodScheduled")


def test_gpus_are_counted(cluster: Cluster, pod: Make) -> None:
    made = [pod(f"g{n}", IDLE, container=GPU, tolerations=[TOLERATION]) for n in range(3)]
    cluster.apply(made)
    cluster.until(lambda: cluster.ready("app in (g0, g1, g2)") == 2, "as many run as GPUs")
    [waiting] = [n for n in ("g0", "g1", "g2") if not node_of(cluster, n)]
    lacks = "Insufficient nvidia.com/gpu"
    cluster.until(lambda: lacks in why_pending(cluster, waiting), "it says what it lacks")
    running = next(n for n in ("g0", "g1", "g2") if n != waiting)
    assert node_of(cluster, running) == "gpu-a"
    cluster.delete("Pod", running)
    cluster.until(lambda: cluster.ready(f"app={waiting}"), "the last one takes its place")


def test_taints_selectors_and_affinity(cluster: Cluster, pod: Make) -> None:
    wanted = {"key": "gpu", "operator": "In", "values": ["h100", "b200"]}
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [wanted]}]
            }
        }
    }
    cluster.apply(
        [
            pod("fast", IDLE, nodeSelector={"disk": "fast"}),
            pod("none", IDLE, nodeSelector={"disk": "slow"}),
            pod("kept-out", IDLE, affinity=affinity),
            pod("let-in", IDLE, affinity=affinity, tolerations=[TOLERATION]),
        ]
    )
    cluster.until(lambda: cluster.ready("app in (fast, let-in)") == 2, "two fit")
    assert (node_of(cluster, "fast"), node_of(cluster, "let-in")) == ("plain-b", "gpu-a")
    cluster.until(lambda: "affinity/selector" in why_pending(cluster, "none"), "it says why")
    cluster.until(lambda: "untolerated taint" in why_pending(cluster, "kept-out"), "so does it")


@pytest.fixture
def spot(cluster: Cluster) -> Iterator[str]:
    """A node that the test may lose."""
    name = f"spot-{cluster.namespace}"
    labels = {"spot": cluster.namespace}
    cluster.add_node(Node(name=name, labels=labels, resources=RESOURCES))
    yield name
    cluster.delete("Node", name)


def test_a_drain_waits_for_the_budget(cluster: Cluster, workload: Make, spot: str) -> None:
    prefer = {"nodeSelector": {"spot": cluster.namespace}}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web"},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": "web"}}},
    }
    made = workload("Deployment", "web", IDLE, more={"replicas": 2}, **prefer)
    cluster.apply([budget, made])
    cluster.until(lambda: cluster.ready("app=web") == 2, "both run")
    with pytest.raises(TimeoutError):
        cluster.drain(spot, timeout_s=1)
    cluster.delete("PodDisruptionBudget", "web")
    cluster.drain(spot)
    assert cluster.ready("app=web") == 0
    cluster.until(lambda: "selector" in str(cluster.pods("app=web")), "there is no other place")


@pytest.mark.parametrize(
    ("notice_s", "rounds"), [pytest.param(120, 10, id="enough"), pytest.param(1, 10**6, id="short")]
)
def test_a_preempted_node_gives_notice_and_goes(
    cluster: Cluster, pod: Make, spot: str, notice_s: int, rounds: int
) -> None:
    code = f"""
import signal, sys, time
def leave(*_):
    print("told", flush=True)
    for _ in range({rounds}): time.sleep(0.1)
    print("done", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True: time.sleep(0.1)
"""
    where = {"nodeSelector": {"spot": cluster.namespace}, "terminationGracePeriodSeconds": 3600}
    cluster.apply([pod("victim", code, **where)])
    cluster.until(
        lambda: cluster.ready("app=victim") and "up\n" in cluster.logs("victim"), "it runs"
    )
    cluster.preempt(spot, notice_s=notice_s)
    assert cluster.get("Node", spot) is None
    cluster.until(lambda: cluster.get("Pod", "victim") is None, "it is gone")
    [log] = (cluster.folder / "logs" / cluster.namespace / "victim").rglob("main.log")
    told = log.read_text().split()
    if notice_s > 1:
        assert told == ["up", "told", "done"], "it had time to end its work"
    else:
        assert "done" not in told, "it was not waited for"


def test_a_lost_node_takes_its_pods(cluster: Cluster, workload: Make, spot: str) -> None:
    prefer = {"nodeSelector": {"spot": cluster.namespace}}
    cluster.apply([workload("Deployment", "web", IDLE, **prefer)])
    cluster.until(lambda: cluster.ready("app=web") == 1, "it runs")
    [old] = [pod["metadata"]["name"] for pod in cluster.pods("app=web")]
    cluster.lose(spot)
    cluster.until(lambda: cluster.get("Pod", old) is None, "it is gone")
    cluster.until(lambda: len(cluster.pods("app=web")) == 1, "another waits for a node")
    cluster.add_node(Node(name=spot, labels={"spot": cluster.namespace}, resources=RESOURCES))
    cluster.until(lambda: cluster.ready("app=web") == 1, "it runs on the new one")
