"""A Kubernetes API server for tests: real verbs, watches, patches and RBAC over memory.

Usage:
    with ApiServer(folder=tmp_path) as server:
        kubernetes.config.load_kube_config(str(server.kubeconfig))

Strategic merge and apply follow the list types and merge keys of the published schemas. Not
implemented: controllers and kubelet (see `kubernetes_double.nodes`), webhooks, quotas other than
object counts, exec and port-forward, conversion between versions of custom kinds, RBAC escalation
checks.
"""

from kubernetes_double.api.policy.access import Access, Visit
from kubernetes_double.api.requests.server import ApiServer

__all__ = ["Access", "ApiServer", "Visit"]
