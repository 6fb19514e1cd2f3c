"""The store or the service fails in the middle: of a step, an eval, an export, the end of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.enums import JobState
from paceline.errors import StateError, StoreError, UnavailableError
from paceline_experience.store.keys import JobKeys
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site

EVAL: dict[str, Any] = {"every": 100, "tasks": 3, "timeout_s": 50, "options": {"split": "heldout"}}


def keys(site: Site) -> JobKeys:
    return JobKeys("default", site.job_id)


@pytest.mark.parametrize("done", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("dies", [True, False], ids=["service dies", "service lives"])
async def test_a_step_has_one_row_whatever_fails(
    site: Site, wire: Wire, done: bool, dies: bool
) -> None:
    await site.submit()
    await site.begin(0)
    await site.train()
    await site.play()
    share = await site.take(1)
    wire.cut(b'"trained_tokens"', done=done)  # what only `commit` sends
    with pytest.raises(StoreError):
        await site.commit(1, share.batch_id)
    assert wire.num_cuts == 1
    if dies:
        await site.die()
    elif done:
        await site.sweep()  # nobody asks again: the trainer may have died with it
        assert [row.step for row in await site.rows()] == [1, 2]
    assert await site.commit(1, share.batch_id) is None
    await site.announce(2)
    await site.train()
    rows = await site.rows()
    assert [(row.kind, row.step) for row in rows] == [("train", 1), ("train", 2), ("train", 3)]
    values = rows[1].values
    assert (values["loss"], values["counts"]["trained"], values["trained_tokens"]) == (0.5, 8, 24)


async def test_a_step_that_is_trained_again_has_another_row(site: Site) -> None:
    await site.submit()
    await site.begin(0)
    for _ in range(2):
        await site.train()
    await site.begin(1)
    await site.train()
    rows = await site.rows()
    assert [row.step for row in rows] == [1, 2, 2]
    first, again = (row.values for row in rows[1:])
    assert first["trained_tokens"] == again["trained_tokens"] == 24
    assert again["counts"]["trained"] == 8


@pytest.mark.parametrize("done", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("dies", [True, False], ids=["service dies", "service lives"])
async def test_an_eval_has_one_row_whatever_fails(
    site: Site, wire: Wire, done: bool, dies: bool
) -> None:
    await site.submit(eval=EVAL)
    await site.begin(0)
    wire.cut(b'"eval_sets"', done=done)  # what only the end of an eval sends
    with pytest.raises(UnavailableError):
        await site.play()
    assert wire.num_cuts == 1
    if dies:
        await site.die()
    await site.sweep()
    assert [(row.kind, row.step) for row in await site.rows()] == [("eval", 0)]
    status = await site.status()
    assert (status.eval_reward, status.eval_step) == (0.0, 0)


async def test_exports_resume_after_a_restart(site: Site) -> None:
    await site.submit(experience={"keep_trajectories": 4})
    await site.begin(0)
    for step in range(1, 7):
        await site.train()
        if step % 2 == 0:
            await site.checkpoint(step)
            await site.die()
    await site.job_service.cancel(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    found = site.exported()
    assert len(found) == len(set(found)) == 24
    assert len(await site.listed()) == 4
    assert sorted(p.stem for p in site.folder.glob("*")) == [f"step-00000{n}" for n in (2, 4, 6)]


@pytest.mark.parametrize("done", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("pattern", [b'"begun":"step', b'"begun":""'], ids=["begin", "end"])
async def test_an_export_that_is_broken_off_repeats_nothing(
    site: Site, wire: Wire, pattern: bytes, done: bool
) -> None:
    await site.submit()
    await site.begin(0)
    await site.train()
    wire.cut(pattern.replace(b'"', b'\\"'), done=done)  # inside a JSON text
    await site.checkpoint(1)
    assert wire.num_cuts == 1
    await site.die()
    await site.train()
    await site.checkpoint(2)
    found = site.exported()
    assert len(found) == len(set(found)) == 8


async def test_a_rewound_step_is_exported_once(site: Site) -> None:
    await site.submit()
    await site.begin(0)
    for _ in range(4):
        await site.train()
    await site.checkpoint(2)
    assert len(site.exported()) == 8  # steps that a restart could train again wait
    await site.begin(2)
    assert len(await site.listed()) == 8
    for _ in range(2):
        await site.train()
    await site.checkpoint(4)
    assert sorted(site.exported()) == sorted(await site.listed())
    assert len(site.exported()) == 16


async def test_a_missing_trajectory_is_logged_and_blocks_nothing(site: Site) -> None:
    await site.submit()
    await site.begin(0)
    for _ in range(2):
        await site.train()
    gone: list[bytes] = await site.store.command("ZRANGE", keys(site).ring, 0, 1)
    await site.store.command("HDEL", keys(site).payloads, gone[0])
    await site.store.command("HSET", keys(site).payloads, gone[1], b"\1damaged")
    assert len(await site.listed()) == 6
    report = await (await site.ledger()).verify()
    assert f"trajectory {gone[0].decode()} is listed, but its payload is gone" in report.problems
    await site.job_service.set_state(site.job_id, JobState.FAILED, reason="it had to")
    status = await site.status()
    assert (status.state, status.reason) == ("failed", "it had to")
    assert status.summary["trajectories_missing"] == 2
    assert len(site.exported()) == 6


async def test_a_job_that_is_to_fail_does_when_the_disk_takes_files_again(site: Site) -> None:
    await site.submit()
    await site.begin(0)
    await site.train()
    site.folder.write_text("not a folder")
    with pytest.raises(UnavailableError, match=r"the results of job-.* cannot be written"):
        await site.job_service.set_state(site.job_id, JobState.FAILED, reason="it had to")
    with pytest.raises(StateError, match="is about to end: no trainer may start"):
        await site.begin(0)
    await site.die()
    await site.sweep()
    assert (await site.status()).state == "running"
    site.folder.unlink()
    await site.sweep()
    status = await site.status()
    assert (status.state, status.reason) == ("failed", "it had to")
    assert len(site.exported()) == 4


async def test_a_disk_that_stays_full_does_not_keep_a_job(site: Site) -> None:
    await site.submit(stop={"steps": 1})
    await site.begin(0)
    site.folder.write_text("not a folder")
    await site.train()
    assert (await site.take(1)).stop == "finished"
    await site.sweep()
    assert (await site.status()).state == "running"
    site.clock.advance(61)
    await site.sweep()
    status = await site.status()
    assert status.state == "succeeded"
    assert "not_written" in status.summary
    assert len(await site.listed()) == 4


@pytest.mark.parametrize("end", ["cancel", "fail", "wall_s"])
async def test_a_job_ends_while_steps_are_repeated(site: Site, end: str) -> None:
    await site.submit(stop={"steps": 100, "wall_s": 60})
    await site.begin(0)
    for step in range(1, 6):
        await site.train()
        if step == 2:
            await site.checkpoint(2)
    await site.begin(2)
    await site.train()
    if end == "wall_s":
        site.clock.advance(61)
        await site.sweep()
        assert (await site.take(3)).stop == "finished"
        await site.sweep()
    elif end == "cancel":
        await site.job_service.cancel(site.job_id, reason="enough")
        await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    else:
        await site.job_service.set_state(site.job_id, JobState.FAILED, reason="no use")
    status = await site.status()
    assert status.state == {"cancel": "cancelled", "fail": "failed", "wall_s": "succeeded"}[end]
    assert (status.summary["ledger_consistent"], status.summary["trajectories_missing"]) == (
        True,
        0,
    )
    assert sorted(site.exported()) == sorted(await site.listed())
    assert status.summary["episodes_trained"] == len(site.exported()) == 12
    assert status.summary["staleness_histogram"] == {"0": 4, "1": 8}
