"""What the tests and benchmarks run in: cluster, networks, fleets, peers, certificates."""
