"""What a cluster has beside its API server: workload controllers, a scheduler, a kubelet.

All of it speaks to the server through HTTP and the official client only, and so to any server.
Left out: DaemonSets, CronJobs by the clock, sidecar containers, preemption by priority, spread and
affinity between pods, limits of CPU and memory, network policies, exec and port-forward by kubectl.
"""
