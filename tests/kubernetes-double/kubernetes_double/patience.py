"""How long a cluster and its tests wait for what must happen."""

PATIENCE_S = 600.0
"""Only ends what hangs: whatever is waited for takes less on a machine ten times slower."""
