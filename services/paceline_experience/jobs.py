"""Job records: created once, listed by pages, moved along the table of job states."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config import JobSpec
from paceline.config.limits import LimitSettings
from paceline.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    QuotaError,
    StateError,
)
from paceline.text import clipped
from paceline.types import JOB_STEPS, Job, JobState, JobStatus, TrackerStatus
from paceline_experience.keys import JobKeys
from paceline_experience.store import Store, job_key

Value = str | int | float
_TENANTS, _REQUESTS, _INDEX, _LIVE, _SEQUENCE = (
    f"{{registry}}:{name}" for name in ("tenants", "requests", "jobs", "live", "sequence")
)
_CHUNK = 200
_PLACE = re.compile(r"[0-9]{1,19}")
_KEY_BYTES = 32
_MAX_EPOCH = 1 << 52  # a number of Lua holds it exactly
_TRACKING = "tracking:"
_ALREADY = {
    JobState.SUCCEEDED: "has already succeeded",
    JobState.FAILED: "has already failed",
    JobState.CANCELLED: "is already cancelled",
}


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs, newest first; `token` asks for the next page, empty at the end."""

    jobs: list[Job]
    token: str


class JobStore:
    """The records of all jobs in Redis."""

    def __init__(
        self,
        store: Store,
        *,
        suffix: Callable[[], str] = lambda: secrets.token_hex(3),
        secret: Callable[[], bytes] = lambda: secrets.token_bytes(_KEY_BYTES),
        limits: LimitSettings | None = None,
        fresh_epoch: Callable[[], int] = lambda: 1 + secrets.randbelow(_MAX_EPOCH),
    ) -> None:
        self._store = store
        self._suffix = suffix
        self._secret = secret
        self._limits = limits or LimitSettings()
        self._fresh_epoch = fresh_epoch
        self._tenants: dict[str, str] = {}  # immutable once registered

    async def create(
        self,
        spec: JobSpec,
        *,
        artefacts: Mapping[str, str],
        request_id: str = "",
        most: int | None = None,
    ) -> Job:
        """A new job, or the one that this request made before; `most` live ones of its tenant.

        Raises:
            ConflictError: the request made a job with another spec.
            QuotaError: the tenant has as many jobs as it may.
        """
        job_id = await self._register(spec, request_id, most)
        text = spec.model_dump_json()
        fields: dict[str, Value] = {
            "name": spec.name,
            "tenant": spec.tenant,
            "artefacts": json.dumps(dict(artefacts)),
            "state": JobState.QUEUED,
            "created": repr(await self._store.now()),
        }
        for tracker in spec.tracking:
            waits = TrackerStatus(tracker.label, tracker.kind, "waiting")
            fields[_TRACKING + tracker.label] = json.dumps(asdict(waits))
        flat = [part for item in fields.items() for part in item]
        keys = [self._key(spec.tenant, job_id), self._key(spec.tenant, job_id, "spec")]
        # A crash between registration and this is mended by the caller's retry.
        wrote = await self._store.run("job_write", keys, text, *flat)
        if wrote:
            await self._list(job_id)
        job = await self.get(job_id)
        if job.spec != text:
            raise ConflictError(
                f"request_id {request_id!r} has made job {job_id!r} from another spec; "
                "use a new request_id"
            )
        return job

    async def find(self, tenant: str, request_id: str) -> Job | None:
        """The job that a request made before."""
        if not request_id:
            return None
        found = await self._store.command("HGET", _REQUESTS, f"{tenant}/{request_id}")
        try:
            return await self.get(found.decode()) if found else None
        except NotFoundError:
            return None  # it died before the record was written

    async def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            NotFoundError: no job has this id.
        """
        (job,) = await self._read([job_id])
        if job is None:
            raise unknown_job(job_id)
        key = self._key(job.status.tenant, job_id, "spec")
        spec: bytes | None = await self._store.command("GET", key)
        if spec is None:  # of a job that 0.1.0 has accepted
            spec = await self._store.command("HGET", self._key(job.status.tenant, job_id), "spec")
        return replace(job, spec=(spec or b"").decode("utf-8", "replace"))

    async def tenant_of(self, job_id: str) -> str:
        """Whose job it is.

        Raises:
            NotFoundError: no job has this id.
        """
        await self._learn([job_id])
        if job_id not in self._tenants:
            raise unknown_job(job_id)
        return self._tenants[job_id]

    async def list_page(
        self,
        *,
        tenant: str = "",
        states: Sequence[str] = (),
        page_size: int = 0,
        page_token: str = "",
    ) -> Page:
        """Jobs of a tenant in some states, newest first, without specs.

        A page ends early with the job that makes it larger than `limits.page_bytes`.
        """
        wanted = {_state(name) for name in states}
        size = max(1, min(page_size or 100, 1000))
        only_live = bool(wanted) and not any(state.terminal for state in wanted)
        found: list[Job] = []
        num_bytes = 0
        last = _position(page_token)
        while True:
            chunk = await self._chunk(_LIVE if only_live else _INDEX, last)
            jobs = await self._read_of(tenant, [job_id for job_id, _ in chunk])
            for job_id, number in chunk:
                last = str(number)
                job = jobs.get(job_id)
                if job is None:
                    continue
                if only_live and job.status.state.terminal:
                    await self._unlist(job_id)
                elif not wanted or job.status.state in wanted:
                    found.append(job)
                    num_bytes += _size(job)
                if len(found) == size or num_bytes >= self._limits.page_bytes:
                    return Page(found, last)
            if len(chunk) < _CHUNK:
                return Page(found, "")

    async def live(self) -> list[Job]:
        """All jobs that are not over, without specs."""
        states = [state for state in JobState if not state.terminal]
        jobs: list[Job] = []
        token = ""
        while True:
            page = await self.list_page(states=states, page_size=1000, page_token=token)
            jobs += page.jobs
            token = page.token
            if not token:
                return jobs

    async def states(self) -> list[tuple[str, str, JobState]]:
        """Id, tenant and state of all jobs that are not over, the oldest first."""
        found: list[bytes] = await self._store.command("ZRANGE", _LIVE, 0, -1)
        job_ids = [name.decode() for name in found]
        states = await self._field(job_ids, "state")
        known = frozenset[str](JobState)
        told = [(n, JobState(s)) for n, s in zip(job_ids, states, strict=True) if s in known]
        return [(n, self._tenants[n], state) for n, state in told if not state.terminal]

    async def reasons(self, job_ids: Sequence[str]) -> list[str]:
        """Why jobs are in the states that they are in, in order; empty where nothing was said."""
        return await self._field(job_ids, "reason") if job_ids else []

    async def check_room(self, tenant: str, most: int | None) -> None:
        """Raise `QuotaError` if a tenant has as many jobs that are not over as it may."""
        if most is not None:
            used = sum(owner == tenant for _, owner, _ in await self.states())
            if used >= most:
                raise _full(tenant, used, most)

    async def leased(self, tenant: str, job_id: str) -> int:
        """Episodes that a job has out on lease, as Redis holds it."""
        key = JobKeys(tenant, job_id).counts
        found = await self._store.command("HMGET", key, "leased", "eval:leased")
        return sum(int(number or 0) for number in found)

    async def mend(self) -> None:
        """Unlist what a crash left without a record, for no job can be submitted meanwhile."""
        found: list[bytes] = await self._store.command("ZRANGE", _LIVE, 0, -1)
        job_ids = [name.decode() for name in found]
        for job_id, job in zip(job_ids, await self._read(job_ids), strict=True):
            if job is None or job.status.state.terminal:
                await self._unlist(job_id)

    async def step(self, job_id: str, to: JobState, *, reason: str = "", **fields: Value) -> Job:
        """Move a job; nothing happens if it is in that state already.

        Raises:
            TransitionError: the table of job states does not allow it.
        """
        key = await self._record(job_id)
        origins = "".join(f"{state}," for state, after in JOB_STEPS.items() if to in after)
        once = "ended" if to.terminal else "running" if to is JobState.RUNNING else ""
        told = clipped(reason, self._limits.reason_bytes)
        changes: dict[str, Value] = {"reason": told, **fields}
        flat = [part for item in changes.items() for part in item]
        now = repr(await self._store.now())
        await self._store.run("job_step", [key], job_id, to, origins, once, now, *flat)
        if to.terminal:
            await self._unlist(job_id)
        return await self.get(job_id)

    async def cancel(self, job_id: str, *, reason: str = "") -> Job:
        """Ask a job to end.

        Raises:
            StateError: it has ended already.
        """
        job = await self.get(job_id)
        if job.status.state is JobState.CANCELLING:
            return job
        if job.status.state.terminal:
            raise StateError(f"job {job_id} {_ALREADY[job.status.state]}")
        return await self.step(job_id, JobState.CANCELLING, reason=reason)

    async def note(self, job_id: str, **fields: Value) -> None:
        """Set fields of a record: step, version, incarnation, eval_reward, eval_step, ..."""
        flat = [part for item in fields.items() for part in item]
        await self._store.command("HSET", await self._record(job_id), *flat)

    async def note_tracker(self, job_id: str, tracker: TrackerStatus) -> None:
        """Set how far a tracker has come."""
        most = self._limits.reason_bytes
        short = replace(tracker, detail=clipped(tracker.detail, most), url=tracker.url[:most])
        await self.note(job_id, **{_TRACKING + tracker.name: json.dumps(asdict(short))})

    async def noted(self, job_id: str, *names: str) -> list[str]:
        """Fields of a record; empty where nothing was noted."""
        found = await self._store.command("HMGET", await self._record(job_id), *names)
        return [value.decode() if value is not None else "" for value in found]

    async def weights_key(self, job_id: str) -> bytes:
        """What seals the job's weights, 32 bytes; made when it is first asked for, then the same.

        It is part of no `Job`: only trainers and rollout workers of the job are told.
        """
        record = await self._record(job_id)
        await self._store.command("HSETNX", record, "weights_key", self._secret().hex())
        return bytes.fromhex((await self._store.command("HGET", record, "weights_key")).decode())

    async def claim(self, job: Job, owner: str, *, lease_s: float, epoch: int = 0) -> int:
        """Take the job (epoch 0) or renew; the epoch, or 0 if another owner has it.

        An epoch is a random number: a store that forgets the last one makes no second of it.
        """
        tenant, job_id = job.status.tenant, job.status.job_id
        keys = [job_key(tenant, job_id, name) for name in ("owner", "epoch")]
        arguments = (owner, int(lease_s * 1000), epoch, self._fresh_epoch())
        return int(await self._store.run("job_claim", keys, *arguments))

    async def epoch(self, job: Job) -> int:
        """Of the job's last owner; 0: it had none."""
        key = job_key(job.status.tenant, job.status.job_id, "epoch")
        return int(await self._store.command("GET", key) or 0)

    async def _register(self, spec: JobSpec, request_id: str, most: int | None) -> str:
        keys = [_TENANTS, _REQUESTS, _INDEX, _LIVE, _SEQUENCE]
        limit = -1 if most is None else most
        while True:
            wanted = f"{spec.name}-{self._suffix()}"
            arguments = (wanted, spec.tenant, request_id, limit)
            reply = await self._store.run("job_register", keys, *arguments)
            if isinstance(reply, int):
                raise _full(spec.tenant, reply, limit)
            if reply:
                return reply.decode()

    async def _read(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Records in order, without specs; None where there is none."""
        await self._learn(job_ids)
        now = await self._store.now()
        with self._store.asked():
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hgetall(self._key(self._tenants.get(job_id, ""), job_id))
                found = await pipe.execute()
        records = zip(job_ids, map(_decode, found), strict=True)
        return [
            self._readable(job_id, fields, now) if fields else None for job_id, fields in records
        ]

    def _readable(self, job_id: str, fields: Mapping[str, str], now: float) -> Job:
        """A record of which nothing can be made is that of a job that has failed."""
        try:
            return _job(job_id, fields, now)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"its record cannot be read: {type(error).__name__}: {error}"
            status = JobStatus(
                job_id=job_id,
                name=job_id,
                tenant=self._tenants.get(job_id, ""),
                state=JobState.FAILED,
                reason=reason,
            )
            return Job(status=status, spec="", artefacts={})

    async def _read_of(self, tenant: str, job_ids: Sequence[str]) -> dict[str, Job | None]:
        """Records of a tenant's jobs (empty: of all); whose a job is costs no record of it."""
        await self._learn(job_ids)
        if tenant:
            job_ids = [job_id for job_id in job_ids if self._tenants.get(job_id) == tenant]
        return dict(zip(job_ids, await self._read(job_ids), strict=True)) if job_ids else {}

    async def _field(self, job_ids: Sequence[str], name: str) -> list[str]:
        """One field of several records, in order; empty where there is none."""
        await self._learn(job_ids)
        with self._store.asked():
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hget(self._key(self._tenants.get(job_id, ""), job_id), name)
                found: list[bytes | None] = await pipe.execute()
        return [value.decode() if value else "" for value in found]

    async def _learn(self, job_ids: Sequence[str]) -> None:
        unknown = [job_id for job_id in job_ids if job_id not in self._tenants]
        if unknown:
            found = await self._store.command("HMGET", _TENANTS, *unknown)
            pairs = zip(unknown, found, strict=True)
            self._tenants.update((job_id, name.decode()) for job_id, name in pairs if name)

    async def _chunk(self, index: str, before: str) -> list[tuple[str, int]]:
        most = f"({before}" if before else "+inf"
        with self._store.asked():
            flat: Any = await self._store.redis.zrange(
                index, most, "-inf", desc=True, byscore=True, offset=0, num=_CHUNK, withscores=True
            )
        return [(name.decode(), int(score)) for name, score in flat]

    async def _record(self, job_id: str) -> str:
        return self._key(await self.tenant_of(job_id), job_id)

    async def _list(self, job_id: str) -> None:
        """Among the live ones, which `mend` may have taken it from."""
        number = await self._store.command("ZSCORE", _INDEX, job_id)
        await self._store.command("ZADD", _LIVE, "NX", number, job_id)

    async def _unlist(self, job_id: str) -> None:
        await self._store.command("ZREM", _LIVE, job_id)

    @staticmethod
    def _key(tenant: str, job_id: str, name: str = "record") -> str:
        return job_key(tenant, job_id, name)


def _full(tenant: str, used: int, most: int) -> QuotaError:
    return QuotaError(
        f"quota submitted: tenant {tenant!r} has {used} jobs that are not over, of {most} allowed; "
        "wait for one to end, cancel one, or ask an admin of the installation for more "
        f"(`paceline tenants set {tenant} --submitted N`)"
    )


def unknown_job(job_id: str) -> NotFoundError:
    """No job has this id, or none that the caller may see: nobody can tell which."""
    return NotFoundError(f"job {job_id!r} is not known")


def _decode(found: Any) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in found.items()}


def _job(job_id: str, fields: Mapping[str, str], now: float) -> Job:
    end = float(fields.get("ended", now))
    reward, step = fields.get("eval_reward", ""), fields.get("eval_step", "")
    status = JobStatus(
        job_id=job_id,
        name=fields["name"],
        tenant=fields["tenant"],
        state=JobState(fields["state"]),
        reason=fields.get("reason", ""),
        step=int(fields.get("step", 0)),
        version=int(fields.get("version", -1)),
        incarnation=int(fields.get("incarnation", 0)),
        eval_reward=float(reward) if reward else None,
        eval_step=int(step) if step else None,
        summary=json.loads(fields.get("summary", "{}")),
        tracking=_trackers(fields),
        created_s=max(0.0, now - float(fields["created"])),
        running_s=max(0.0, end - float(fields["running"])) if "running" in fields else 0.0,
    )
    return Job(status=status, spec="", artefacts=json.loads(fields["artefacts"]))


def _size(job: Job) -> int:
    """Bytes of a job in a list, about."""
    status = job.status
    trackers = sum(len(each.detail) + len(each.url) + 64 for each in status.tracking)
    return 1024 + len(status.reason) + len(str(status.summary)) + trackers


def _trackers(fields: Mapping[str, str]) -> tuple[TrackerStatus, ...]:
    told = sorted(name for name in fields if name.startswith(_TRACKING))
    return tuple(TrackerStatus(**json.loads(fields[name])) for name in told)


def _state(name: str) -> JobState:
    try:
        return JobState(name)
    except ValueError:
        known = ", ".join(JobState)
        raise InvalidError(f"states: {name!r} is no job state; allowed: {known}") from None


def _position(token: str) -> str:
    if token and not _PLACE.fullmatch(token):
        raise InvalidError(f"page_token: {token!r} was not given by this service")
    return token
