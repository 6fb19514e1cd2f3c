"""The rest of a cluster besides its API server: workload controllers, a scheduler, a kubelet.

All of it uses only the official client over HTTP, and so works with any server. Not implemented:
DaemonSets, scheduled CronJobs, sidecar containers, preemption by priority, topology spread and
affinity between pods, CPU and memory limits, network policies, kubectl exec and port-forward.
"""
