"""Variables shared by dashboards, and the label selectors for them."""

from frame import variable

JOB = variable("job", "Job", "label_values(paceline_step, job)")
POOL = variable("pool", "Pool", "label_values(paceline_wanted_replicas, pool)")
TENANT = variable("tenant", "Tenant", "label_values(paceline_tenant_usage, tenant)")
SERVICE = variable("service", "Service", "label_values(paceline_build_info, service)")

JOBS = '{job=~"$job"}'


def rate(metric: str, where: str = JOBS) -> str:
    """Rate of a counter per second, over a window that fits the time range."""
    return f"rate({metric}{where}[$__rate_interval])"
