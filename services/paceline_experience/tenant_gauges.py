"""What tenants use and may use, as metrics."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.metrics import Metrics
from paceline.tenants import LIMITS, Tenant

Series = tuple[str, str, str]


class TenantGauges:
    """Set at every look; those of tenants that are gone disappear, as does a limit that is none."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._shown: set[Series] = set()

    def show(self, tenants: Iterable[Tenant]) -> None:
        """All that there are."""
        values: dict[Series, float] = {}
        for tenant in tenants:
            for name in LIMITS:
                values["tenant_use", tenant.name, name] = getattr(tenant.use, name)
                limit: int | None = getattr(tenant.quota, name)
                if limit is not None:
                    values["tenant_quota", tenant.name, name] = limit
        for (metric, tenant, of), value in values.items():
            self._metrics.set(metric, value, tenant=tenant, of=of)
        for metric, tenant, of in self._shown - values.keys():
            self._metrics.drop(metric, tenant=tenant, of=of)
        self._shown = set(values)
