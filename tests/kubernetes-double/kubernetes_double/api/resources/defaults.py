"""Server-side defaults of built-in kinds, as far as clients rely on them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

Object = dict[str, Any]


def _set(target: Object, **values: Any) -> None:
    for name, value in values.items():
        target.setdefault(name, value)


def _container(one: Object) -> None:
    image: str = one.get("image", "")
    latest = ":" not in image.rpartition("/")[2] or image.endswith(":latest")
    _set(
        one,
        imagePullPolicy="Always" if latest else "IfNotPresent",
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        resources={},
    )
    for port in one.get("ports", ()):
        _set(port, protocol="TCP")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if name in one:
            _probe(one[name])
    for variable in one.get("env", ()):
        if "fieldRef" in variable.get("valueFrom", {}):
            _set(variable["valueFrom"]["fieldRef"], apiVersion="v1")
    limits, requests = one["resources"].get("limits", {}), one["resources"].get("requests", {})
    if limits:
        one["resources"]["requests"] = {**limits, **requests}


def _probe(probe: Object) -> None:
    _set(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
    if "httpGet" in probe:
        _set(probe["httpGet"], path="/", scheme="HTTP")
    if "grpc" in probe:
        _set(probe["grpc"], service="")


def _volume(volume: Object) -> None:
    for name in ("secret", "configMap", "downwardAPI", "projected"):
        if name in volume:
            _set(volume[name], defaultMode=0o644)
    for source in volume.get("projected", {}).get("sources", ()):
        if "serviceAccountToken" in source:
            _set(source["serviceAccountToken"], expirationSeconds=3600)
    for source in (volume, *volume.get("projected", {}).get("sources", ())):
        for item in source.get("downwardAPI", {}).get("items", ()):
            if "fieldRef" in item:
                _set(item["fieldRef"], apiVersion="v1")


def pod_spec(spec: Object) -> None:
    """Defaults of a pod or of a pod template."""
    _set(
        spec,
        restartPolicy="Always",
        terminationGracePeriodSeconds=30,
        dnsPolicy="ClusterFirst",
        securityContext={},
        schedulerName="default-scheduler",
    )
    if "serviceAccountName" in spec:
        _set(spec, serviceAccount=spec["serviceAccountName"])
    elif "serviceAccount" in spec:
        _set(spec, serviceAccountName=spec["serviceAccount"])
    for one in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        _container(one)
    for volume in spec.get("volumes", ()):
        _volume(volume)


def _pod(obj: Object) -> None:
    pod_spec(obj["spec"])
    _set(obj["spec"], enableServiceLinks=True)


def _template(spec: Object) -> None:
    template = spec.get("template", {})
    template.setdefault("metadata", {})
    if "spec" in template:
        pod_spec(template["spec"])


def _deployment(obj: Object) -> None:
    spec = obj["spec"]
    _set(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600, strategy={})
    _set(spec["strategy"], type="RollingUpdate")
    if spec["strategy"]["type"] == "RollingUpdate":
        _set(spec["strategy"], rollingUpdate={})
        _set(spec["strategy"]["rollingUpdate"], maxUnavailable="25%", maxSurge="25%")
    _template(spec)


def _stateful_set(obj: Object) -> None:
    spec = obj["spec"]
    _set(spec, replicas=1, revisionHistoryLimit=10, podManagementPolicy="OrderedReady")
    _set(spec, updateStrategy={})
    _set(spec["updateStrategy"], type="RollingUpdate")
    if spec["updateStrategy"]["type"] == "RollingUpdate":
        _set(spec["updateStrategy"], rollingUpdate={"partition": 0})
    _set(
        spec, persistentVolumeClaimRetentionPolicy={"whenDeleted": "Retain", "whenScaled": "Retain"}
    )
    _template(spec)
    for claim in spec.get("volumeClaimTemplates", ()):
        _set(claim, apiVersion="v1", kind="PersistentVolumeClaim", status={"phase": "Pending"})
        _set(claim["spec"], volumeMode="Filesystem")


def _replica_set(obj: Object) -> None:
    _set(obj["spec"], replicas=1)
    _template(obj["spec"])


def _daemon_set(obj: Object) -> None:
    _set(obj["spec"], revisionHistoryLimit=10, updateStrategy={"type": "RollingUpdate"})
    _template(obj["spec"])


def _job_spec(spec: Object) -> None:
    mode = spec.setdefault("completionMode", "NonIndexed")
    if "parallelism" not in spec and "completions" not in spec:
        spec["completions"] = 1
    _set(spec, parallelism=1, suspend=False, podReplacementPolicy="TerminatingOrFailed")
    if mode == "NonIndexed" or "backoffLimitPerIndex" not in spec:
        _set(spec, backoffLimit=6)
    _template(spec)


def _job(obj: Object) -> None:
    spec, metadata = obj["spec"], obj["metadata"]
    _job_spec(spec)
    if not spec.get("manualSelector") and "selector" not in spec:
        uid = metadata["uid"]
        labels = {
            "batch.kubernetes.io/controller-uid": uid,
            "batch.kubernetes.io/job-name": metadata["name"],
            "controller-uid": uid,
            "job-name": metadata["name"],
        }
        template = spec["template"]["metadata"]
        template["labels"] = {**template.get("labels", {}), **labels}
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
        metadata["labels"] = {**template["labels"], **metadata.get("labels", {})}
    _set(spec, manualSelector=False)


def _cron_job(obj: Object) -> None:
    spec = obj["spec"]
    _set(spec, concurrencyPolicy="Allow", suspend=False)
    _set(spec, successfulJobsHistoryLimit=3, failedJobsHistoryLimit=1)


def _service(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, type="ClusterIP", sessionAffinity="None")
    if spec["type"] != "ExternalName":
        _set(spec, internalTrafficPolicy="Cluster", ipFamilyPolicy="SingleStack")
        _set(spec, ipFamilies=["IPv4"])
    for port in spec.get("ports", ()):
        _set(port, protocol="TCP")
        _set(port, targetPort=port["port"])


def _secret(obj: Object) -> None:
    _set(obj, type="Opaque")
    plain: dict[str, str] = obj.pop("stringData", {})
    if plain:
        encoded = {k: base64.b64encode(v.encode()).decode() for k, v in plain.items()}
        obj["data"] = {**obj.get("data", {}), **encoded}


def _claim(obj: Object) -> None:
    _set(obj["spec"], volumeMode="Filesystem")
    _set(obj, status={"phase": "Pending"})


def _volume_object(obj: Object) -> None:
    _set(obj["spec"], volumeMode="Filesystem", persistentVolumeReclaimPolicy="Retain")
    _set(obj, status={"phase": "Available"})


def _network_policy(obj: Object) -> None:
    spec = obj.setdefault("spec", {})
    _set(spec, podSelector={})
    _set(spec, policyTypes=["Ingress", *(["Egress"] if "egress" in spec else [])])
    rules = (*spec.get("ingress", ()), *spec.get("egress", ()))
    for port in (port for rule in rules for port in rule.get("ports", ())):
        _set(port, protocol="TCP")


def _binding(obj: Object) -> None:
    _set(obj["roleRef"], apiGroup="rbac.authorization.k8s.io")
    for subject in obj.get("subjects", ()):
        group = "" if subject["kind"] == "ServiceAccount" else "rbac.authorization.k8s.io"
        if group:
            _set(subject, apiGroup=group)


def _namespace(obj: Object) -> None:
    _set(obj, spec={}, status={"phase": "Active"})
    _set(obj["spec"], finalizers=["kubernetes"])
    labels = obj["metadata"].setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = obj["metadata"]["name"]


def _definition(obj: Object) -> None:
    names = obj["spec"]["names"]
    _set(names, singular=names["kind"].lower(), listKind=f"{names['kind']}List")
    _set(obj["spec"], conversion={"strategy": "None"})


def _autoscaler(obj: Object) -> None:
    _set(obj["spec"], minReplicas=1)


DEFAULTS: dict[str, Callable[[Object], None]] = {
    "pods": _pod,
    "services": _service,
    "secrets": _secret,
    "namespaces": _namespace,
    "persistentvolumeclaims": _claim,
    "persistentvolumes": _volume_object,
    "deployments.apps": _deployment,
    "statefulsets.apps": _stateful_set,
    "replicasets.apps": _replica_set,
    "daemonsets.apps": _daemon_set,
    "jobs.batch": _job,
    "cronjobs.batch": _cron_job,
    "networkpolicies.networking.k8s.io": _network_policy,
    "rolebindings.rbac.authorization.k8s.io": _binding,
    "clusterrolebindings.rbac.authorization.k8s.io": _binding,
    "customresourcedefinitions.apiextensions.k8s.io": _definition,
    "horizontalpodautoscalers.autoscaling": _autoscaler,
}


def apply_defaults(storage: str, obj: Object) -> None:
    """Apply the defaults of a kind in place."""
    if storage in DEFAULTS:
        DEFAULTS[storage](obj)
