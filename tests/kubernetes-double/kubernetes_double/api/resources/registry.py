"""The registry of kinds: the built-in table, plus custom resource definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind in one version; `storage` names its collection, the same for all versions."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    generation: bool = False
    custom: bool = False
    singular: str = ""
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = VERBS

    @property
    def api_version(self) -> str:
        """`apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def storage(self) -> str:
        """Name of the collection; Events of both groups share one."""
        shared = self.group == "events.k8s.io"
        return self.plural if shared or not self.group else f"{self.plural}.{self.group}"

    @property
    def has_status(self) -> bool:
        """Whether `/status` is a subresource."""
        return "status" in self.subresources


TABLE = """
v1 namespaces Namespace cluster ns status,finalize -
v1 nodes Node cluster no status -
v1 pods Pod namespaced po status,log,eviction,binding gen,all
v1 services Service namespaced svc status all
v1 endpoints Endpoints namespaced ep - -
v1 configmaps ConfigMap namespaced cm - -
v1 secrets Secret namespaced - - -
v1 serviceaccounts ServiceAccount namespaced sa token -
v1 persistentvolumeclaims PersistentVolumeClaim namespaced pvc status -
v1 persistentvolumes PersistentVolume cluster pv status -
v1 events Event namespaced ev - -
v1 resourcequotas ResourceQuota namespaced quota status -
v1 limitranges LimitRange namespaced limits - -
v1 podtemplates PodTemplate namespaced - - -
events.k8s.io/v1 events Event namespaced ev - -
discovery.k8s.io/v1 endpointslices EndpointSlice namespaced - - gen
apps/v1 deployments Deployment namespaced deploy status,scale gen,all
apps/v1 statefulsets StatefulSet namespaced sts status,scale gen,all
apps/v1 replicasets ReplicaSet namespaced rs status,scale gen,all
apps/v1 daemonsets DaemonSet namespaced ds status gen,all
apps/v1 controllerrevisions ControllerRevision namespaced - - -
batch/v1 jobs Job namespaced - status gen,all
batch/v1 cronjobs CronJob namespaced cj status gen,all
policy/v1 poddisruptionbudgets PodDisruptionBudget namespaced pdb status gen
networking.k8s.io/v1 networkpolicies NetworkPolicy namespaced netpol - gen
networking.k8s.io/v1 ingresses Ingress namespaced ing status gen
networking.k8s.io/v1 ingressclasses IngressClass cluster - - gen
rbac.authorization.k8s.io/v1 roles Role namespaced - - -
rbac.authorization.k8s.io/v1 rolebindings RoleBinding namespaced - - -
rbac.authorization.k8s.io/v1 clusterroles ClusterRole cluster - - -
rbac.authorization.k8s.io/v1 clusterrolebindings ClusterRoleBinding cluster - - -
coordination.k8s.io/v1 leases Lease namespaced - - -
scheduling.k8s.io/v1 priorityclasses PriorityClass cluster pc - gen
storage.k8s.io/v1 storageclasses StorageClass cluster sc - -
autoscaling/v2 horizontalpodautoscalers HorizontalPodAutoscaler namespaced hpa status -
apiextensions.k8s.io/v1 customresourcedefinitions CustomResourceDefinition cluster crd status gen
authorization.k8s.io/v1 selfsubjectaccessreviews SelfSubjectAccessReview cluster - - ask
authorization.k8s.io/v1 subjectaccessreviews SubjectAccessReview cluster - - ask
"""
"""Version, plural, kind, scope, short names, subresources, and flags: has a generation (`gen`),
part of `all`, or a review (`ask`) that is answered but not stored."""


def built_in() -> list[Resource]:
    """The built-in kinds."""
    return [_row(*line.split()) for line in TABLE.strip().splitlines()]


def _row(
    api_version: str, plural: str, kind: str, scope: str, short: str, doors: str, flags: str
) -> Resource:
    group, _, version = api_version.rpartition("/")
    return Resource(
        group,
        version,
        plural,
        kind,
        scope == "namespaced",
        _words(short),
        _words(doors),
        generation="gen" in _words(flags),
        categories=("all",) if "all" in _words(flags) else (),
        verbs=("create",) if "ask" in _words(flags) else VERBS,
    )


def _words(text: str) -> tuple[str, ...]:
    return () if text == "-" else tuple(text.split(","))


@dataclass
class Catalog:
    """All kinds currently served, by path or kind."""

    resources: list[Resource] = field(default_factory=built_in)

    def __iter__(self) -> Iterator[Resource]:
        return iter(self.resources)

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        """Find a kind by the parts of a path."""
        for one in self.resources:
            if (one.group, one.version, one.plural) == (group, version, plural):
                return one
        return None

    def kind(self, api_version: str, kind: str) -> Resource | None:
        """Find a kind by `apiVersion` and `kind`."""
        for one in self.resources:
            if one.kind == kind and one.api_version == api_version:
                return one
        return None

    def replace_custom(self, group: str, plural: str, resources: list[Resource]) -> None:
        """Replace the served versions of a custom resource; an empty list stops serving it."""
        kept = [r for r in self.resources if (r.group, r.plural) != (group, plural)]
        self.resources = [*kept, *resources]

    def stored(self) -> list[Resource]:
        """One version of every collection."""
        return list({r.storage: r for r in reversed(self.resources)}.values())
