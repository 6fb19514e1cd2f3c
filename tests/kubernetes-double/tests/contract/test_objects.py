"""Create, read, update, patch: names, revisions, generations, and refusals."""

from __future__ import annotations

from typing import Any

import pytest


def test_an_object_is_created_read_changed_and_deleted(clients: Any, refusal: Any) -> None:
    made = clients.settings("one", data={"a": "1"})
    assert made.metadata.uid
    assert made.metadata.creation_timestamp
    made.data["a"] = "2"
    changed = clients.core.replace_namespaced_config_map("one", clients.namespace, made)
    assert changed.metadata.uid == made.metadata.uid
    assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
    assert clients.core.read_namespaced_config_map("one", clients.namespace).data == {"a": "2"}
    path = f"/api/v1/namespaces/{clients.namespace}/configmaps/one"
    assert clients.send("DELETE", path)["status"] == "Success"
    found = refusal(clients.core.read_namespaced_config_map, "one", clients.namespace)
    assert (found.code, found.reason) == (404, "NotFound")
    assert found.message == 'configmaps "one" not found'
    assert found.body["details"] == {"name": "one", "kind": "configmaps"}


def test_names_are_unique(clients: Any, refusal: Any) -> None:
    clients.settings("one")
    found = refusal(clients.settings, "one")
    assert (found.code, found.reason) == (409, "AlreadyExists")
    assert found.message == 'configmaps "one" already exists'


def test_the_namespace_must_exist(clients: Any, refusal: Any) -> None:
    body = {"metadata": {"name": "one"}}
    found = refusal(clients.core.create_namespaced_config_map, "no-such-namespace", body)
    assert (found.code, found.reason) == (404, "NotFound")
    assert found.message == 'namespaces "no-such-namespace" not found'


def test_a_stale_update_conflicts(clients: Any, refusal: Any) -> None:
    first = clients.settings("one", data={"a": "1"})
    replace = clients.core.replace_namespaced_config_map
    first.data = {"a": "2"}
    replace("one", clients.namespace, first)
    first.data = {"a": "3"}
    found = refusal(replace, "one", clients.namespace, first)
    assert (found.code, found.reason) == (409, "Conflict")
    assert found.message == (
        'Operation cannot be fulfilled on configmaps "one": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )


def test_an_update_for_another_incarnation_conflicts(clients: Any, refusal: Any) -> None:
    first = clients.settings("one")
    clients.core.delete_namespaced_config_map("one", clients.namespace)
    clients.settings("one")
    first.metadata.resource_version = None
    found = refusal(clients.core.replace_namespaced_config_map, "one", clients.namespace, first)
    assert (found.code, found.reason) == (409, "Conflict")


def test_an_update_without_change_leaves_the_revision(clients: Any) -> None:
    first = clients.settings("one", data={"a": "1"})
    same = clients.core.replace_namespaced_config_map("one", clients.namespace, first)
    assert same.metadata.resource_version == first.metadata.resource_version


def test_names_are_generated(clients: Any) -> None:
    body = {"metadata": {"generateName": "worker-"}}
    make = clients.core.create_namespaced_config_map
    names = {make(clients.namespace, body).metadata.name for _ in range(5)}
    assert len(names) == 5
    assert all(name.startswith("worker-") and len(name) == 12 for name in names)


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 254])
def test_wrong_names_are_invalid(clients: Any, refusal: Any, name: str) -> None:
    found = refusal(clients.settings, name)
    assert (found.code, found.reason) == (422, "Invalid")
    assert found.fields == ["metadata.name"]


def test_what_is_missing_is_named(clients: Any, refusal: Any, deployment: Any) -> None:
    body = deployment("one")
    del body["spec"]["template"]["spec"]["containers"]
    path = f"/apis/apps/v1/namespaces/{clients.namespace}/deployments"
    found = refusal(clients.send, "POST", path, body)
    assert (found.code, found.reason) == (422, "Invalid")
    assert "spec.template.spec.containers" in found.fields


def test_what_has_the_wrong_type_is_refused(clients: Any, refusal: Any, deployment: Any) -> None:
    body = deployment("one", replicas="many")
    path = f"/apis/apps/v1/namespaces/{clients.namespace}/deployments"
    found = refusal(clients.send, "POST", path, body)
    assert (found.code, found.reason) == (400, "BadRequest")
    assert "replicas" in found.message


def test_what_names_are_generated_from_is_checked(clients: Any, refusal: Any) -> None:
    for kind in ("configmaps", "pods"):
        path = f"/api/v1/namespaces/{clients.namespace}/{kind}"
        spec = {"containers": [{"name": "c", "image": "none:1"}]} if kind == "pods" else None
        body = {"metadata": {"generateName": "one."}} | ({"spec": spec} if spec else {})
        found = refusal(clients.send, "POST", path, body)
        assert (found.code, found.reason) == (422, "Invalid")
        assert "metadata.generateName" in found.fields


def test_unknown_fields_are_refused_under_strict_validation(clients: Any, refusal: Any) -> None:
    body = {"metadata": {"name": "one"}, "dat": {"a": "1"}}
    path = f"/api/v1/namespaces/{clients.namespace}/configmaps"
    found = refusal(clients.send, "POST", path, body, fieldValidation="Strict")
    assert (found.code, found.reason) == (400, "BadRequest")
    assert 'unknown field "dat"' in found.message
    made = clients.send("POST", path, body, fieldValidation="Ignore")
    assert "dat" not in made


def test_a_quota_refuses_what_is_too_much(clients: Any, refusal: Any, pod: Any, until: Any) -> None:
    body = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1", "count/configmaps": "0"}}}
    clients.core.create_namespaced_resource_quota(clients.namespace, body)

    def counted() -> bool:
        found = clients.core.read_namespaced_resource_quota("few", clients.namespace)
        return bool(found.status and found.status.hard)

    until(counted)
    clients.core.create_namespaced_pod(clients.namespace, pod("one"))
    found = refusal(clients.core.create_namespaced_pod, clients.namespace, pod("two"))
    assert (found.code, found.reason) == (403, "Forbidden")
    assert found.message == (
        'pods "two" is forbidden: exceeded quota: few, '
        "requested: pods=1, used: pods=1, limited: pods=1"
    )
    assert (
        "exceeded quota: few, requested: count/configmaps=1"
        in refusal(clients.settings, "a").message
    )


def test_a_dry_run_writes_nothing(clients: Any, refusal: Any) -> None:
    body = {"metadata": {"name": "one"}}
    made = clients.core.create_namespaced_config_map(clients.namespace, body, dry_run="All")
    assert made.metadata.uid
    found = refusal(clients.core.read_namespaced_config_map, "one", clients.namespace)
    assert found.code == 404


def test_only_the_wish_counts_as_a_generation(clients: Any, deployment: Any) -> None:
    place = ("one", clients.namespace)
    made = clients.apps.create_namespaced_deployment(clients.namespace, deployment("one"))
    assert made.metadata.generation == 1
    patch = clients.apps.patch_namespaced_deployment
    assert patch(*place, {"metadata": {"labels": {"x": "y"}}}).metadata.generation == 1
    assert patch(*place, {"spec": {"paused": True}}).metadata.generation == 2


def test_status_has_a_door_of_its_own(clients: Any, pod: Any) -> None:
    place = ("one", clients.namespace)
    clients.core.create_namespaced_pod(
        clients.namespace, {**pod("one"), "status": {"phase": "Failed"}}
    )
    assert clients.core.read_namespaced_pod(*place).status.phase == "Pending"
    status = {"status": {"message": "waits"}, "spec": {"activeDeadlineSeconds": 5}}
    changed = clients.core.patch_namespaced_pod_status(*place, status)
    assert changed.status.message == "waits"
    assert changed.spec.active_deadline_seconds is None
    through_main = clients.core.patch_namespaced_pod(*place, {"status": {"message": "no"}})
    assert through_main.status.message == "waits"


def test_a_workload_is_scaled(clients: Any, refusal: Any) -> None:
    """A ReplicaSet whose pods are never scheduled."""
    labels = {"app": "one"}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "none:1"}]},
        },
    }
    place = ("one", clients.namespace)
    clients.apps.create_namespaced_stateful_set(
        clients.namespace, {"metadata": {"name": "one"}, "spec": {**spec, "serviceName": "one"}}
    )
    scale = clients.apps.read_namespaced_stateful_set_scale(*place)
    # None are left out, as in the server's own type.
    assert (scale.spec.replicas, scale.status.selector) == (None, "app=one")
    scale.spec.replicas = 1
    clients.apps.replace_namespaced_stateful_set_scale(*place, scale)
    assert clients.apps.read_namespaced_stateful_set(*place).spec.replicas == 1
    found = refusal(clients.apps.replace_namespaced_stateful_set_scale, *place, scale)
    assert (found.code, found.reason) == (409, "Conflict")
    patch = clients.apps.patch_namespaced_stateful_set_scale
    assert patch(*place, {"spec": {"replicas": 0}}).spec.replicas is None
    assert refusal(patch, *place, {"spec": {"replicas": -1}}).code == 422


def test_selectors_of_workloads_never_change(clients: Any, refusal: Any, deployment: Any) -> None:
    clients.apps.create_namespaced_deployment(clients.namespace, deployment("one"))
    patch = {
        "spec": {
            "selector": {"matchLabels": {"app": "two"}},
            "template": {"metadata": {"labels": {"app": "two"}}},
        }
    }
    found = refusal(clients.apps.patch_namespaced_deployment, "one", clients.namespace, patch)
    assert (found.code, found.fields) == (422, ["spec.selector"])
    assert "field is immutable" in found.message
    body = deployment("two")
    body["spec"]["selector"]["matchLabels"] = {"app": "other"}
    found = refusal(clients.apps.create_namespaced_deployment, clients.namespace, body)
    assert found.fields == ["spec.template.metadata.labels"]


def test_a_job_keeps_its_template(clients: Any, refusal: Any) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "n:1"}]}}
    body = {"metadata": {"name": "one"}, "spec": {"suspend": True, "template": template}}
    made = clients.batch.create_namespaced_job(clients.namespace, body)
    labels = made.spec.template.metadata.labels
    assert labels["batch.kubernetes.io/job-name"] == "one"
    assert labels["batch.kubernetes.io/controller-uid"] == made.metadata.uid
    assert made.spec.backoff_limit == 6
    change = {"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "n:2"}]}}}}
    found = refusal(clients.batch.patch_namespaced_job, "one", clients.namespace, change)
    assert (found.code, found.fields) == (422, ["spec.template.spec"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"restartPolicy": "Sometimes"}, "spec.restartPolicy"),
        ({"containers": [{"name": "a", "image": "n:1"}] * 2}, "spec.containers[1].name"),
        ({"volumes": [{"name": "v", "emptyDir": {}}] * 2}, "spec.volumes[1].name"),
        ({"containers": [{"name": "a"}]}, "spec.containers[0].image"),
        (
            {
                "containers": [
                    {
                        "name": "a",
                        "image": "n:1",
                        "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                    }
                ]
            },
            "spec.containers[0].volumeMounts[0].name",
        ),
    ],
)
def test_mistakes_in_pods_are_named(
    clients: Any, refusal: Any, pod: Any, change: Any, field: str
) -> None:
    path = f"/api/v1/namespaces/{clients.namespace}/pods"
    found = refusal(clients.send, "POST", path, pod("one", **change))
    assert (found.code, found.reason) == (422, "Invalid")
    assert field in found.fields


def test_jobs_do_not_restart_for_ever(clients: Any, refusal: Any) -> None:
    template = {"spec": {"containers": [{"name": "c", "image": "n:1"}]}}
    body = {"metadata": {"name": "one"}, "spec": {"template": template}}
    found = refusal(clients.batch.create_namespaced_job, clients.namespace, body)
    assert found.fields == ["spec.template.spec.restartPolicy"]


def test_several_ports_of_a_service_have_names(clients: Any, refusal: Any) -> None:
    def service(*ports: Any) -> Any:
        return {"metadata": {"name": "one"}, "spec": {"ports": list(ports)}}

    make = clients.core.create_namespaced_service
    found = refusal(make, clients.namespace, service({"port": 1}, {"name": "b", "port": 2}))
    assert found.fields == ["spec.ports[0].name"]
    made = make(clients.namespace, service({"port": 80}))
    assert made.spec.cluster_ip
    assert (made.spec.ports[0].target_port, made.spec.ports[0].protocol) == (80, "TCP")
    moved = {"spec": {"clusterIP": "10.96.200.200", "clusterIPs": ["10.96.200.200"]}}
    patch = clients.core.patch_namespaced_service
    assert refusal(patch, "one", clients.namespace, moved).code == 422


def test_what_is_sealed_stays(clients: Any, refusal: Any) -> None:
    clients.settings("one", data={"a": "1"}, immutable=True)
    change = {"data": {"a": "2"}}
    found = refusal(clients.core.patch_namespaced_config_map, "one", clients.namespace, change)
    assert (found.code, found.reason) == (422, "Invalid")


def test_plain_secrets_are_encoded(clients: Any) -> None:
    body = {"metadata": {"name": "one"}, "stringData": {"token": "abc"}}
    made = clients.core.create_namespaced_secret(clients.namespace, body)
    assert made.data == {"token": "YWJj"}
    assert made.type == "Opaque"
    assert made.string_data is None
