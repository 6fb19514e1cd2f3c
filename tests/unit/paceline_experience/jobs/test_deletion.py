"""Of a deleted job nothing is left in the store or on disk, whatever fails meanwhile."""

from __future__ import annotations

import threading
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.config import JobSpec
from paceline.enums import JobState, WorkerKind
from paceline.errors import DeletedError, NotFoundError, PacelineError, StateError
from paceline.isolation.code.archive import pack
from paceline.platform.files import write_json
from paceline.types import Worker
from paceline_experience.jobs.deletion import Deletion
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.registry import DELETED_REQUESTS
from paceline_experience.store.keys import all_keys
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S
from paceline_harness.wires import Wire

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

PLACES = ("jobs/{}/checkpoints/7", "objects/jobs/{}/checkpoints/7", "workers/w/{}")


def left_behind(run_dir: Path) -> list[str]:
    """Files, and what remembers ports."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(run_dir)) for path in files)


async def keys_of(store: Store) -> set[str]:
    """All keys, with the members of hashes and sorted sets that all jobs share."""
    found = set[str]()
    for key in (name.decode() for name in await store.command("KEYS", "*")):
        found.add(key)
        if key.startswith("{registry}"):
            kind = (await store.command("TYPE", key)).decode()
            read = {"hash": ("HKEYS", key), "zset": ("ZRANGE", key, 0, -1)}.get(kind)
            members = await store.command(*read) if read else []
            found |= {f"{key} {member.decode()}" for member in members}
    return found


def put_files(run_dir: Path, job_id: str, process: str) -> None:
    for place in PLACES:
        folder = run_dir / place.format(job_id)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data").write_text("x")
    for folder in ("settings", "credentials", "logs"):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    settings = {"kind": "rollout", "job_id": job_id}
    (run_dir / "settings" / f"{process}.yaml").write_text(yaml.safe_dump(settings))
    (run_dir / "credentials" / process).write_text("x")
    (run_dir / "logs" / f"{process}.log").write_text("x")
    (run_dir / "logs" / f"{process}.log.1").write_text("x")
    ports = {process: 20001, f"{process}:metrics": 20002, "environment-0": 20003}
    write_json(run_dir / "ports.json", ports)


async def lived(site: Site, **changes: Any) -> None:
    """A job with everything that a job leaves, trained for two steps."""
    await site.submit(**changes)
    await site.begin(0)
    for step in range(2):
        await site.train()
        await site.checkpoint(step + 1)


async def cancelled(site: Site) -> None:
    await site.job_service.cancel(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")


async def swept(site: Site, *, rounds: int = 3) -> None:
    for _ in range(rounds):
        with suppress(PacelineError):
            await site.deletion.sweep()
        site.clock.advance(10)


async def test_another_job_keeps_everything(site: Site) -> None:
    """Also one whose id begins with that of the deleted job."""
    await lived(site)
    deleted = site.job_id
    await site.job_service.set_state(deleted, JobState.FAILED, reason="")
    put_files(site.run_dir, deleted, f"rollout-{deleted}-0")
    await site.submit()
    other = site.job_id
    longer = f"{deleted}-abcdef"
    put_files(site.run_dir, longer, f"rollout-{longer}-0")
    before, kept = await keys_of(site.store), left_behind(site.run_dir)
    await site.deletion.delete(deleted, force=False)
    await swept(site)
    gone = before - await keys_of(site.store)
    assert all(deleted in each for each in gone)
    assert not any(deleted in each for each in await keys_of(site.store))
    files_gone = {*kept} - {*left_behind(site.run_dir)}
    assert all(deleted in each and longer not in each for each in files_gone)
    assert (await site.jobs.get(other)).status.state is JobState.QUEUED


@pytest.mark.parametrize("done", [True, False], ids=["reply lost", "request lost"])
async def test_nothing_is_left_wherever_it_is_interrupted(
    site: Site, wire: Wire, done: bool
) -> None:
    empty = await keys_of(site.store)
    skip = 0
    while True:
        await site.submit()
        await site.begin(0)
        await site.play()
        process = f"trainer-{site.job_id}"
        put_files(site.run_dir, site.job_id, process)
        await cancelled(site)
        (site.run_dir / "jobs" / site.job_id / "tracking").mkdir()
        site.deletion._settle_s = 0.0  # pyright: ignore[reportPrivateUsage]
        cuts = wire.num_cuts
        wire.cut(b"\r\n", skip=skip, done=done)
        with suppress(PacelineError):
            await site.deletion.delete(site.job_id, force=False)
        wire.mend()
        if skip % 2:
            await site.die()
        # A call that did not even mark the job is repeated by whoever made it.
        with suppress(NotFoundError):
            await site.deletion.delete(site.job_id, force=False)
        await swept(site, rounds=2)
        names = await keys_of(site.store) - empty
        assert not any(site.job_id in name for name in names), names
        assert not any(site.job_id in name for name in left_behind(site.run_dir))
        assert process not in (site.run_dir / "ports.json").read_text()
        with pytest.raises(NotFoundError):
            await site.jobs.get(site.job_id)
        if wire.num_cuts == cuts:
            break  # it was not long enough to be cut there
        skip += 1
    assert skip > 8
    assert names <= {"{registry}:sequence"}


async def test_who_reads_a_job_while_it_is_deleted_writes_nothing(
    store: Store, sites: Sites, tmp_path: Path
) -> None:
    class DeletesFirst(Store):
        async def command(self, *args: str | int | float | bytes) -> Any:
            if args[0] == "GET" and str(args[1]).endswith(":epoch"):
                await super().command("UNLINK", *all_keys("default", site.job_id))
            return await super().command(*args)

    site = sites(DeletesFirst(store.redis), tmp_path)
    await site.submit()
    await site.begin(0)
    await site.job_service.cancel(site.job_id, reason="")
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    await site.die()  # what was open is read again
    await (await site.ledger()).verify()
    assert not await store.command("KEYS", f"*{site.job_id}*")


async def test_a_job_that_is_not_over_is_cancelled_first(site: Site) -> None:
    await lived(site)
    with pytest.raises(StateError, match="is running: cancel it first, or delete it with force"):
        await site.deletion.delete(site.job_id, force=False)
    assert not await site.deletion.delete(site.job_id, force=True)
    assert (await site.status()).state is JobState.CANCELLING
    await swept(site)
    assert (await site.status()).state is JobState.CANCELLING  # its workers still run
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    await swept(site)
    with pytest.raises(NotFoundError):
        await site.deletion.delete(site.job_id, force=True)


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.PAUSED, JobState.PAUSING])
async def test_a_job_is_deleted_in_every_state(site: Site, state: JobState) -> None:
    await site.submit()
    if state is not JobState.QUEUED:
        await site.begin(0)
        await site.pausing.pause(site.job_id, reason="")
    if state is JobState.PAUSED:
        await site.job_service.set_state(site.job_id, JobState.PAUSED, reason="")
    assert (await site.status()).state == (state if state is not JobState.QUEUED else "queued")
    await site.deletion.delete(site.job_id, force=True)
    await site.job_service.set_state(site.job_id, JobState.CANCELLED, reason="")
    await swept(site)
    assert await keys_of(site.store) == {"{registry}:sequence"}


async def test_workers_that_still_write_are_waited_for(site: Site) -> None:
    await lived(site)
    await site.job_service.set_state(site.job_id, JobState.FAILED, reason="")
    worker = Worker("trainer-x", WorkerKind.TRAINER, "host:1", job_id=site.job_id)
    site.roster.join(worker)
    await site.deletion.delete(site.job_id, force=False)
    await swept(site)
    assert (site.run_dir / "jobs" / site.job_id).exists()
    site.roster.leave(worker.worker_id)
    await swept(site)
    assert not (site.run_dir / "jobs" / site.job_id).exists()


async def test_a_disk_that_refuses_does_not_lose_the_deletion(site: Site) -> None:
    await lived(site)
    await cancelled(site)
    folder = site.run_dir / "jobs" / site.job_id
    blocked = site.run_dir / "workers"
    (blocked / "w" / site.job_id).mkdir(parents=True)
    site.storage = "nowhere://bucket"
    await site.die()
    await swept(site)
    with suppress(PacelineError):
        await site.deletion.delete(site.job_id, force=False)
    await swept(site)
    assert not folder.exists()
    assert any(site.job_id in each for each in await keys_of(site.store))
    site.storage = ""
    await site.die()
    await swept(site)
    assert await keys_of(site.store) == {"{registry}:sequence"}


async def test_a_disk_that_hangs_keeps_no_other_deletion_waiting(site: Site) -> None:
    released = threading.Event()
    hung: list[str] = []

    class Hanging(JobFiles):
        def remove(self, job_id: str) -> None:
            if job_id in hung:
                released.wait(PATIENCE_S)
            super().remove(job_id)

    deletion = Deletion(
        store=site.store,
        jobs=site.jobs,
        ledgers=site.ledgers,
        artifacts=site.artifacts,
        job_service=site.job_service,
        roster=site.roster,
        files=Hanging(site.run_dir),
        settle_s=0.0,
        wait_s=0.2,
    )
    jobs: list[str] = []
    for _ in range(4):
        await site.submit()
        await cancelled(site)
        jobs.append(site.job_id)
    hung += jobs[:3]
    for job_id in jobs[:3]:
        assert not await deletion.delete(job_id, force=False)
    assert not await deletion.delete(jobs[0], force=False)  # still the same one
    while not await deletion.delete(jobs[3], force=False):
        pass
    released.set()
    while await keys_of(site.store) != {"{registry}:sequence"}:
        await deletion.sweep()
    await deletion.close()


async def test_model_files_stay_as_long_as_a_job_has_them(site: Site) -> None:
    jobs: list[str] = []
    digests = await site.artifacts.put({"config.json": b"{}"})
    for _ in range(2):
        await site.submit()
        key = f"{{default/{site.job_id}}}:record"
        text = '{"config.json": "' + digests["config.json"] + '"}'
        await site.store.command("HSET", key, "artifacts", text)
        jobs.append(site.job_id)
    for number, job_id in enumerate(jobs):
        stored = await site.store.command("EXISTS", f"artifact:{digests['config.json']}")
        assert stored == 1, number
        site.job_id = job_id
        await cancelled(site)
        await site.deletion.delete(job_id, force=False)
        async with site.artifacts.submitting():
            await swept(site)
            with suppress(PacelineError):
                await site.deletion.delete(job_id, force=False)
        await swept(site)
    assert await keys_of(site.store) == {"{registry}:sequence"}


async def uploaded(site: Site, folder: Path) -> str:
    """The digest of a folder with one file, which is stored."""
    folder.mkdir()
    (folder / "f.py").write_text(folder.name)
    archive = BytesIO()
    digest = pack(folder, archive)
    await site.artifacts.put_code("default", digest, archive, ["f.py"])
    await site.artifacts.keep_code("default", digest)
    return digest


async def test_uploads_stay_as_long_as_a_job_has_them(site: Site, tmp_path: Path) -> None:
    """Code and data alike, also what one job has as code and another as data."""
    shared = await uploaded(site, tmp_path / "shared")
    data = await uploaded(site, tmp_path / "data")
    await site.submit(code={"digest": shared}, data={"digest": data})
    one = site.job_id
    await cancelled(site)
    await site.submit(data={"digest": shared})
    for job_id, released in ((one, {data}), (site.job_id, {data, shared})):
        site.job_id = job_id
        with suppress(StateError):
            await cancelled(site)
        await site.deletion.delete(job_id, force=False)
        await swept(site)
        found = {
            each: await site.store.command("TTL", f"archive:{each}") for each in (data, shared)
        }
        assert {each for each, ttl_s in found.items() if ttl_s > 0} == released


async def test_a_job_lives_as_long_as_it_was_given(site: Site) -> None:
    await site.submit(ttl_seconds_after_finished=3600)
    with_ttl = site.job_id
    await cancelled(site)
    await site.submit()
    await cancelled(site)
    await swept(site)
    await site.jobs.get(with_ttl)
    await site.store.command("ZINCRBY", "{registry}:expiries", -3601, with_ttl)
    await swept(site)
    with pytest.raises(NotFoundError):
        await site.jobs.get(with_ttl)
    await site.jobs.get(site.job_id)
    assert not any(with_ttl in each for each in await keys_of(site.store))


async def test_a_request_that_is_repeated_does_not_submit_a_deleted_job_again(site: Site) -> None:
    await site.submit()
    spec = JobSpec.model_validate_json((await site.jobs.get(site.job_id)).spec)
    job = await site.job_service.submit(spec, request_id="r", files={})
    site.job_id = job.status.job_id
    await cancelled(site)
    await site.deletion.delete(site.job_id, force=False)
    await swept(site)
    with pytest.raises(DeletedError, match="the job of request_id 'r' was deleted"):
        await site.job_service.submit(spec, request_id="r", files={})
    week_s = 7 * 86400 + 1
    await site.store.command("ZINCRBY", DELETED_REQUESTS, -week_s, "default/r")
    await swept(site)
    again = await site.job_service.submit(spec, request_id="r", files={})
    assert again.status.job_id != site.job_id
