"""Builds the Kubernetes objects of a workload from a pod template. No side effects."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from paceline.config.sections.kubernetes import ACCELERATORS
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.base import ONLY_RANK
from paceline_controller.runtimes.kubernetes import names
from paceline_controller.runtimes.kubernetes.accelerators import request_accelerators
from paceline_controller.runtimes.kubernetes.resources import (
    DEPLOYMENTS,
    JOBS,
    JOBSETS,
    NETWORK_POLICIES,
    SECRETS,
    SERVICES,
    Kind,
    Object,
)

CONTAINER = "paceline"
MASTER_PORT = 8403
CREDENTIAL = "credential"
# Volume of the chart with models and the folders of jobs, and the empty one that hides the latter.
DATA = "data"
OTHER_JOBS = "other-jobs"
# The settings of the chart name the file in it.
CREDENTIAL_FOLDER = "/etc/paceline/credential"
# The only group of pods in a JobSet; the names of its pods contain it.
GROUP = "n"
LAUNCHER = "torch.distributed.run"
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, slots=True)
class ManifestContext:
    """Settings shared by all objects of one controller."""

    release: str
    owner: Object | None = None  # an entry of `ownerReferences`
    ranks_per_pod: int = 8
    accelerators: tuple[str, ...] = ACCELERATORS
    jobset: bool = False
    network_policies: bool = False


def build(
    wanted: Wanted, template: Object, *, incarnation: int, context: ManifestContext
) -> list[Object]:
    """The objects of a workload, in the order in which to apply them.

    Its pods mount the Secret of `credential_of`.

    Raises:
        ConfigError: the template has no container named `paceline`.
    """
    if wanted.kind is WorkerKind.ROLLOUT:
        return [_deployment(wanted, template, context)]
    if wanted.kind is not WorkerKind.TRAINER:
        raise ValueError(f"{wanted.kind}: workers of this kind are the chart's")
    before = [_policy(wanted, context)] if context.network_policies else []
    if context.jobset:
        return [*before, _jobset(wanted, template, incarnation, context)]
    return [*before, _headless(wanted, context), _job(wanted, template, incarnation, context)]


def credential_of(wanted: Wanted, credential: str, *, context: ManifestContext) -> Object:
    """The Secret with the credential of a workload's pods."""
    return {
        "apiVersion": SECRETS.api_version,
        "kind": SECRETS.kind,
        "metadata": _metadata(credential_name(wanted.name), wanted, context, {}),
        "data": {CREDENTIAL: base64.b64encode(credential.encode()).decode()},
    }


def credential_name(workload: str) -> str:
    """The name of the Secret with the credential of a workload's pods."""
    return f"{names.object_name(workload)}-{CREDENTIAL}"


def owner_reference(body: Object, kind: Kind) -> Object:
    """An entry of `ownerReferences`: its holder is garbage-collected with `body`."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "name": body["metadata"]["name"],
        "uid": body["metadata"]["uid"],
    }


def digest(template: Object) -> str:
    """A hash of all fields of a pod template."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def nodes_of(world_size: int, ranks_per_pod: int) -> tuple[int, int]:
    """The fewest pods that split the ranks of a trainer evenly, and the ranks per pod."""
    nodes = -(-world_size // ranks_per_pod)
    while world_size % nodes:
        nodes += 1
    return nodes, world_size // nodes


def _deployment(wanted: Wanted, template: Object, context: ManifestContext) -> Object:
    name = names.object_name(wanted.name)
    added = {"JOB_ID": wanted.job_id, "POOL": wanted.pool}
    pods = _pods(wanted, template, context, _plain(added))
    if (count := wanted.accelerators) is not None:
        # An engine computes on neither fewer nor more, whatever the pool's template says.
        request_accelerators(pods, _container(pods), count=count, patterns=context.accelerators)
    _keep_away(pods, name)
    selected = {key: names.labels(wanted, release=context.release)[key] for key in _SELECTED}
    return {
        "apiVersion": DEPLOYMENTS.api_version,
        "kind": DEPLOYMENTS.kind,
        "metadata": _queued(wanted, context, name, {names.TEMPLATE: digest(template)}),
        "spec": {
            "replicas": wanted.replicas,
            "selector": {"matchLabels": selected},
            # No surge: there are no spare accelerators for a second pod.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "template": pods,
        },
    }


def _keep_away(pods: Object, name: str) -> None:
    """Not to nodes with a pod of this workload that is quarantined."""
    term = {
        "labelSelector": {"matchLabels": {names.QUARANTINED: name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = pods["spec"].setdefault("affinity", {})
    apart = affinity.setdefault("podAntiAffinity", {})
    required = apart.get("requiredDuringSchedulingIgnoredDuringExecution") or []
    apart["requiredDuringSchedulingIgnoredDuringExecution"] = [*required, term]


_SELECTED = (names.INSTANCE, names.MANAGED_BY, names.WORKLOAD)


def _headless(wanted: Wanted, context: ManifestContext) -> Object:
    """Headless service: gives the pods of a trainer DNS names before they are ready."""
    carried = names.labels(wanted, release=context.release)
    return {
        "apiVersion": SERVICES.api_version,
        "kind": SERVICES.kind,
        "metadata": _metadata(names.object_name(wanted.name), wanted, context, {}),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {key: carried[key] for key in _SELECTED},
            "ports": [{"name": "master", "port": MASTER_PORT, "targetPort": MASTER_PORT}],
        },
    }


def _policy(wanted: Wanted, context: ManifestContext) -> Object:
    """Lets the pods of one trainer reach each other, which the chart's policies do not.

    torch's rendezvous and collectives ask nobody who they are, on ports that they choose.
    """
    carried = names.labels(wanted, release=context.release)
    pods = {"matchLabels": {key: carried[key] for key in _SELECTED}}
    return {
        "apiVersion": NETWORK_POLICIES.api_version,
        "kind": NETWORK_POLICIES.kind,
        "metadata": _metadata(names.object_name(wanted.name), wanted, context, {}),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
            "egress": [{"to": [{"podSelector": pods}]}],
        },
    }


def _job(wanted: Wanted, template: Object, incarnation: int, context: ManifestContext) -> Object:
    service = names.object_name(wanted.name)
    name = f"{service}-{incarnation}"
    master = f"{name}-0.{service}"
    spec = _job_spec(wanted, template, incarnation, context, master)
    spec["template"]["spec"]["subdomain"] = service
    spec |= _suspended(wanted)
    extra = {names.TEMPLATE: digest(template), names.INCARNATION: str(incarnation)}
    return {
        "apiVersion": JOBS.api_version,
        "kind": JOBS.kind,
        "metadata": _queued(wanted, context, name, extra),
        "spec": spec,
    }


def _jobset(wanted: Wanted, template: Object, incarnation: int, context: ManifestContext) -> Object:
    """A JobSet; it creates the headless Service itself, under its own name."""
    name = f"{names.object_name(wanted.name)}-{incarnation}"
    master = f"{name}-{GROUP}-0-0.{name}"
    spec = _job_spec(wanted, template, incarnation, context, master)
    extra = {names.TEMPLATE: digest(template), names.INCARNATION: str(incarnation)}
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": JOBSETS.kind,
        "metadata": _queued(wanted, context, name, extra),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            **_suspended(wanted),
            "replicatedJobs": [{"name": GROUP, "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _job_spec(
    wanted: Wanted, template: Object, incarnation: int, context: ManifestContext, master: str
) -> Object:
    nodes, ranks = nodes_of(wanted.world_size, context.ranks_per_pod)
    plain = {
        "JOB_ID": wanted.job_id,
        "INCARNATION": str(incarnation),
        "NODES": str(nodes),
        "RANKS_PER_NODE": str(ranks),
        "MASTER_ADDR": master,
    }
    rank = {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}
    pods = _pods(wanted, template, context, [*_plain(plain), rank])
    if wanted.accelerators is not None:
        request_accelerators(
            pods,
            _container(pods),
            count=ranks * wanted.accelerators,
            whole=context.ranks_per_pod,
            patterns=context.accelerators,
        )
    if wanted.world_size == 1:
        _without_torchrun(_container(pods))
    pods["metadata"]["annotations"][names.INCARNATION] = str(incarnation)
    pods["spec"]["restartPolicy"] = "Never"
    _confine(pods, wanted.job_id)
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # If one rank fails, all must restart: the controller starts the next incarnation.
        "backoffLimit": 0,
        "template": pods,
    }


def _pods(
    wanted: Wanted, template: Object, context: ManifestContext, added: list[dict[str, Any]]
) -> Object:
    """The chart's template with our labels, environment and credential."""
    pods = copy.deepcopy(template)
    metadata = pods.setdefault("metadata", {})
    ours = names.labels(wanted, release=context.release)
    metadata["labels"] = {**(metadata.get("labels") or {}), **ours}
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        names.WORKLOAD: wanted.name,
    }
    container = _container(pods)
    replaced = {variable["name"] for variable in added}
    kept = [variable for variable in container.get("env") or [] if variable["name"] not in replaced]
    # Ours come first: a variable can refer only to earlier ones.
    container["env"] = [*added, *kept]
    mount = {"name": CREDENTIAL, "mountPath": CREDENTIAL_FOLDER, "readOnly": True}
    secret = {"secretName": credential_name(wanted.name)}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    volume = {"name": CREDENTIAL, "secret": secret}
    pods["spec"]["volumes"] = [*(pods["spec"].get("volumes") or []), volume]
    return pods


def _confine(pods: Object, job_id: str) -> None:
    """Let pods write only this job's folder of the chart's volume, and see no other job's."""
    container = _container(pods)
    mounts, volumes = container["volumeMounts"], pods["spec"]["volumes"]
    claims = {volume["name"] for volume in volumes if "persistentVolumeClaim" in volume}
    whole = next((mount for mount in mounts if mount["name"] == DATA and DATA in claims), None)
    if whole is None:
        return
    jobs = f"{whole['mountPath']}/jobs"
    whole["readOnly"] = True  # the models are there
    # Inner folders are mounted over outer ones.
    mounts.append({"name": OTHER_JOBS, "mountPath": jobs})
    mounts.append({"name": DATA, "mountPath": f"{jobs}/{job_id}", "subPath": f"jobs/{job_id}"})
    volumes.append({"name": OTHER_JOBS, "emptyDir": {}})


def _without_torchrun(container: Object) -> None:
    """Start a single rank itself: its launcher would import torch too, for as long and as much."""
    command: list[str] = container.get("command") or []
    if LAUNCHER in command:
        start = command.index(LAUNCHER)
        container["command"] = command[:start] + command[command.index("-m", start) + 1 :]
        container["env"] = [*_plain(ONLY_RANK), *container["env"]]


def _container(pods: Object) -> Object:
    containers = pods.get("spec", {}).get("containers") or []
    for container in containers:
        if container.get("name") == CONTAINER:
            return container
    names = [container.get("name") for container in containers]
    raise ConfigError(f"template: needs a container named {CONTAINER!r}; has {names}")


def _plain(values: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _suspended(wanted: Wanted) -> Object:
    """Field of a Job or JobSet in a queue: it has no pods until Kueue admits it."""
    return {"suspend": True} if wanted.queue else {}


def _queued(
    wanted: Wanted, context: ManifestContext, name: str, annotations: dict[str, str]
) -> Object:
    """Metadata of what has pods: Kueue, if it admits them, reads a label."""
    metadata = _metadata(name, wanted, context, annotations)
    metadata["labels"] |= names.queue_label(wanted)
    return metadata


def _metadata(
    name: str, wanted: Wanted, context: ManifestContext, annotations: dict[str, str]
) -> Object:
    metadata: Object = {
        "name": name,
        "labels": names.labels(wanted, release=context.release),
        "annotations": {**names.annotations_for(wanted), **annotations},
    }
    if context.owner is not None:
        metadata["ownerReferences"] = [context.owner]
    return metadata
