"""How long tests wait for what must happen."""

PATIENCE_S = 600.0
"""Only ends what hangs: whatever is waited for takes less on a machine ten times slower.

Neither a limit to test against nor a pause: a test waits for an event, with this as its bound.
"""
