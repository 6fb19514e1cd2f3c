"""A fork trains what its parent would have trained after a restart from the same checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.config import JobSpec
from paceline.enums import JobState
from paceline.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    PacelineError,
    PendingError,
    StateError,
    UnavailableError,
)
from paceline.platform.digest import digest_of
from paceline.v1.experience_pb2 import TrainSample
from paceline_experience.jobs.forks.forking import Forking
from paceline_experience.jobs.forks.plan import ForkPlan, fork_plan
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.registration import JobRequest
from paceline_experience.jobs.registry import LIVE, TENANTS
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store, client_of
from paceline_harness.patience import PATIENCE_S
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites


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


async def begun(site: Site, **changes: Any) -> Site:
    """The site with another job, whose checkpoints are on the volume."""
    site.storage = ""
    await site.die()
    await site.submit(**changes)
    await site.begin(0)
    return site


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


async def test_a_fork_does_not_wait_for_workers_of_its_parent(site: Site) -> None:
    given = await (await site.ledger()).leases.lease(worker_id="w", train=100, evals=0)
    site.job_id = await forked(site)
    await site.die()
    ledger = await site.ledger()
    assert (bool(given), ledger.holders()) == (True, [])
    report = await ledger.verify()
    assert report.ok, report.problems


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
    assert await ledger.batches.checkpoints(incarnation=site.incarnation) == {4: DIGEST}


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
    site = await begun(sites(store, tmp_path), eval={"every": 1, "tasks": 2, "timeout_s": 50})
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
    site = await begun(
        sites(store, tmp_path),
        eval={"every": 1, "tasks": 2, "timeout_s": 50},
        experience={"max_staleness": staleness},
        stop={"steps": 8 if ends else 100},
    )
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


async def test_only_the_weights_of_a_checkpoint_are_measured(site: Site) -> None:
    """A job without a trainer has nothing of its parent's ledger, and may have any other tasks."""
    tasks = {"environment": "chain", "seed": 8}
    changes: dict[str, Any] = {"kind": "eval", "eval": {"tasks": 3}, "tasks": tasks}
    site.job_id = await forked(site, step=2, **changes)
    assert (await site.status()).step == 2
    assert await site.rows() == []
    await site.job_service.set_state(site.job_id, JobState.STARTING, reason="")
    site.incarnation = await site.training.grant_incarnation(site.job_id)
    await site.announce(2)
    await site.play(eval_reward=0.5)
    await site.sweep()
    status, [row] = await site.status(), await site.rows()
    assert (status.state, status.reason) == ("succeeded", "all tasks are measured")
    assert (row.step, row.values["reward"], row.values["measured"]) == (2, 0.5, 3)
    assert (status.summary["steps"], status.summary["ledger_consistent"]) == (2, True)


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
        ({"kind": "eval", "eval": {}, "model": {"path": "other"}}, "for: model, trainer.lora$"),
    ],
)
async def test_what_does_not_fit_is_refused(
    site: Site, changes: dict[str, Any], problem: str
) -> None:
    before = await site.store.command("KEYS", "*")
    with pytest.raises(ConfigError, match=problem):
        await forked(site, **changes)
    assert sorted(await site.store.command("KEYS", "*")) == sorted(before)


async def test_other_tenants_do_not_learn_that_there_is_such_a_job(site: Site) -> None:
    with pytest.raises(NotFoundError, match="tenant 'other' has no job"):
        await forked(site, tenant="other")


async def test_a_repeated_request_finds_its_fork_although_the_parent_is_gone(site: Site) -> None:
    child = await forked(site, request_id="r")
    spec = JobSpec.model_validate_json((await site.jobs.get(child)).spec)
    await site.deletion.delete(site.job_id, force=True)
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    await swept(site)
    assert await listed(site) == {child}
    assert (await site.job_service.submit(spec, request_id="r", files={})).status.job_id == child


def request_of(child: JobSpec) -> JobRequest:
    """The request for a job of which a tenant may have nine."""
    return JobRequest(child.name, child.tenant, "r", 9)


def plan_of(child: JobSpec) -> ForkPlan:
    plan = fork_plan(child)
    assert plan is not None
    return plan


async def test_a_fork_that_has_failed_leaves_nothing(site: Site) -> None:
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    raw = spec.model_dump(mode="json", by_alias=True)
    fork = {"job": site.job_id, "step": 4, "digest": DIGEST}
    child = JobSpec.model_validate(raw | {"fork": fork})
    before = set(await site.store.command("KEYS", "*"))
    names: list[str] = []

    async def dies(job_id: str) -> dict[str, Any]:
        await site.forking.copy(plan_of(child), job_id)
        names.append(job_id)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await site.jobs.registration.prepare(request_of(child), dies)
    assert set(await site.store.command("KEYS", "*")) > before
    await site.deletion.sweep()
    found = await site.store.command("KEYS", "*")
    assert not any(names[0].encode() in key for key in found)
    assert not (site.run_dir / "jobs" / names[0]).exists()


class GatedStorage(LocalFileSystem):
    """An object store whose copies wait for the gate, and whose listings are cached."""

    protocol = ("gated",)
    gate: ClassVar[threading.Event] = threading.Event()
    copying: ClassVar[threading.Event] = threading.Event()
    listings: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("gated://"))

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        if path not in self.listings:
            self.listings[path] = super().glob(path, maxdepth, **kwargs)
        return self.listings[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listings.clear()

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.copying.set()
        assert self.gate.wait(PATIENCE_S)
        super().cp_file(path1, path2, **kwargs)


@pytest.fixture
async def gated(site: Site) -> AsyncIterator[Site]:
    """Its checkpoints are in an object store; calls wait for their copies for a tenth second."""
    register_implementation("gated", GatedStorage, clobber=True)
    GatedStorage.gate.clear()
    GatedStorage.copying.clear()
    (site.run_dir / "objects").mkdir()
    (site.run_dir / "jobs").rename(site.run_dir / "objects" / "jobs")
    (site.run_dir / "jobs").symlink_to(site.run_dir / "objects" / "jobs")
    site.storage = f"gated://{site.run_dir}/objects"
    site.copy_wait_s = 0.1
    await site.die()
    yield site
    GatedStorage.gate.set()
    await site.in_flight.close()


async def copying(site: Site, *, request_id: str = "r") -> None:
    """Begin a fork whose copy lasts."""
    with pytest.raises(PendingError, match="being copied"):
        await forked(site, request_id=request_id)
    assert await asyncio.to_thread(GatedStorage.copying.wait, 30)


async def pended(site: Site, **changes: Any) -> str:
    """As `forked`, by a client that repeats what is pending."""
    while True:
        try:
            return await forked(site, request_id="r", **changes)
        except PendingError:
            await asyncio.sleep(0.02)


async def listed(site: Site) -> set[str]:
    return {name.decode() for name in await site.store.command("ZRANGE", LIVE, 0, -1)}


async def swept(site: Site) -> None:
    for _ in range(3):
        with suppress(PacelineError):
            await site.deletion.sweep()
        site.clock.advance(10)


async def checked(site: Site, child: str) -> None:
    """The fork has the ledger of its checkpoint, and goes on from there."""
    parent, site.job_id = site.job_id, child
    assert [row.step for row in await site.rows()] == [1, 2, 3, 4]
    assert len(await batches(site, 4, 6)) == 2
    report = await (await site.ledger()).verify()
    assert report.ok, report.problems
    site.job_id = parent


async def test_a_copy_outlives_its_request_and_equal_requests_share_it(gated: Site) -> None:
    await copying(gated)
    with pytest.raises(ConflictError, match="use a new request_id"):
        await forked(gated, request_id="r", stop={"steps": 9})
    live = await listed(gated)
    assert len(live) == 2
    GatedStorage.gate.set()
    first, second = await asyncio.gather(pended(gated), pended(gated))
    assert first == second
    assert await pended(gated) == first
    assert await listed(gated) == live == {gated.job_id, first}
    await checked(gated, first)


async def test_equal_requests_at_once_make_one_fork(site: Site) -> None:
    first, *others = await asyncio.gather(*(pended(site) for _ in range(3)))
    assert set(others) == {first}
    await checked(site, first)


async def test_the_parent_goes_on_while_its_checkpoint_is_copied(gated: Site) -> None:
    """And drops trajectories that its ledger had when the copy began."""
    await gated.submit(experience={"keep_trajectories": 1})
    await gated.begin(0)
    for step in range(1, 6):
        await gated.train()
        if step in (2, 4):
            await saved(gated, step)
    payloads = JobKeys("default", gated.job_id).payloads
    before = set[bytes](await gated.store.command("HKEYS", payloads))
    await copying(gated)
    for step in range(6, 8):
        await gated.train()
        await saved(gated, step, kept=[4, step])
    await gated.sweep()
    assert before - set(await gated.store.command("HKEYS", payloads))
    GatedStorage.gate.set()
    await checked(gated, await pended(gated))


class MovingStore(Store):
    """Once a ledger has been read, and before its trajectories are, `move` is called."""

    move: Callable[[], Awaitable[None]] | None = None

    async def transaction(self, *commands: tuple[str | int, ...]) -> list[Any]:
        found = await super().transaction(*commands)
        if self.move is not None and len(commands) > 5:
            move, self.move = self.move, None
            await move()
        return found


async def test_the_parent_drops_trajectories_while_its_ledger_is_copied(
    store: Store, tmp_path: Path, sites: Sites
) -> None:
    site = await begun(sites(store, tmp_path), experience={"keep_trajectories": 1})
    for step in range(1, 6):
        await site.train()
        if step in (2, 4):
            await saved(site, step)
    spec = (await site.jobs.get(site.job_id)).spec
    raw = json.loads(spec) | {"fork": {"job": site.job_id, "step": 4, "digest": DIGEST}}
    moving = MovingStore(site.store.redis)
    forking = Forking(
        store=moving, jobs=site.jobs, files=JobFiles(site.run_dir), compress_over_bytes=1024
    )

    async def goes_on() -> None:
        await site.train()
        await saved(site, 6, kept=[4, 6])
        await site.sweep()
        assert before - set(await site.store.command("HKEYS", payloads))

    payloads = JobKeys("default", site.job_id).payloads
    before = set[bytes](await site.store.command("HKEYS", payloads))
    moving.move = goes_on
    child = JobSpec.model_validate(raw)
    made = await site.jobs.registration.prepare(
        request_of(child), lambda name: forking.copy(plan_of(child), name)
    )
    assert made["step"] == 6
    assert moving.move is None


@pytest.mark.parametrize("damage", ["pruned", "cut"])
async def test_a_checkpoint_that_is_not_whole_makes_no_fork(gated: Site, damage: str) -> None:
    before = await gated.store.command("KEYS", "*")
    folder = gated.run_dir / "objects" / "jobs" / gated.job_id / "checkpoints" / "step-000004.1"
    if damage == "cut":
        (folder / "weights").write_text("x")
        GatedStorage.gate.set()
        with pytest.raises(UnavailableError, match="has 1 bytes instead of 4"):
            await pended(gated)
    else:
        await copying(gated)
        for each in folder.iterdir():
            each.unlink()
        GatedStorage.gate.set()
        with pytest.raises(StateError, match=r"checkpoint 4 of .* is not there any more"):
            await pended(gated)
    await swept(gated)
    assert await listed(gated) == {gated.job_id}
    assert sorted(await gated.store.command("KEYS", "*")) == sorted(before)
    assert {each.name for each in (gated.run_dir / "objects" / "jobs").iterdir()} == {gated.job_id}


async def test_a_failure_that_nobody_has_waited_for_is_told_to_the_next(gated: Site) -> None:
    await copying(gated)
    await saved(gated, 5, kept=[5])
    GatedStorage.gate.set()
    while len(await listed(gated)) > 1:
        await asyncio.sleep(0.01)
    with pytest.raises(StateError, match="has dropped its checkpoint 4"):
        await forked(gated, request_id="r")


async def test_a_checkpoint_is_found_that_a_cached_listing_lacks(gated: Site) -> None:
    GatedStorage.gate.set()
    jobs = f"{gated.run_dir}/objects/jobs/{gated.job_id}/checkpoints"
    files, _ = url_to_fs(gated.storage)
    assert files.glob(f"{jobs}/step-000006.*") == []
    await gated.train()
    await saved(gated, 6, kept=[4, 6])
    child = await pended(gated)
    copied = gated.run_dir / "jobs" / child / "checkpoints" / "step-000006.1"
    assert (copied / "weights").read_text() == "xxxxxx"


async def test_only_the_folder_that_the_ledger_knows_is_copied(site: Site) -> None:
    folder = site.run_dir / "jobs" / site.job_id / "checkpoints"
    other = folder / "step-000004.2"
    shutil.copytree(folder / "step-000004.1", other)
    (other / "paceline.json").write_text(json.dumps({"files": {}}))
    copied = site.run_dir / "jobs" / await forked(site) / "checkpoints"
    assert [each.name for each in copied.iterdir()] == ["step-000004.1"]


async def test_a_fork_has_secrets_of_its_own(site: Site) -> None:
    child = await forked(site)
    for secret in (site.jobs.weights_key, site.jobs.credential_secret):
        assert len({await secret(site.job_id), await secret(child)}) == 2
        assert await secret(child) == await secret(child)


async def test_a_stop_of_the_service_ends_the_copy_and_the_request_comes_again(
    gated: Site,
) -> None:
    await copying(gated)
    (lost,) = await listed(gated) - {gated.job_id}
    GatedStorage.gate.set()
    await gated.in_flight.close()
    await gated.die()
    await gated.deletion.abandon(await gated.jobs.repair())
    await swept(gated)
    child = await pended(gated)
    assert await listed(gated) == {gated.job_id, child}
    assert child != lost
    await checked(gated, child)


async def test_wherever_the_store_is_lost_the_request_comes_to_one_whole_fork(
    store: Store, wire: Wire, tmp_path: Path, sites: Sites
) -> None:
    cuttable = Store(client_of(f"unix://{tmp_path / 'w'}"))
    site = await begun(sites(cuttable, tmp_path / "run"))
    for step in range(1, 6):
        await site.train()
        if step in (2, 4):
            await saved(site, step)
    failures = 0
    for skip in range(0, 60, 4):
        wire.cut(b"\r\n", skip=skip, done=bool(skip % 8))
        with suppress(PacelineError):
            await forked(site, request_id=f"r{skip}")
            failures -= 1
        failures += 1
        wire.mend()
        for _ in range(3):  # also for an id that could not even be marked
            await site.deletion.sweep()
            site.clock.advance(40)
        child = await forked(site, request_id=f"r{skip}")
        assert await listed(site) == {site.job_id, child}
        await site.ledgers.open_all()
        await site.sweep()
        await checked(site, child)
        await site.deletion.delete(child, force=True)
        await site.job_service.set_state(child, JobState.CANCELLED, reason="")
        await swept(site)
        assert not any(child.encode() in key for key in await store.command("KEYS", "*"))
    assert failures > 5
    await site.ledgers.close()
    await cuttable.close()


async def test_a_start_that_a_crash_interrupts_forgets_no_id(site: Site) -> None:
    """Of a request that a crash has cut before the record was written."""
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    before = await site.store.command("KEYS", "*")
    lost = await site.jobs.registration.register(request_of(spec))
    await site.die()
    assert await site.jobs.repair() == [lost]  # and then it crashes
    await site.die()
    await site.deletion.abandon(await site.jobs.repair())
    assert sorted(await site.store.command("KEYS", "*")) == sorted(before)


async def test_a_request_does_not_get_an_id_that_is_being_deleted(site: Site) -> None:
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    lost = await site.jobs.registration.register(request_of(spec))
    site.storage = "nowhere://bucket"
    await site.die()
    await site.deletion.abandon(await site.jobs.repair())
    for again in (
        site.jobs.create(JobParts(spec), artifacts={}, request_id="r"),
        forked(site, request_id="r"),
    ):
        with pytest.raises(UnavailableError, match="is being deleted; repeat the request"):
            await again
    site.storage = ""
    await site.die()
    await swept(site)
    assert (
        await site.jobs.create(JobParts(spec), artifacts={}, request_id="r")
    ).status.job_id != lost


async def test_an_id_whose_request_was_given_up_is_deleted_after_a_while(site: Site) -> None:
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    lost = await site.jobs.registration.register(request_of(spec))
    await site.deletion.sweep()
    assert lost in await listed(site)
    site.clock.advance(61)
    await site.deletion.sweep()
    assert await listed(site) == {site.job_id}
    assert not await site.store.command("HEXISTS", TENANTS, lost)


@pytest.mark.parametrize("same", [True, False])
async def test_an_evaluation_that_is_open_in_the_parent_begins_again_if_the_fork_has_it(
    store: Store, tmp_path: Path, sites: Sites, same: bool
) -> None:
    site = await begun(
        sites(store, tmp_path), evals={"dev": {"every": 1, "tasks": 3, "timeout_s": 500}}
    )
    for step in (1, 2):
        await site.play(evals=0)
        await site.train()
        await saved(site, step, kept=[2])
    run = (await (await site.ledger()).live()).eval
    assert run is not None
    assert run.name == "dev"
    changes: dict[str, Any] = {} if same else {"evals": {"test": {"every": 100, "tasks": 2}}}
    site.job_id = await forked(site, **changes)
    await (await site.ledger()).sweep()
    report = await (await site.ledger()).verify()
    assert report.ok, report.problems
    assert len(await batches(site, 2, 3)) == 1
    await site.sweep()
    run = (await (await site.ledger()).live()).eval
    assert (run is not None and run.name) == ("dev" if same else False)
    report = await (await site.ledger()).verify()
    assert report.ok, report.problems
