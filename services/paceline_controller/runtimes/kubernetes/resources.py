"""The kinds of objects that the controller touches, and small readers of their fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: what it is called and where it lives."""

    group: str  # empty: core
    version: str
    kind: str
    plural: str

    @property
    def api_version(self) -> str:
        """`apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Name in roles and for people, for example `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of the collection, of one object, or of a part of it."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version, "namespaces", namespace, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


DEPLOYMENTS = Kind("apps", "v1", "Deployment", "deployments")
EVENTS = Kind("events.k8s.io", "v1", "Event", "events")
JOBS = Kind("batch", "v1", "Job", "jobs")
JOBSETS = Kind("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets")
LEASES = Kind("coordination.k8s.io", "v1", "Lease", "leases")
NETWORK_POLICIES = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
PODS = Kind("", "v1", "Pod", "pods")
SECRETS = Kind("", "v1", "Secret", "secrets")
SERVICES = Kind("", "v1", "Service", "services")
TRAINING_JOBS = Kind("paceline.dev", "v1alpha1", "TrainingJob", "trainingjobs")
ALL = (
    *(DEPLOYMENTS, EVENTS, JOBS, JOBSETS, LEASES, NETWORK_POLICIES, PODS, SECRETS, SERVICES),
    TRAINING_JOBS,
)


def kind_of(body: Object) -> Kind:
    """The kind that an object says it is; raises `KeyError` for one not listed here."""
    return {(kind.api_version, kind.kind): kind for kind in ALL}[body["apiVersion"], body["kind"]]


def name_of(body: Object) -> str:
    """`metadata.name`."""
    return body["metadata"]["name"]


def uid_of(body: Object) -> str:
    """`metadata.uid`; empty before the server has seen it."""
    return body["metadata"].get("uid", "")


def labels_of(body: Object) -> dict[str, str]:
    """`metadata.labels`."""
    return body["metadata"].get("labels") or {}


def annotations_of(body: Object) -> dict[str, str]:
    """`metadata.annotations`."""
    return body["metadata"].get("annotations") or {}


def deleting(body: Object) -> bool:
    """Somebody has deleted it; it goes when its finalizers and its grace are over."""
    return bool(body["metadata"].get("deletionTimestamp"))


def condition(body: Object, kind: str) -> Object | None:
    """The condition of that type if it holds (`status: "True"`)."""
    conditions: Iterable[Object] = body.get("status", {}).get("conditions") or ()
    return next(
        (entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None
    )
