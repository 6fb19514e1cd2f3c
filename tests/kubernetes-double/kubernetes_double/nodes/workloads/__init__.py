"""Minimal workload controllers, one short file each."""
