"""Refusals on their way to the audit log: equal ones within a short time are counted together."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.access import Principal, to_message
from paceline.errors import PacelineError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.rpc import call
from paceline.v1 import access_pb2 as pb

if TYPE_CHECKING:
    from paceline.v1.access_pb2_grpc import GatekeeperAsyncStub

PERIOD_S = 5.0
# Different ones within a period; who comes from everywhere is counted, not listed.
MOST = 256
log = Log("refusals")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Who wanted what, and why not."""

    who: Principal | None  # None: a stranger
    source: str
    action: str
    reason: str  # missing | invalid | role | tenant


class Refusals:
    """Counts refusals; `run` brings them to the audit log."""

    def __init__(self, *, gatekeeper: GatekeeperAsyncStub, metrics: Metrics) -> None:
        self._gatekeeper = gatekeeper
        self._metrics = metrics
        self._counts: Counter[Refusal] = Counter()

    def note(self, refusal: Refusal) -> None:
        """Count one."""
        self._metrics.add("access_refusals", reason=refusal.reason)
        self._count(refusal, 1)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Bring what there is to the log; what cannot be brought waits, up to a bound."""
        taken, self._counts = self._counts, Counter()
        if not taken:
            return
        refusals = [_message(refusal, count) for refusal, count in taken.items()]
        try:
            await call(self._gatekeeper.Report, pb.ReportRequest(refusals=refusals), timeout_s=5.0)
        except PacelineError as error:
            log.warning("refusals are not in the audit log yet", number=len(taken), error=error)
            for refusal, count in taken.items():
                self._count(refusal, count)

    def _count(self, refusal: Refusal, count: int) -> None:
        if refusal not in self._counts and len(self._counts) >= MOST:
            refusal = Refusal(None, "others", "others", refusal.reason)
        self._counts[refusal] += count


def _message(refusal: Refusal, count: int) -> pb.Refusal:
    known = refusal.who
    principal = pb.Principal(source=refusal.source) if known is None else to_message(known)
    return pb.Refusal(
        principal=principal, action=refusal.action, detail=refusal.reason, count=count
    )
