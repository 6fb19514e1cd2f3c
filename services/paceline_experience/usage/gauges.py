"""Usage and quotas of tenants as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.front.api.tenants import LIMITS, Tenant
from paceline.platform.telemetry.metrics import Series, series


def values_of(tenants: Iterable[Tenant]) -> dict[Series, float]:
    """Gauges of all tenants; a quota without a limit has none."""
    values: dict[Series, float] = {}
    for tenant in tenants:
        for name in LIMITS:
            values[series("tenant_usage", tenant=tenant.name, resource=name)] = getattr(
                tenant.usage, name
            )
            limit: int | None = getattr(tenant.quota, name)
            if limit is not None:
                values[series("tenant_quota", tenant=tenant.name, resource=name)] = limit
    return values
