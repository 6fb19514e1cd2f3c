"""What the ledger is asked by a controller that leads, and by one that does so no more."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.config import parse_job
from paceline.enums import JobState
from paceline.errors import FencedError
from paceline_controller.cluster.cluster import LedgerOfTerm
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_harness.runtime import MemoryLedger

SPEC = parse_job(
    {
        "name": "a",
        "model": {"path": "models/tiny"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
)


async def test_a_former_leader_does_not_change_the_ledger() -> None:
    leads = True
    ledger = MemoryLedger({"a-1": LiveJob("a-1", JobState.RUNNING, 0, SPEC)})
    events = Events(cast(Any, None), identity="c-0", regarding=lambda _: None)
    term = LedgerOfTerm(ledger, events, may_write=lambda: leads)
    assert await term.grant_incarnation("a-1") == 1
    assert await term.report_failure("a-1", "out of memory") == (1, "out of memory")
    leads = False
    with pytest.raises(FencedError, match="grant_incarnation a-1: another controller leads"):
        await term.grant_incarnation("a-1")
    with pytest.raises(FencedError, match="report_failure a-1: another controller leads"):
        await term.report_failure("a-1", "out of memory")
    with pytest.raises(FencedError, match="set_state a-1: another controller leads"):
        await term.set_state("a-1", JobState.FAILED, reason="hangs")
    assert ledger.incarnations == {"a-1": 1}
    assert [job.state for job in await term.live_jobs()] == [JobState.RUNNING]
