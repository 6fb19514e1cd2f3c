"""Access to the objects of a cluster for tests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config, dynamic
from kubernetes.client import ApiException
from urllib3 import Retry

from kubernetes_double.patience import PATIENCE_S

Object = dict[str, Any]
_MANAGER = "kubernetes-double"
_API_VERSIONS = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
    "EndpointSlice": "discovery.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
}
_NOT_FOUND, _TOO_MANY = 404, 429
_PAUSE_S, _REQUEST_S = 0.1, 30.0


class _Client(client.ApiClient):
    """Requests have a deadline, which the library does not set."""

    def call_api(self, *args: Any, _request_timeout: float | None = None, **more: Any) -> Any:
        timeout = _request_timeout or _REQUEST_S
        return super().call_api(*args, _request_timeout=timeout, **more)


class Objects:
    """Reads and writes as the administrator, by default in `namespace`."""

    def __init__(self, kubeconfig: Path, *, namespace: str, discovery: Path) -> None:
        self.namespace = namespace
        settings = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=settings)
        # Whatever is asked may be asked again: all objects have names.
        settings.retries = Retry(total=3, allowed_methods=None)
        self._client = _Client(settings)
        self._dynamic = dynamic.DynamicClient(self._client, cache_file=str(discovery))
        self._core = client.CoreV1Api(self._client)

    def apply(self, documents: str | Iterable[Object]) -> list[Object]:
        """Server-side apply objects, or the documents of a YAML text, in order.

        Raises:
            ApiException: the server rejected one; the earlier ones are applied.
        """
        if isinstance(documents, str):
            documents = [one for one in yaml.load_all(documents, yaml.CSafeLoader) if one]
        return [self._apply(document) for document in documents]

    def get(self, kind: str, name: str, *, namespace: str = "") -> Object | None:
        """One object, or None. `kind` is `Kind` or `group/version/Kind`."""
        where = namespace or self.namespace
        try:
            return self._kind(kind).get(name=name, namespace=where).to_dict()
        except ApiException as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def list(self, kind: str, selector: str = "", *, namespace: str = "") -> list[Object]:
        """Objects by label selector, sorted by name."""
        where = namespace or self.namespace
        found = self._kind(kind).get(namespace=where, label_selector=selector).to_dict()["items"]
        return sorted(found, key=lambda item: item["metadata"]["name"])

    def patch(self, kind: str, name: str, body: Object, *, namespace: str = "") -> Object:
        """Merge patch."""
        return (
            self._kind(kind)
            .patch(
                body=body,
                name=name,
                namespace=namespace or self.namespace,
                content_type="application/merge-patch+json",
            )
            .to_dict()
        )

    def delete(
        self, kind: str, name: str, *, namespace: str = "", grace_s: int | None = None
    ) -> None:
        """Delete an object and its dependents; no error if it does not exist."""
        body: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self._kind(kind).delete(name=name, namespace=namespace or self.namespace, body=body)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    def pods(self, selector: str = "", *, namespace: str = "") -> list[Object]:
        """Pods by label selector, sorted by name, including those being deleted."""
        return self.list("Pod", selector, namespace=namespace)

    def ready(self, selector: str, *, namespace: str = "") -> int:
        """Number of pods that are ready and not being deleted."""
        return sum(is_ready(pod) for pod in self.pods(selector, namespace=namespace))

    def logs(
        self, pod: str, container: str = "", *, namespace: str = "", previous: bool = False
    ) -> str:
        """The output of a container since its last start, or of its previous run."""
        more: Any = {"container": container} if container else {}
        return self._core.read_namespaced_pod_log(
            pod, namespace or self.namespace, previous=previous, **more
        )

    def run_cron_job(self, name: str, *, namespace: str = "") -> str:
        """Start a CronJob now, as `kubectl create job --from` does; returns the Job's name.

        Nothing in the cluster starts CronJobs on schedule.
        """
        where = namespace or self.namespace
        cron = self._kind("CronJob").get(name=name, namespace=where).to_dict()
        made = f"{name}-{secrets.token_hex(3)}"
        owner = {"apiVersion": "batch/v1", "kind": "CronJob", "name": name, "controller": True}
        template = cron["spec"]["jobTemplate"]
        metadata = {**template.get("metadata", {}), "name": made, "namespace": where}
        metadata["ownerReferences"] = [{**owner, "uid": cron["metadata"]["uid"]}]
        body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        self._kind("Job").create(body={**body, "spec": template["spec"]}, namespace=where)
        return made

    def cordon(self, node: str, *, taints: Iterable[Object] = ()) -> None:
        """Mark a node as unschedulable."""
        spec: Object = {"unschedulable": True}
        if taints:
            spec["taints"] = list(taints)
        self.patch("Node", node, {"spec": spec})

    def drain(self, node: str, *, timeout_s: float = PATIENCE_S) -> None:
        """Cordon a node, evict its pods within their disruption budgets, and wait for their end.

        Raises:
            TimeoutError: some pods are still there.
        """
        self.cordon(node)
        deadline = time.monotonic() + timeout_s
        while pods := self._on(node):
            for pod in pods:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._evict(pod)
            if time.monotonic() > deadline:
                names = [pod["metadata"]["name"] for pod in pods]
                raise TimeoutError(f"node {node}: {names} are still there after {timeout_s} s")
            time.sleep(_PAUSE_S)

    def preempt(self, node: str, *, notice_s: int) -> None:
        """Preempt a spot machine: its pods get SIGTERM, and the machine goes after the notice."""
        self.cordon(node, taints=[{"key": "spot/preempted", "effect": "NoExecute"}])
        for pod in self._on(node):
            grace_s = min(notice_s, pod["spec"].get("terminationGracePeriodSeconds", 30))
            metadata = pod["metadata"]
            self.delete("Pod", metadata["name"], namespace=metadata["namespace"], grace_s=grace_s)
        deadline = time.monotonic() + notice_s
        while self._on(node) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self.lose(node)

    def lose(self, node: str) -> None:
        """Remove a machine and its pods without notice."""
        self.delete("Node", node)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _apply(self, document: Object) -> Object:
        resource = self._dynamic.resources.get(
            api_version=document["apiVersion"], kind=document["kind"]
        )
        namespace = document["metadata"].get("namespace", self.namespace)
        applied = resource.server_side_apply(
            body=document,
            name=document["metadata"]["name"],
            namespace=namespace if resource.namespaced else None,
            field_manager=_MANAGER,
            force_conflicts=True,
        )
        return applied.to_dict()

    def _kind(self, kind: str) -> Any:
        version, _, name = kind.rpartition("/")
        version = version or _API_VERSIONS.get(name, "v1")
        return self._dynamic.resources.get(api_version=version, kind=name)

    def _on(self, node: str) -> list[Object]:
        pods = self._dynamic.resources.get(api_version="v1", kind="Pod")
        return pods.get(field_selector=f"spec.nodeName={node}").to_dict()["items"]

    def _evict(self, pod: Object) -> None:
        metadata = pod["metadata"]
        named = client.V1ObjectMeta(name=metadata["name"], namespace=metadata["namespace"])
        try:
            self._core.create_namespaced_pod_eviction(
                metadata["name"], metadata["namespace"], client.V1Eviction(metadata=named)
            )
        except ApiException as error:
            if error.status not in (_NOT_FOUND, _TOO_MANY):
                raise


def is_ready(pod: Object) -> bool:
    """Whether a pod is ready; never while it is being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
