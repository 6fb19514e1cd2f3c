"""What is kept of all jobs together: who owns which id, in which order, and until when."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from paceline.config import job_of
from paceline.errors import DeletedError, InvalidError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.types import Job, JobStatus
from paceline_experience.store.keys import job_key
from paceline_experience.store.store import Store, pairs
from paceline_experience.webhooks.notice import NOTICES, notice_of

TENANTS, REQUESTS, INDEX, LIVE, SEQUENCE, EXPIRIES = (
    f"{{registry}}:{name}"
    for name in ("tenants", "requests", "jobs", "live", "sequence", "expiries")
)
# Hash: job -> its `Mark`.
MARKS = "{registry}:deleting"
# Requests whose jobs were deleted, by time: repeated, they do not submit again.
DELETED_REQUESTS = "{registry}:deleted_requests"
_DELETED_REQUESTS_S = 7 * 86400
_CHUNK = 200
_UPLOADS = ("code", "data")  # fields of records and of specs
log = Log("jobs")


@dataclass(frozen=True, slots=True)
class Mark:
    """What the deletion of a job has to know once its record is gone."""

    tenant: str
    artifacts: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    tracked: bool = False
    submitted: bool = True  # else whoever submits it will try again


_MARK = TypeAdapter(Mark)  # ignores what another version has noted besides


class Registry:
    """Reads the records of all jobs, and removes a job from all lists."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def note_end(self, status: JobStatus) -> None:
        """A job is over: note when it is to be deleted and which webhook hears of it.

        It counts as live until that is noted, so whoever finds it among live jobs may repeat this.
        """
        job_id = status.job_id
        text: bytes | None = await self._store.command(
            "GET", job_key(status.tenant, job_id, "spec")
        )
        due, notice = "", b""
        try:
            spec = job_of(Job(status=status, spec=(text or b"").decode(), artifacts={}))
        except InvalidError as error:
            log.warning("ends without notice or time to live", job=job_id, error=error)
        else:
            if spec.ttl_seconds_after_finished is not None:
                due = repr(await self._store.now() + spec.ttl_seconds_after_finished)
            if spec.notify is not None:
                notice = notice_of(status, spec.notify).to_json()
        await self._store.run("job_ended", [LIVE, EXPIRIES, NOTICES], job_id, due, notice)

    async def expired(self) -> list[str]:
        """Jobs whose time to live has passed."""
        now = repr(await self._store.now())
        found: list[bytes] = await self._store.command("ZRANGEBYSCORE", EXPIRIES, "-inf", now)
        return [job_id.decode() for job_id in found]

    async def used_digests(self, *, but: str) -> set[str]:
        """Digests of model files and uploads that any job refers to, apart from one job."""
        found = set[str]()
        async for job_ids in self._all():
            others = [job_id for job_id in job_ids if job_id != but]
            records = await self._fields(others, "artifacts", *_UPLOADS)
            for job_id, (artifacts, *uploads) in zip(others, records, strict=True):
                found |= {*json.loads(artifacts or "{}").values()}
                found |= await self._uploads(job_id, uploads)
        return found

    async def uploads_of(self, job_id: str) -> set[str]:
        """The digests of what was uploaded for a job: its code and data."""
        (uploads,) = await self._fields([job_id], *_UPLOADS)
        return await self._uploads(job_id, uploads)

    async def abandon(self, job_id: str, tenant: str) -> None:
        """What there is of a job without a record is to be deleted; its request may come again."""
        await self.mark(job_id, Mark(tenant, submitted=False), ("ZREM", LIVE, job_id))

    async def mark(self, job_id: str, mark: Mark, *commands: tuple[str | int, ...]) -> None:
        """Mark a job as one that is to be deleted, together with other commands on the registry."""
        text = json.dumps(asdict(mark))
        await self._store.transaction(("HSETNX", MARKS, job_id, text), *commands)

    async def mark_of(self, job_id: str) -> Mark | None:
        """The mark of a job that is to be deleted."""
        text: bytes | None = await self._store.command("HGET", MARKS, job_id)
        return None if text is None else _MARK.validate_json(text)

    async def marked(self) -> list[str]:
        """Jobs that are to be deleted."""
        names: list[bytes] = await self._store.command("HKEYS", MARKS)
        return [name.decode() for name in names]

    async def check_kept(self, job_id: str) -> None:
        """Raise `UnavailableError` if the job was abandoned, and is not deleted yet."""
        mark = await self.mark_of(job_id)
        if mark is not None and not mark.submitted:
            raise UnavailableError(
                f"what an attempt has left of job {job_id} is being deleted; repeat the request"
            )

    async def without_record(self) -> list[str]:
        """Live ids that have none."""
        found: list[bytes] = await self._store.command("ZRANGE", LIVE, 0, -1)
        job_ids = [name.decode() for name in found]
        names = await self._fields(job_ids, "name")
        return [job_id for job_id, (name,) in zip(job_ids, names, strict=True) if name is None]

    async def submitted_by(self, tenant: str, request_id: str) -> str:
        """The id of the job that a request has submitted; empty: none.

        Raises:
            DeletedError: it was deleted.
        """
        found: bytes | None = await self._store.command("HGET", REQUESTS, f"{tenant}/{request_id}")
        if found == b"":
            raise DeletedError(f"the job of request_id {request_id!r} was deleted; use another one")
        return (found or b"").decode()

    async def bury(self, job_id: str) -> None:
        """From now on the request that has submitted the job is answered with `DeletedError`."""
        names, now = await self._requests_of(job_id), int(await self._store.now())
        if names:
            commands = [("HSET", REQUESTS, name, "") for name in names]
            await self._store.transaction(
                *commands, *(("ZADD", DELETED_REQUESTS, now, name) for name in names)
            )

    async def forget_requests(self) -> None:
        """Forget requests whose jobs were deleted long ago; call it every second or so."""
        before = int(await self._store.now()) - _DELETED_REQUESTS_S
        old: list[bytes] = await self._store.command(
            *("ZRANGEBYSCORE", DELETED_REQUESTS, "-inf", before, "LIMIT", 0, _CHUNK)
        )
        if old:
            names = [name.decode() for name in old]
            await self._store.transaction(
                ("HDEL", REQUESTS, *names), ("ZREM", DELETED_REQUESTS, *names)
            )

    async def remove(self, job_id: str, *commands: tuple[str | int, ...]) -> None:
        """Remove a job from all lists, together with other commands on keys of the registry."""
        tenant: bytes | None = await self._store.command("HGET", TENANTS, job_id)
        requests = await self._requests_of(job_id)
        gone: list[tuple[str | int, ...]] = [
            ("ZREM", each, job_id) for each in (INDEX, LIVE, EXPIRIES)
        ]
        gone += [("HDEL", REQUESTS, name) for name in requests]
        if tenant is not None:
            gone.append(("HDEL", TENANTS, job_id))
        await self._store.transaction(*gone, *commands)

    async def _requests_of(self, job_id: str) -> list[str]:
        """Idempotency keys that name a job; there is one, which only this hash knows."""
        cursor, found = 0, list[str]()
        while True:
            cursor, flat = await self._store.command("HSCAN", REQUESTS, cursor, "COUNT", 1000)
            found += [name.decode() for name, value in pairs(flat) if value.decode() == job_id]
            if not int(cursor):
                return found

    async def _uploads(self, job_id: str, noted: Sequence[str | None]) -> set[str]:
        """What a record names, or else the spec: older records do not name all."""
        found = {each for each in noted if each}
        if None not in noted:
            return found
        tenant: bytes = await self._store.command("HGET", TENANTS, job_id) or b""
        text = await self._store.command("GET", job_key(tenant.decode(), job_id, "spec"))
        spec = json.loads(text or "{}")
        found |= {str((spec.get(name) or {}).get("digest", "")) for name in _UPLOADS}
        return found - {""}

    async def _all(self) -> AsyncIterator[list[str]]:
        start = 0
        while found := await self._store.command("ZRANGE", INDEX, start, start + _CHUNK - 1):
            yield [job_id.decode() for job_id in found]
            start += _CHUNK

    async def _fields(self, job_ids: Sequence[str], *names: str) -> list[list[str | None]]:
        """Fields of several records, in order; None where there is none."""
        if not job_ids:
            return []
        tenants = await self._store.command("HMGET", TENANTS, *job_ids)
        with self._store.waiting():
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for job_id, tenant in zip(job_ids, tenants, strict=True):
                    pipe.hmget(job_key((tenant or b"").decode(), job_id, "record"), list(names))
                records: list[list[bytes | None]] = await pipe.execute()
        return [[None if v is None else v.decode() for v in values] for values in records]
