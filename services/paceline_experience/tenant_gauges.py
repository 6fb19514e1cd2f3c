"""What tenants use and may use, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.metrics import Series, series
from paceline.tenants import LIMITS, Tenant


def values_of(tenants: Iterable[Tenant]) -> dict[Series, float]:
    """Of all tenants that there are; a limit that is none is not among them."""
    values: dict[Series, float] = {}
    for tenant in tenants:
        for name in LIMITS:
            values[series("tenant_use", tenant=tenant.name, of=name)] = getattr(tenant.use, name)
            limit: int | None = getattr(tenant.quota, name)
            if limit is not None:
                values[series("tenant_quota", tenant=tenant.name, of=name)] = limit
    return values
