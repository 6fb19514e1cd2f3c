"""Autoscaling: turns signals about demand into replica counts of workloads."""
