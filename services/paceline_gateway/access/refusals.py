"""Collects refusals for the audit log; equal ones within a short time are counted together."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.principal import Principal
from paceline.platform.transport.rpc import call
from paceline.v1 import access_pb2 as pb

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import AuthenticationAsyncStub

PERIOD_S = 5.0
# Distinct refusals within a period; beyond that they are only counted.
MAX_REFUSALS = 256
log = Log("refusals")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request: who, from where, what, and why."""

    who: Principal | None  # None: without a valid token
    source: str
    action: str
    reason: str  # missing | invalid | attempts | calls | role | tenant


class Refusals:
    """Counts refusals; `run` reports them to the audit log."""

    def __init__(self, *, authentication: AuthenticationAsyncStub, metrics: Metrics) -> None:
        self._authentication = authentication
        self._metrics = metrics
        self._counts: Counter[Refusal] = Counter()

    def note(self, refusal: Refusal) -> None:
        """Count a refusal."""
        self._metrics.add("access_refusals", reason=refusal.reason)
        self._count(refusal, 1)

    async def run(self) -> None:
        """Report every few seconds until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Report what was counted; after a failure it is retried later, within `MAX_REFUSALS`."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        refusals = [_message(refusal, count) for refusal, count in counts.items()]
        try:
            await call(
                self._authentication.ReportRefusals,
                pb.ReportRefusalsRequest(refusals=refusals),
                timeout_s=5.0,
            )
        except PacelineError as error:
            log.warning("refusals are not in the audit log yet", number=len(counts), error=error)
            for refusal, count in counts.items():
                self._count(refusal, count)

    def _count(self, refusal: Refusal, count: int) -> None:
        if refusal not in self._counts and len(self._counts) >= MAX_REFUSALS:
            refusal = Refusal(None, "others", "others", refusal.reason)
        self._counts[refusal] += count


def _message(refusal: Refusal, count: int) -> pb.Refusal:
    known = refusal.who
    principal = (
        pb.Principal(source=refusal.source) if known is None else wire.to_proto(known, pb.Principal)
    )
    return pb.Refusal(
        principal=principal, action=refusal.action, detail=refusal.reason, count=count
    )
