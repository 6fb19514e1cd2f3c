"""A Prometheus, and what it is asked."""
