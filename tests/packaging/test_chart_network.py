"""NetworkPolicies allow exactly the connections of the architecture, on both sides."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.enums import WorkerKind
from paceline.platform.transport.rpc_authorization import WEIGHT_PEERS, callers
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.kubernetes import names
from paceline_controller.runtimes.kubernetes.manifests import ManifestContext, build

COMPONENTS = (
    *("gateway", "controller", "experience", "environment", "reward", "trainer", "rollout"),
    *("store", "certificates"),
)
PORTS = {"http": 8300, "grpc": 8400, "metrics": 8401, "weights": 8402, "torchrun": 8403}
# All ports that anything in the release listens on, and one of those that torch chooses.
LISTENED = (*PORTS.values(), 6379, 40123)
# The arrows of the architecture inside the release: from, to, port.
ARROWS = {
    ("gateway", "experience", 8400),
    ("controller", "experience", 8400),
    ("controller", "gateway", 8400),
    ("environment", "experience", 8400),
    ("environment", "rollout", 8400),
    ("environment", "reward", 8400),
    ("reward", "experience", 8400),
    ("rollout", "experience", 8400),
    ("rollout", "trainer", 8402),
    ("rollout", "rollout", 8402),
    ("trainer", "experience", 8400),
    ("experience", "store", 6379),
}

Object = dict[str, Any]
Render = Callable[..., list[Object]]


@dataclass(frozen=True)
class NetworkPeer:
    """A pod or, if it has an address, a machine outside the cluster."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = "training"
    address: str = ""


def component(name: str) -> NetworkPeer:
    labels = {"name": "paceline", "instance": "rel", "component": name}
    return NetworkPeer({f"app.kubernetes.io/{key}": value for key, value in labels.items()})


def matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """Whether a selector matches labels; an empty one matches all, None matches nothing."""
    if selector is None:
        return False
    assert set(selector) <= {"matchLabels"}, "the evaluation below knows matchLabels only"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def is_peer(peer: Object, other: NetworkPeer) -> bool:
    if "ipBlock" in peer:
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return bool(other.address) and ipaddress.ip_address(other.address) in network
    if other.address:
        return False
    if "namespaceSelector" in peer:
        space = {"kubernetes.io/metadata.name": other.namespace}
        return matches(peer["namespaceSelector"], space) and (
            "podSelector" not in peer or matches(peer["podSelector"], other.labels)
        )
    return other.namespace == "training" and matches(peer["podSelector"], other.labels)


def allows(rule: Object, side: str, other: NetworkPeer, port: int, protocol: str) -> bool:
    peers, ports = rule.get(side), rule.get("ports")
    here = not peers or any(is_peer(peer, other) for peer in peers)
    return here and (
        not ports or any((p["protocol"], p["port"]) == (protocol, port) for p in ports)
    )


def side_allows(
    policies: list[Object],
    direction: str,
    own: NetworkPeer,
    other: NetworkPeer,
    port: int,
    protocol: str,
) -> bool:
    """All policies that select a pod add up; a pod without any is open, as specified by the API."""
    if own.namespace != "training" or own.address:
        return True
    side = {"ingress": "from", "egress": "to"}[direction]
    selecting = [
        p["spec"]
        for p in policies
        if matches(p["spec"]["podSelector"], own.labels)
        and direction.capitalize() in p["spec"]["policyTypes"]
    ]
    return not selecting or any(
        allows(rule, side, other, port, protocol)
        for spec in selecting
        for rule in spec.get(direction) or []
    )


def connects(
    policies: list[Object], start: NetworkPeer, end: NetworkPeer, port: int, protocol: str = "TCP"
) -> bool:
    out = side_allows(policies, "egress", start, end, port, protocol)
    return out and side_allows(policies, "ingress", end, start, port, protocol)


@pytest.fixture
def policies(render: Render) -> Callable[..., list[Object]]:
    def found(*arguments: str) -> list[Object]:
        return [o for o in render(*arguments) if o["kind"] == "NetworkPolicy"]

    return found


def allowed(policies: list[Object]) -> set[tuple[str, str, int]]:
    return {
        (start, end, port)
        for start in COMPONENTS
        for end in COMPONENTS
        for port in LISTENED
        if connects(policies, component(start), component(end), port)
    }


def test_arrows_and_nothing_else(policies: Any) -> None:
    assert allowed(policies("default")) == ARROWS


def test_the_arrows_are_those_of_certificates() -> None:
    """Services can reach exactly those that their certificates allow them to call."""
    calls = {
        (str(caller), str(server), PORTS["grpc"])
        for server, rows in callers().items()
        for service, row in rows.items()
        if service != "Health"  # for whoever supervises processes on one machine
        for callers in row.values()
        for caller in callers or ()
    }
    calls = {call for call in calls if {*call} & {*COMPONENTS} >= {*call[:2]}}
    streams = {
        (str(one), str(other), PORTS["weights"]) for one in WEIGHT_PEERS for other in WEIGHT_PEERS
    }
    arrows = {arrow for arrow in ARROWS if arrow[1] != "store" and arrow[2] in LISTENED}
    # Tokens decide at the gateway; a trainer pulls no weights from rollout workers.
    assert calls == {a for a in arrows if a[2] == PORTS["grpc"] and a[1] != "gateway"}
    assert {a for a in arrows if a[2] == PORTS["weights"]} <= streams


@pytest.mark.parametrize("feature", ["external-store", "existing-secrets"])
def test_without_the_embedded_store_no_policy_opens_it(feature: str, policies: Any) -> None:
    assert allowed(policies(feature)) == {arrow for arrow in ARROWS if arrow[1] != "store"}


def test_trainers_reach_those_of_their_own_job(policies: Any) -> None:
    """By policies of the controller: the chart's cannot tell one job from another."""
    wanted = [Wanted(f"trainer-{job}", WorkerKind.TRAINER, job_id=job) for job in ("a-1", "b-2")]
    template = {"spec": {"containers": [{"name": "paceline"}]}}
    context = ManifestContext("rel", network_policies=True)
    made = [build(each, template, incarnation=1, context=context)[0] for each in wanted]
    one, other = (NetworkPeer(names.labels(each, release="rel")) for each in wanted)
    found = [*policies("default"), *made]
    assert {policy["kind"] for policy in made} == {"NetworkPolicy"}
    for port in LISTENED:
        assert connects(found, one, one, port)
        assert not connects(found, one, other, port)
    assert connects(found, one, component("experience"), 8400)
    assert connects(found, component("rollout"), one, 8402)
    assert not connects(found, component("rollout"), one, 8403)


def test_off_means_open(policies: Any) -> None:
    assert policies("network-policy-off") == []


def test_evaluation_sees_what_is_open() -> None:
    assert connects([], component("reward"), component("store"), 6379)


def test_the_pods_of_the_release_are_those_that_are_selected(render: Render, pods: Any) -> None:
    objects = render()
    found = [o for o in objects if o["kind"] == "NetworkPolicy"]
    known = {component(name).labels["app.kubernetes.io/component"] for name in COMPONENTS}
    seen: set[str] = set()
    for template in pods(objects).values():
        labels = template["metadata"]["labels"]
        seen.add(labels["app.kubernetes.io/component"])
        selecting = [p for p in found if matches(p["spec"]["podSelector"], labels)]
        # The one that denies and its own; while certificates are made first that of the hook too.
        own = labels["app.kubernetes.io/component"]
        extra = {"rel-paceline-certificates-hook"} if own == "certificates" else set[str]()
        names = {policy["metadata"]["name"] for policy in selecting}
        assert names == {"rel-paceline", f"rel-paceline-{own}"} | extra
    assert seen == known


def test_another_release_and_another_namespace_stay_outside(policies: Any) -> None:
    found = policies("default")
    for name in COMPONENTS:
        same = component(name).labels
        elsewhere = NetworkPeer(same, namespace="other")
        other_release = NetworkPeer(same | {"app.kubernetes.io/instance": "other"})
        for stranger in (elsewhere, other_release, NetworkPeer()):
            for end in set(COMPONENTS) - {"gateway"}:
                for port in LISTENED:
                    assert not connects(found, stranger, component(end), port)


USER = NetworkPeer({"app": "notebook"}, namespace="users")
OUTSIDE = NetworkPeer(address="192.0.2.7")


@pytest.mark.parametrize("user", [USER, OUTSIDE], ids=["pod", "outside"])
def test_users_reach_the_gateway_only(user: NetworkPeer, policies: Any) -> None:
    found = policies("default")
    reached = {
        (name, port)
        for name in COMPONENTS
        for port in LISTENED
        if connects(found, user, component(name), port)
    }
    assert reached == {("gateway", 8300), ("gateway", 8400)}


def test_gateway_can_be_left_to_the_ingress(policies: Any) -> None:
    found = policies("ingress")
    proxy = NetworkPeer({"app": "nginx"}, namespace="ingress-nginx")
    assert connects(found, proxy, component("gateway"), 8300)
    assert not connects(found, USER, component("gateway"), 8300)
    assert connects(found, component("controller"), component("gateway"), 8400)


def test_prometheus_reads_metrics_and_nothing_else(policies: Any) -> None:
    prometheus = NetworkPeer({"app.kubernetes.io/name": "prometheus"}, namespace="monitoring")
    other = NetworkPeer({"app.kubernetes.io/name": "grafana"}, namespace="monitoring")
    found = policies("monitoring")
    for name in set(COMPONENTS) - {"store", "certificates"}:
        assert connects(found, prometheus, component(name), 8401)
        assert not connects(found, other, component(name), 8401)
    assert not connects(found, prometheus, component("experience"), 8400)
    assert not connects(found, prometheus, component("store"), 6379)
    narrow = policies("network-policy-narrow")
    assert not connects(narrow, prometheus, component("gateway"), 8401)


def test_all_ask_the_name_service(policies: Any) -> None:
    dns = NetworkPeer({"k8s-app": "kube-dns"}, namespace="kube-system")
    found = policies("default")
    for name in COMPONENTS:
        for protocol in ("TCP", "UDP"):
            assert connects(found, component(name), dns, 53, protocol)
        assert not connects(found, component(name), NetworkPeer(namespace="other"), 53)
    openshift = NetworkPeer(namespace="openshift-dns")
    assert connects(policies("openshift"), component("reward"), openshift, 5353, "UDP")


@pytest.mark.parametrize("port", [443, 6443])
def test_only_controller_and_certificates_reach_the_api_server(port: int, policies: Any) -> None:
    found = policies("default")
    reach = {name for name in COMPONENTS if connects(found, component(name), OUTSIDE, port)}
    assert reach == {"controller", "certificates"}


@pytest.mark.parametrize("port", [443, 6443])
def test_the_hook_needs_no_policy_of_a_release_before(port: int, policies: Any) -> None:
    found = policies("default")
    deny, hook = (
        next(p for p in found if p["metadata"]["name"] == name)
        for name in ("rel-paceline", "rel-paceline-certificates-hook")
    )
    assert "pre-install,pre-upgrade" in hook["metadata"]["annotations"]["helm.sh/hook"]
    assert int(hook["metadata"]["annotations"]["helm.sh/hook-weight"]) < 0
    assert connects([deny, hook], component("certificates"), OUTSIDE, port)
    assert not connects([deny], component("certificates"), OUTSIDE, port)


def test_the_address_of_the_api_server_can_be_set(policies: Any) -> None:
    found = policies("network-policy-narrow")
    server = NetworkPeer(address="198.51.100.1")
    assert connects(found, component("controller"), server, 6443)
    assert not connects(found, component("controller"), server, 443)
    assert not connects(found, component("controller"), OUTSIDE, 6443)


def test_only_experience_reaches_an_external_store(policies: Any) -> None:
    found = policies("external-store")
    assert connects(found, component("experience"), OUTSIDE, 6380)
    assert not connects(found, component("experience"), NetworkPeer(address="203.0.113.1"), 6380)
    assert not connects(found, component("experience"), OUTSIDE, 6379)
    for name in set(COMPONENTS) - {"experience"}:
        assert not connects(found, component(name), OUTSIDE, 6380)
    ours = policies("existing-secrets")
    assert connects(ours, component("experience"), OUTSIDE, 6390)


def test_only_the_trainer_reaches_the_object_store(policies: Any) -> None:
    found = policies("object-storage")
    assert connects(found, component("trainer"), OUTSIDE, 443)
    assert not connects(found, component("rollout"), OUTSIDE, 443)
    assert not connects(policies("default"), component("trainer"), OUTSIDE, 443)


def test_those_that_run_code_of_jobs_reach_the_index_if_they_install_packages(
    policies: Any,
) -> None:
    runs_code = {"experience", "environment", "reward"}
    closed = [
        policies("default"),
        policies("default", "packages.install=true", "packages.no_index=true"),
    ]
    for found in closed:
        assert not [each for each in runs_code if connects(found, component(each), OUTSIDE, 443)]
    opened = policies("default", "packages.install=true")
    reach = {each for each in COMPONENTS if connects(opened, component(each), OUTSIDE, 443)}
    assert reach == runs_code | {"controller", "certificates"}


@pytest.mark.parametrize("allowed", ["models.hub=true", "models.stores={s3}"])
def test_those_that_read_models_reach_the_hub_or_the_store_if_that_is_allowed(
    policies: Any, allowed: str
) -> None:
    closed = policies("default")
    opened = policies("default", allowed)
    for name in ("gateway", "trainer"):
        assert not connects(closed, component(name), OUTSIDE, 443)
        assert connects(opened, component(name), OUTSIDE, 443)
    assert not connects(opened, component("rollout"), OUTSIDE, 443)


def test_those_that_trace_reach_the_collector_and_nothing_else_there(policies: Any) -> None:
    collector = NetworkPeer({"app": "collector"}, namespace="monitoring")
    found = policies("tracing")
    for name in ("experience", "environment", "reward", "rollout", "trainer"):
        assert connects(found, component(name), collector, 4317)
        assert not connects(found, component(name), collector, 4318)
        assert not connects(found, component(name), OUTSIDE, 4317)
        assert not connects(policies("default"), component(name), collector, 4317)
    assert not connects(found, component("gateway"), collector, 4317)


def test_more_can_be_allowed(policies: Any) -> None:
    found = policies("network-policy-narrow")
    judge = NetworkPeer(address="203.0.113.9")
    assert connects(found, component("reward"), judge, 443)
    assert not connects(found, component("environment"), judge, 443)
    assert connects(found, NetworkPeer({"role": "backup"}), component("store"), 6379)


def test_certificates_reach_nothing_of_the_release(policies: Any) -> None:
    found = policies("default")
    for port in LISTENED:
        for name in COMPONENTS:
            assert not connects(found, component("certificates"), component(name), port)
