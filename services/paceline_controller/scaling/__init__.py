"""Replicas that follow demand: signals in, sizes of workloads out."""
