"""What tenants may have, and the largest single things that they have brought."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config.limits import LimitSettings
from paceline.config.quota import Quota
from paceline.errors import LimitError
from paceline.tenants import SIZES

_PERIOD_S = 3600.0
Sizes = dict[tuple[str, str], int]  # by tenant and limit


class Quotas:
    """Quotas by tenant as last read from the store, over the default of the installation."""

    def __init__(
        self, settings: LimitSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.own: dict[str, Quota] = {}
        self._clock = clock
        self._since = clock()
        self._now: Sizes = {}  # of this hour
        self._before: Sizes = {}  # of the one before

    def of(self, tenant: str) -> Quota:
        """What holds for a tenant."""
        return self.own.get(tenant, self.settings.tenant)

    def largest(self, tenant: str) -> dict[str, int]:
        """Sizes in bytes by limit (`paceline.tenants.SIZES`), of the last hour or two."""
        self._turn()
        found = [self._before, self._now]
        return {
            limit: max(sizes.get((tenant, limit), 0) for sizes in found)
            for limit in SIZES
            if any((tenant, limit) in sizes for sizes in found)
        }

    def excess(self, tenant: str, limit: str, num_bytes: int) -> str:
        """What is wrong with something of this size; empty if it is within the limit."""
        self._turn()
        self._now[tenant, limit] = max(self._now.get((tenant, limit), 0), num_bytes)
        most: int = getattr(self.of(tenant), limit)
        return "" if num_bytes <= most else _told(tenant, limit, num_bytes, most)

    def _turn(self) -> None:
        if (passed := self._clock() - self._since) >= _PERIOD_S:
            self._before = self._now if passed < 2 * _PERIOD_S else {}
            self._now = {}
            self._since = self._clock()

    def check(self, tenant: str, limit: str, num_bytes: int) -> None:
        """Raise `LimitError` for something larger than the limit."""
        if problem := self.excess(tenant, limit, num_bytes):
            raise LimitError(problem)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The limits of one job: those of its tenant and of the installation."""

    tenant: str = "default"
    quotas: Quotas = field(default_factory=lambda: Quotas(LimitSettings()))

    @property
    def settings(self) -> LimitSettings:
        """Of the installation."""
        return self.quotas.settings

    @property
    def of(self) -> Quota:
        """Of its tenant."""
        return self.quotas.of(self.tenant)

    def excess(self, limit: str, num_bytes: int) -> str:
        """As `Quotas.excess`."""
        return self.quotas.excess(self.tenant, limit, num_bytes)


def _told(tenant: str, limit: str, num_bytes: int, most: int) -> str:
    option = limit.replace("_", "-")
    return (
        f"limit {limit}: {num_bytes} bytes, and tenant {tenant!r} is allowed {most}; make it "
        f"smaller, or ask an admin of the installation for `paceline tenants set {tenant} "
        f"--{option} N`"
    )
