"""A fork trains what its parent would have trained after a restart from the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec
from paceline.digest import digest_of
from paceline.enums import JobState
from paceline.errors import ConfigError, NotFoundError
from paceline.v1.experience_pb2 import TrainSample
from paceline_experience.store.store import Store

if TYPE_CHECKING:
    from conftest import Site, Sites


@pytest.fixture
async def site(store: Store, tmp_path: Path, sites: Sites) -> Site:
    """Its job has done 5 steps and keeps the checkpoints of steps 2 and 4."""
    found = sites(store, tmp_path)
    found.storage = ""
    await found.die()
    await found.submit(
        stop={"steps": 8},
        experience={"advantage": "mssr", "replay": {"kind": "experience_replay"}},
    )
    await found.begin(0)
    for step in range(1, 6):
        await found.train()
        if step in (2, 4):
            await saved(found, step)
    return found


def index_of(step: int) -> str:
    return json.dumps({"step": step, "files": {"weights": {"num_bytes": step, "blake3": "b"}}})


DIGEST = digest_of(index_of(4).encode())


async def saved(site: Site, step: int, *, kept: Sequence[int] = (2, 4)) -> None:
    folder = site.run_dir / "jobs" / site.job_id / "checkpoints" / f"step-{step:06d}.1"
    folder.mkdir(parents=True)
    (folder / "paceline.json").write_text(index_of(step))
    (folder / "weights").write_text("x" * step)
    told: dict[str, Any] = {"incarnation": site.incarnation, "step": step, "path": "p"}
    there = [each for each in kept if each <= step]
    await site.training.commit_checkpoint(
        site.job_id, **told, kept=there, digest=digest_of(index_of(step).encode())
    )
    await site.training.close()


async def forked(site: Site, *, request_id: str = "", **changes: Any) -> str:
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    raw = spec.model_dump(mode="json", by_alias=True)
    fork = {"job": site.job_id, "step": changes.pop("step", "latest")}
    child = JobSpec.model_validate(raw | {"fork": fork} | changes)
    job = await site.job_service.submit(child, request_id=request_id, files={})
    return job.status.job_id


async def batches(site: Site, first: int, last: int) -> list[list[Any]]:
    """What is trained of a job from a checkpoint on, without its id."""
    if (await site.status()).state is JobState.QUEUED:
        await site.job_service.set_state(site.job_id, JobState.STARTING, reason="")
    await site.begin(first)
    found: list[list[Any]] = []
    for step in range(first, last):
        await site.play(evals=0)
        share = await site.take(step)
        samples = [TrainSample.FromString(data) for data in share.samples]
        batch = [(s.group_id.partition(".")[2], s.index, s.weight, *s.advantages) for s in samples]
        found.append(sorted(batch))
        await site.commit(step, share.batch_id)
        await site.announce(step + 1)
    return found


@pytest.mark.parametrize("step", [2, 4])
async def test_a_fork_continues_like_its_parent(site: Site, step: int) -> None:
    parent, child = site.job_id, await forked(site, step=step)
    expected = await batches(site, step, 7)
    site.job_id = child
    await site.die()
    assert await batches(site, step, 7) == expected
    for job_id in (parent, child):
        site.job_id = job_id
        report = await (await site.ledger()).verify()
        assert report.ok, report.problems
    rows = await site.rows()
    assert [row.step for row in rows] == [*range(1, 8)]


async def test_a_fork_says_where_it_comes_from_and_outlives_its_parent(site: Site) -> None:
    parent, child = site.job_id, await forked(site, name="second", stop={"steps": 20})
    spec = JobSpec.model_validate_json((await site.jobs.get(child)).spec)
    assert spec.fork is not None
    assert (spec.fork.job, spec.fork.step, spec.fork.digest) == (parent, 4, DIGEST)
    await site.deletion.delete(parent, force=True)
    await site.job_service.set_state(parent, JobState.CANCELLED, reason="")
    for _ in range(3):
        await site.deletion.sweep()
        site.clock.advance(10)
    with pytest.raises(NotFoundError):
        await site.jobs.get(parent)
    copied = site.run_dir / "jobs" / child / "checkpoints" / "step-000004.1"
    assert (copied / "weights").read_text() == "xxxx"
    assert not (copied.parent / "step-000002.1").exists()
    site.job_id = child
    assert len(await batches(site, 4, 6)) == 2
    ledger = await site.ledger()
    assert await ledger.checkpoints(incarnation=site.incarnation) == {4: DIGEST}


async def test_a_finished_job_can_be_forked(site: Site) -> None:
    while not (await site.status()).state.terminal:
        await site.train()
        await site.sweep()
    child = await forked(site, stop={"steps": 10})
    site.job_id = child
    assert len(await batches(site, 4, 10)) == 6


async def test_the_best_checkpoint_by_eval_is_forked(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    """The one that the parent's status names, even if its eval ends after a newer checkpoint."""
    site = sites(store, tmp_path)
    site.storage = ""
    await site.die()
    await site.submit(eval={"every": 1, "tasks": 2, "timeout_s": 50})
    await site.begin(0)
    for step, reward in ((1, 0.25), (2, 0.75), (3, 0.5), (4, 0.5)):
        await site.train()
        if step in (2, 4):
            await saved(site, step)
        await site.play(eval_reward=reward)
        await site.sweep()
    named = [each.step for each in (await site.status()).checkpoints if each.best]
    for which, step in (("best", 2), ("latest", 4)):
        child = await site.jobs.get(await forked(site, step=which))
        fork = JobSpec.model_validate_json(child.spec).fork
        assert fork is not None
        assert fork.step == step
    assert named == [2]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_fork_of_a_checkpoint_that_the_ledger_has_passed_goes_on_with_the_next_tasks(
    store: Store, tmp_path: Path, sites: Sites, ends: bool, staleness: int
) -> None:
    """Only the best checkpoint is left of that time: the batches after it are gone."""
    site = sites(store, tmp_path)
    site.storage = ""
    await site.die()
    await site.submit(
        eval={"every": 1, "tasks": 2, "timeout_s": 50},
        experience={"max_staleness": staleness},
        stop={"steps": 8 if ends else 100},
    )
    await site.begin(0)
    for step in range(1, 9):
        await site.train()
        await saved(site, step, kept=[step])
        await site.play(eval_reward=0.75 if step == 2 else 0.25)
        await site.sweep()
    await site.sweep()
    assert (await site.status()).state == ("succeeded" if ends else "running")
    parent, site.job_id = site.job_id, await forked(site, step="best", stop={"steps": 6})
    rows = [row for row in await site.rows() if row.kind == "train"]
    assert [row.step for row in rows] == [1, 2]
    report = await (await site.ledger()).verify()
    assert report.ok, report.problems
    assert report.counts["durable"] == rows[1].values["counts"]["trained"] + 4
    fresh = await batches(site, 2, 6)
    assert [len(each) for each in fresh] == [4, 4, 4, 4]
    report = await (await site.ledger()).verify()
    assert report.ok, report.problems
    assert report.counts["trained"] + report.counts["durable"] == 24
    await site.sweep()
    status = await site.status()
    assert (status.step, parent != site.job_id) == (6, True)


async def test_a_repeated_request_finds_the_same_fork(site: Site) -> None:
    child = await forked(site, request_id="r")
    await site.train()
    await saved(site, 6)
    assert await forked(site, request_id="r") == child
    spec = JobSpec.model_validate_json((await site.jobs.get(child)).spec)
    assert spec.fork is not None
    assert spec.fork.step == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": 3}, r"fork.step: job job-\w+ has no checkpoint of step 3; kept are: 2, 4"),
        (
            {"step": "best"},
            r"no checkpoint that is the best; kept are: 2, 4; none of these steps was evaluated",
        ),
        ({"tasks": {"environment": "arithmetic", "seed": 8}}, "tasks.seed: cannot differ"),
        ({"model": {"path": "other"}}, "model: cannot differ"),
        ({"tenant": "other"}, "fork.job: .* belongs to tenant 'default'"),
    ],
)
async def test_what_does_not_fit_is_refused(
    site: Site, changes: dict[str, Any], problem: str
) -> None:
    before = await site.store.command("KEYS", "*")
    with pytest.raises(ConfigError, match=problem):
        await forked(site, **changes)
    assert sorted(await site.store.command("KEYS", "*")) == sorted(before)


async def test_a_fork_that_has_failed_leaves_nothing(site: Site) -> None:
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    raw = spec.model_dump(mode="json", by_alias=True)
    fork = {"job": site.job_id, "step": 4, "digest": DIGEST}
    child = JobSpec.model_validate(raw | {"fork": fork})
    before = set(await site.store.command("KEYS", "*"))
    names: list[str] = []

    async def dies(job_id: str) -> dict[str, Any]:
        await site.forking.copy(child, job_id)
        names.append(job_id)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await site.jobs.registration.prepare(child, request_id="r", max_live=2, make=dies)
    assert set(await site.store.command("KEYS", "*")) > before
    await site.deletion.sweep()
    found = await site.store.command("KEYS", "*")
    assert not any(names[0].encode() in key for key in found)
    assert not (site.run_dir / "jobs" / names[0]).exists()
