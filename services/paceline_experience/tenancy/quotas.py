"""Quotas of tenants, and the largest sizes that they have submitted lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.config.evaluation import EvalSpec
from paceline.config.limits import LimitSettings
from paceline.config.quota import Quota
from paceline.errors import LimitError
from paceline.front.api.tenants import SIZES

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
        self._current: Sizes = {}  # this period
        self._previous: Sizes = {}  # the period before

    def of(self, tenant: str) -> Quota:
        """The quota of a tenant."""
        return self.own.get(tenant, self.settings.tenant)

    def largest(self, tenant: str) -> dict[str, int]:
        """Largest sizes in bytes of the last hour or two, by limit (`api.tenants.SIZES`)."""
        self._rotate()
        found = [self._previous, self._current]
        return {
            limit: max(sizes.get((tenant, limit), 0) for sizes in found)
            for limit in SIZES
            if any((tenant, limit) in sizes for sizes in found)
        }

    def excess(self, tenant: str, limit: str, num_bytes: int) -> str:
        """An error text if a size is above the limit; empty: it is within."""
        self._rotate()
        self._current[tenant, limit] = max(self._current.get((tenant, limit), 0), num_bytes)
        allowed: int = getattr(self.of(tenant), limit)
        return "" if num_bytes <= allowed else _problem(tenant, limit, num_bytes, allowed)

    def _rotate(self) -> None:
        if (passed := self._clock() - self._since) >= _PERIOD_S:
            self._previous = self._current if passed < 2 * _PERIOD_S else {}
            self._current = {}
            self._since = self._clock()

    def check(self, tenant: str, limit: str, num_bytes: int) -> None:
        """Raise `LimitError` for a size above the limit."""
        if problem := self.excess(tenant, limit, num_bytes):
            raise LimitError(problem)

    def check_evals(self, evals: Mapping[str, EvalSpec]) -> None:
        """Raise `LimitError` if the evaluations of a job have too many episodes."""
        sizes = {name: each.tasks * each.samples for name, each in evals.items()}
        total, most = sum(sizes.values()), self.settings.eval_episodes
        if total <= most:
            return
        largest = max(sizes, key=lambda name: sizes[name])
        field = f"evals.{largest}" if largest else "eval"
        raise LimitError(
            f"{field}.tasks: {evals[largest].tasks} tasks of "
            f"{evals[largest].samples} samples make {total} episodes over all "
            f"evaluations; this installation allows {most}; evaluate fewer tasks, or ask its "
            "operator to raise `limits.eval_episodes`"
        )


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The limits of one job: those of its tenant and of the installation."""

    tenant: str = "default"
    quotas: Quotas = field(default_factory=lambda: Quotas(LimitSettings()))

    @property
    def settings(self) -> LimitSettings:
        """The limits of the installation."""
        return self.quotas.settings

    @property
    def of(self) -> Quota:
        """The quota of its tenant."""
        return self.quotas.of(self.tenant)

    def excess(self, limit: str, num_bytes: int) -> str:
        """See `Quotas.excess`."""
        return self.quotas.excess(self.tenant, limit, num_bytes)


def _problem(tenant: str, limit: str, num_bytes: int, allowed: int) -> str:
    option = limit.replace("_", "-")
    return (
        f"limit {limit}: {num_bytes} bytes, and tenant {tenant!r} is allowed {allowed}; make it "
        f"smaller, or ask an admin of the installation for `paceline tenants set {tenant} "
        f"--{option} N`"
    )
