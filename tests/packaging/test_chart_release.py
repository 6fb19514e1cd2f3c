"""Install, upgrade, roll back and uninstall with both helms, against an API server."""

import base64
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

from kubernetes_double.api import ApiServer

HELMS = ("helm3", "helm4")
PASSING = {
    "store": {"embedded": {"persistence": {"keep": False}}},
    "storage": {"volume": {"keep": False}},
    "crds": {"keep": False},
}
# Every kind that the chart, the controller or the issuer makes.
KINDS = {
    "v1": "ConfigMap Secret Service ServiceAccount PersistentVolumeClaim Pod",
    "apps/v1": "Deployment StatefulSet",
    "batch/v1": "Job CronJob",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy Ingress",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding",
    "coordination.k8s.io/v1": "Lease",
}
BY_CLUSTER = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
NAMESPACE = "default"


class Release:
    """One installation, without install hooks, since nothing runs pods here."""

    def __init__(self, *, tool: str, helm: Any, chart: Path, api: Any, place: Path) -> None:
        self._run = helm
        self._tool = tool
        self._chart = str(chart)
        self._kubeconfig = str(api.kubeconfig)
        self._values = place / "values.yaml"
        connection = config.new_client_from_config(self._kubeconfig)
        self.core: Any = client.CoreV1Api(connection)
        self.apps: Any = client.AppsV1Api(connection)
        self.batch: Any = client.BatchV1Api(connection)
        self.extensions: Any = client.ApiextensionsV1Api(connection)
        self._dynamic = DynamicClient(connection)

    def helm(self, *arguments: str) -> None:
        done = self._run(self._tool, *arguments, "--kubeconfig", self._kubeconfig)
        assert done.returncode == 0, done.stderr

    def apply(self, values: dict[str, Any], verb: str = "upgrade") -> None:
        self._values.write_text(yaml.safe_dump(values))
        self.helm(verb, "rel", self._chart, "-f", str(self._values), "--no-hooks")

    def uninstall(self) -> None:
        """Uninstall with hooks, marking their Jobs as complete."""
        over = threading.Event()
        thread = threading.Thread(target=self._complete, args=(over,), daemon=True)
        thread.start()
        self.helm("uninstall", "rel")
        over.set()
        thread.join(60)

    def _complete(self, over: threading.Event) -> None:
        complete = {"type": "Complete", "status": "True"}
        while not over.wait(0.1):
            for job in self.batch.list_namespaced_job(NAMESPACE).items:
                if job.spec.completions == 0 and not (job.status and job.status.conditions):
                    status = {"status": {"conditions": [complete]}}
                    self.batch.patch_namespaced_job_status(job.metadata.name, NAMESPACE, status)

    def secret(self, name: str) -> dict[str, str]:
        data = self.core.read_namespaced_secret(name, NAMESPACE).data
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def replicas(self, name: str) -> int:
        return self.apps.read_namespaced_deployment(name, NAMESPACE).spec.replicas

    def objects(self) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for version, kinds in KINDS.items():
            for kind in kinds.split():
                resource = self._dynamic.resources.get(api_version=version, kind=kind)
                items = resource.get(namespace=NAMESPACE).items
                found |= {(kind, item.metadata.name) for item in items}
        return found - BY_CLUSTER

    def definitions(self) -> list[str]:
        return [d.metadata.name for d in self.extensions.list_custom_resource_definition().items]


@pytest.fixture
def release(
    request: Any, helm: Callable[..., Any], chart: Path, tmp_path: Path
) -> Iterator[Release]:
    with ApiServer(folder=tmp_path / "api") as api:
        yield Release(
            tool=getattr(request, "param", "helm4"), helm=helm, chart=chart, api=api, place=tmp_path
        )


@pytest.mark.parametrize("release", HELMS, indirect=True)
def test_upgrade_and_rollback_keep_passwords_and_counts_and_uninstall_leaves_nothing(
    release: Release,
) -> None:
    release.apply(PASSING, "install")
    assert release.definitions() == ["trainingjobs.paceline.dev"]
    token = release.secret("rel-paceline-token")
    store = release.secret("rel-paceline-store")
    assert len(token["token"]) == 61
    assert store["password"] in store["store.yaml"]
    assert store["password"] in store["password.conf"]
    assert (release.replicas("rel-paceline-gateway"), scaled(release)) == (2, 1)

    body = {"spec": {"replicas": 5}}
    release.apps.patch_namespaced_deployment("rel-paceline-environment", NAMESPACE, body)
    release.apply(PASSING | {"services": {"gateway": {"replicas": 3}}})
    assert (release.replicas("rel-paceline-gateway"), scaled(release)) == (3, 5)
    release.helm("rollback", "rel", "1", "--no-hooks")
    assert (release.replicas("rel-paceline-gateway"), scaled(release)) == (2, 5)
    assert release.secret("rel-paceline-token") == token
    assert release.secret("rel-paceline-store") == store

    issued = {"metadata": {"name": "rel-paceline-tls-gateway"}, "data": {"tls.key": "a2V5"}}
    release.core.create_namespaced_secret(NAMESPACE, issued)
    assert ("Deployment", "rel-paceline-gateway") in release.objects()
    release.uninstall()
    assert release.objects() == set()
    assert release.definitions() == []


def test_a_new_password_of_the_store_needs_one_key_and_survives_upgrades(release: Release) -> None:
    release.apply(PASSING, "install")
    body = {"stringData": {"password": "another"}}
    release.core.patch_namespaced_secret("rel-paceline-store", NAMESPACE, body)
    for _ in range(2):
        release.apply(PASSING)
        assert release.secret("rel-paceline-store") == {
            "password": "another",
            "password.conf": "requirepass another\n",
            "store.yaml": 'store_url: "redis://:another@rel-paceline-store:6379/0"\n',
        }


def test_the_number_of_pods_stays_when_the_release_leaves_it_to_others(release: Release) -> None:
    def of(**values: Any) -> dict[str, Any]:
        return PASSING | {"services": {"environment": values}}

    release.apply(of(scaling="fixed", replicas=5), "install")
    for scaling in ("controller", "external"):
        release.apply(of(scaling=scaling, graceSeconds=21))
        assert scaled(release) == 5
    release.apply(of(scaling="fixed", replicas=2))
    assert scaled(release) == 2


def scaled(release: Release) -> int:
    return release.replicas("rel-paceline-environment")


def test_uninstall_keeps_what_is_to_be_kept(release: Release) -> None:
    release.apply({}, "install")
    release.uninstall()
    assert release.objects() == {("PersistentVolumeClaim", "rel-paceline-data")}
    assert release.definitions() == ["trainingjobs.paceline.dev"]
    # And the same release takes it up again.
    release.apply({}, "install")
    assert ("Deployment", "rel-paceline-gateway") in release.objects()


def test_an_external_store_replaces_the_embedded_one(release: Release) -> None:
    release.apply(PASSING, "install")
    release.apply(PASSING | {"store": {"url": "redis://redis.example.com:6379/0"}})
    assert release.secret("rel-paceline-store") == {
        "store.yaml": 'store_url: "redis://redis.example.com:6379/0"\n'
    }
    assert not {name for kind, name in release.objects() if kind == "StatefulSet"}
