"""A Kubernetes cluster on this machine for tests: real objects, real processes as pods.

with Cluster(folder=tmp_path) as cluster:
    cluster.apply(rendered_chart)
    cluster.until(lambda: cluster.ready("app=web") == 2, "two ready pods")
    host, port = cluster.address("web-0", 8080)

`api` is its server; `nodes` its controllers and kubelet. Needs Linux, root, namespaces and overlay
mounts: `Cluster.unavailable_reason()` names what is missing. However a test ends, the kernel
removes processes, mounts and networks along with the process that created them.
"""

from kubernetes_double.cluster import Cluster
from kubernetes_double.nodes.settings import Node

__all__ = ["Cluster", "Node"]
