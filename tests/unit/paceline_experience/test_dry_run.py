"""Children in which plug-ins are tried."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.errors import InvalidError
from paceline_experience.dry_run import DryRun

if TYPE_CHECKING:
    from conftest import Worlds

    from paceline_experience.store import Store


async def test_a_child_that_died_idle_is_no_fault_of_the_next_job(
    store: Store, worlds: Worlds
) -> None:
    spec = worlds(store).spec
    dry_run = DryRun(timeout_s=100.0, memory_bytes=1 << 30)
    await dry_run.check(spec)
    process = cast(Any, dry_run)._idle[0]._family.process
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await dry_run.check(spec)
    wrong = worlds(store, experience={"sampler": {"kind": "shuffle", "bogus": 1}}).spec
    with pytest.raises(InvalidError, match="unknown option"):
        await dry_run.check(wrong)
    await dry_run.close()
