"""Plug-ins are tried where nobody waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.data import JobData
from paceline.errors import InvalidError
from paceline_experience.jobs.dry_run import DryRun
from paceline_harness.gates import OTHERS_RAN

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.site import Sites
    from paceline_harness.ledgers.world import Worlds

CHILD = "paceline_experience.jobs.dry_run_child"


async def test_a_child_that_died_idle_is_no_fault_of_the_next_job(
    store: Store, worlds: Worlds
) -> None:
    spec = worlds(store).spec
    dry_run = DryRun(timeout_s=100.0, memory_bytes=1 << 30)
    await dry_run.check(spec, JobData())
    (child,) = (each for each in psutil.Process().children() if CHILD in each.cmdline())
    child.kill()
    await dry_run.check(spec, JobData())
    wrong = worlds(store, experience={"sampler": {"kind": "shuffle", "bogus": 1}}).spec
    with pytest.raises(InvalidError, match="unknown option"):
        await dry_run.check(wrong, JobData())
    await dry_run.close()


async def test_a_slow_plug_in_import_blocks_nobody(
    store: Store, sites: Sites, worlds: Worlds, tmp_path: Path
) -> None:
    spec = worlds(store, experience={"sampler": {"kind": "slow_import"}}).spec
    asyncio.get_running_loop().call_later(0.1, OTHERS_RAN.set)
    with pytest.raises(InvalidError, match="others ran: True"):
        await sites(store, tmp_path).job_service.submit(spec, request_id="", files={})
