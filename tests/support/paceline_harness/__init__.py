"""Test harness for tests and benchmarks: cluster, networks, fleets, peers, certificates."""
