"""Ways to drive the episodes of an assignment."""
