"""A snapshot of weights: layout, memory, verification, and deltas between versions."""
