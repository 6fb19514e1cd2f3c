"""The controller has exactly the permissions it needs."""

from collections.abc import Callable
from typing import Any

import pytest

# Many waits follow each other, each for as long as a busy machine may need.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Job = Callable[..., dict[str, Any]]
Until = Callable[..., Any]
REFUSED = "RefusedWeightsError: version 3, which another worker serves, was refused in 3 loads"
Right = tuple[str, str, str, str]  # API group, resource, verb, name or nothing


def granted(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def used(world: Any) -> set[Right]:
    # A server-side apply that makes an object is checked for `create` too.
    applied = (
        *(("apps", "deployments"), ("batch", "jobs"), ("", "services"), ("", "secrets")),
        ("networking.k8s.io", "networkpolicies"),
    )
    rights: set[Right] = {(group, resource, "create", "") for group, resource in applied}
    for visit in world.server.visits_of("system:serviceaccount:ml:rel-paceline-controller"):
        access = visit.access
        assert visit.allowed, f"refused: {access}"
        if access.path:
            continue
        named = access.resource == "leases" and access.verb != "create"
        name = access.name if named else ""
        rights.add((access.group, access.target, access.verb, name))
    return rights


def test_all_operations_need_exactly_the_role(
    world: Any, tiny_job: Job, until_true: Until, chart_rules: list[dict[str, Any]]
) -> None:
    world.start("ctl-0", kubernetes={"pending_timeout_s": 3600.0})
    world.apply("all", tiny_job(name="all", rollout={"replicas": 2}))
    job_id = until_true(lambda: world.status("all").get("jobId"), "not submitted")
    world.running(job_id)
    until_true(lambda: len(world.workers_of(job_id)) == 2, "not all are made")
    world.nodes.restart(world.workers_of(job_id)[0], message=REFUSED, times=3)
    until_true(lambda: world.cluster.events("Quarantined"), "not quarantined")
    (kept,) = world.cluster.list("Pod", "paceline.dev/quarantined")
    over = {"annotations": {"paceline.dev/quarantined-until": "2026-01-01T00:00:00+00:00"}}
    world.cluster.patch("Pod", kept["metadata"]["name"], {"metadata": over})
    until_true(lambda: not world.cluster.list("Pod", "paceline.dev/quarantined"), "it stays")
    world.cluster.patch("Deployment", f"rollout-{job_id}", {"spec": {"replicas": 3}})
    until_true(lambda: world.cluster.events("Scaled"), "not scaled")
    # Again: a series of the same event.
    until_true(
        lambda: world.cluster.get("Deployment", f"rollout-{job_id}")["spec"]["replicas"] == 2, "-"
    )
    world.cluster.patch("Deployment", f"rollout-{job_id}", {"spec": {"replicas": 3}})
    until_true(lambda: any(e.get("series") for e in world.cluster.list("Event")), "no series")
    world.change_image("rollout-default")
    until_true(lambda: world.cluster.events("TemplateChanged"), "not rolled out")
    world.nodes.fail(f"trainer-{job_id}-1-0", message="boom")
    until_true(lambda: world.cluster.get("Pod", f"trainer-{job_id}-2-0"), "no second incarnation")
    world.start("ctl-1")
    world.stop("ctl-0")
    until_true(lambda: world.leader() == "ctl-1", "not handed over")
    world.cluster.delete("TrainingJob", "all")
    until_true(lambda: world.cluster.get("TrainingJob", "all") is None, "it stays")
    until_true(lambda: not world.made(), "something is left")
    world.apply("goes", tiny_job(name="goes"))
    world.services.delete(until_true(lambda: world.status("goes").get("jobId"), "not submitted"))
    until_true(lambda: world.cluster.get("TrainingJob", "goes") is None, "it stays")
    rest = world.services.submit(tiny_job(name="rest"))
    world.running(rest)
    world.services.set_state(rest, "succeeded")
    until_true(lambda: not world.made(), "something is left")
    world.stop("ctl-1")
    rights, allowed = used(world), granted(chart_rules)
    assert rights - allowed == set()
    assert allowed - rights == set()


def test_everything_else_is_refused(
    world: Any, chart_rules: list[dict[str, Any]], client_as: Callable[[], Any]
) -> None:
    """Every resource with every verb: only those in the role are allowed."""
    review = client_as()
    verbs = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
    allowed = granted(chart_rules)
    targets = {
        ("", "secrets"),
        ("", "configmaps"),
        ("", "serviceaccounts"),
        ("", "serviceaccounts/token"),
        ("", "pods/exec"),
        ("", "nodes"),
        ("", "namespaces"),
        ("rbac.authorization.k8s.io", "roles"),
        ("rbac.authorization.k8s.io", "rolebindings"),
        ("apps", "statefulsets"),
        ("networking.k8s.io", "networkpolicies"),
        *((group, resource) for group, resource, _, _ in allowed),
    }
    for group, target in sorted(targets):
        for verb in verbs:
            names = [name for g, r, v, name in allowed if (g, r, v) == (group, target, verb)]
            asked = (names or [""])[0]
            assert review(group, target, verb, asked, "ml") == bool(names), (group, target, verb)
            assert not review(group, target, verb, asked, "default")
            if any(names):
                assert not review(group, target, verb, "another", "ml")
