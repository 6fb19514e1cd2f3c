"""Job records: created once, listed in pages, moved along `JOB_TRANSITIONS`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config.limits import LimitSettings
from paceline.enums import JOB_TRANSITIONS, JobState
from paceline.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    StateError,
)
from paceline.platform.text import clipped
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline.types import Job, TrackerStatus
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.record import (
    TRACKING,
    Value,
    decoded,
    new_fields,
    readable_job,
    size_of,
    with_unlisted,
)
from paceline_experience.jobs.registration import JobRequest, Registration, quota_error
from paceline_experience.jobs.registry import INDEX, LIVE, TENANTS, Registry
from paceline_experience.store.keys import JobKeys, job_key
from paceline_experience.store.store import Store

_CHUNK = 200
_PAGE_TOKEN = re.compile(r"[0-9]{1,19}")
_KEY_BYTES = 32
_MAX_EPOCH = 1 << 52  # Lua represents it exactly
_ALREADY = {
    JobState.SUCCEEDED: "has already succeeded",
    JobState.FAILED: "has already failed",
    JobState.CANCELLED: "is already cancelled",
}


@dataclass(frozen=True, slots=True)
class JobListPage:
    """A page of jobs, newest first; `token` is that of the next page, empty at the end."""

    jobs: list[Job]
    token: str


class JobStore:
    """The records of all jobs in Redis."""

    def __init__(
        self,
        store: Store,
        *,
        new_suffix: Callable[[], str] = lambda: secrets.token_hex(3),
        new_secret: Callable[[], bytes] = lambda: secrets.token_bytes(_KEY_BYTES),
        limits: LimitSettings | None = None,
        new_epoch: Callable[[], int] = lambda: 1 + secrets.randbelow(_MAX_EPOCH),
        allowed: AllowedTargets = NO_TARGETS,  # functions of modules that any job may name
    ) -> None:
        self._store = store
        self._new_secret = new_secret
        self._limits = limits or LimitSettings()
        self._new_epoch = new_epoch
        self._allowed = allowed
        self.registry = Registry(store)
        self.registration = Registration(store, registry=self.registry, new_suffix=new_suffix)
        self._tenants: dict[str, str] = {}  # immutable once registered
        self._credential_secrets: dict[str, bytes] = {}  # likewise

    async def create(
        self,
        job: JobParts,
        *,
        artifacts: Mapping[str, str],
        request_id: str = "",
        max_live: int | None = None,
        prepared: Mapping[str, Value] | None = None,
    ) -> Job:
        """Create a job, or return the one that the same request created before.

        A tenant may have `max_live` jobs that are not over. `prepared`: further fields of its
        record, as `Registration.prepare` has returned them.

        Raises:
            ConflictError: the request has created a job from another spec.
            QuotaError: the tenant has as many jobs as it may.
            UnavailableError: what an earlier attempt has left is still being deleted.
            UnlistedError: it names a function of an installed module that is not allowed.
        """
        fields = new_fields(job, self._allowed)
        request = JobRequest(job.name, job.tenant, request_id, max_live)
        job_id = await self.registration.register(request)
        async with self.registration.writing(job_id):
            fields["artifacts"] = json.dumps(dict(artifacts))
            fields["created"] = repr(await self._store.now())
            return await self._write(job_id, request, job.text, {**fields, **(prepared or {})})

    async def _write(
        self, job_id: str, request: JobRequest, text: str, fields: Mapping[str, Value]
    ) -> Job:
        flat = [part for item in fields.items() for part in item]
        keys = [self._key(request.tenant, job_id), self._key(request.tenant, job_id, "spec")]
        # After a crash between registration and this, the caller's retry completes the job.
        written = await self._store.run("job_write", keys, text, *flat)
        if written:
            await self._list(job_id)
        job = await self.get(job_id)
        if job.spec != text:
            raise ConflictError(
                f"request_id {request.request_id!r} has made job {job_id!r} from another spec; "
                "use a new request_id"
            )
        return job

    async def find(self, tenant: str, request_id: str) -> Job | None:
        """The job that a request has created before; raises `DeletedError` if it was deleted."""
        if not request_id:
            return None
        found = await self.registry.submitted_by(tenant, request_id)
        try:
            return await self.get(found) if found else None
        except NotFoundError:
            return None  # a crash came before the record was written

    async def get(self, job_id: str) -> Job:
        """One job.

        Raises:
            NotFoundError: no job has this id.
        """
        (fields,), now = await self._fields([job_id])
        if not fields:
            raise unknown_job(job_id)
        job = readable_job(job_id, self._tenants.get(job_id, ""), fields, now)
        key = self._key(job.status.tenant, job_id, "spec")
        spec: bytes | None = await self._store.command("GET", key)
        if spec is None:  # a job submitted to 0.1.0
            key = self._key(job.status.tenant, job_id)
            spec = await self._store.command("HGET", key, "spec")
            if spec is None and not await self._store.command("EXISTS", key):
                raise unknown_job(job_id)  # deleted meanwhile
        job = replace(job, spec=(spec or b"").decode("utf-8", "replace"))
        return with_unlisted(job, fields, self._allowed)

    async def tenant_of(self, job_id: str) -> str:
        """The tenant of a job.

        Raises:
            NotFoundError: no job has this id.
        """
        await self._load_tenants([job_id])
        if job_id not in self._tenants:
            raise unknown_job(job_id)
        return self._tenants[job_id]

    async def list_page(
        self,
        *,
        tenant: str = "",
        states: Sequence[JobState] = (),
        page_size: int = 100,
        page_token: str = "",
    ) -> JobListPage:
        """Jobs of a tenant in some states, newest first, without specs.

        A page ends early with the job that takes it over `limits.page_bytes`.
        """
        wanted = set(states)
        only_live = bool(wanted) and not any(state.terminal for state in wanted)
        found: list[Job] = []
        num_bytes = 0
        last = _position(page_token)
        while True:
            chunk = await self._chunk(LIVE if only_live else INDEX, last)
            jobs = await self._read_of(tenant, [job_id for job_id, _ in chunk])
            for job_id, number in chunk:
                last = str(number)
                job = jobs.get(job_id)
                if job is None:
                    continue
                if only_live and job.status.state.terminal:
                    await self.registry.note_end(job.status)
                elif not wanted or job.status.state in wanted:
                    found.append(job)
                    num_bytes += size_of(job)
                if len(found) >= page_size or num_bytes >= self._limits.page_bytes:
                    return JobListPage(found, last)
            if len(chunk) < _CHUNK:
                return JobListPage(found, "")

    async def live(self) -> list[Job]:
        """All live jobs, without specs."""
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
        """Id, tenant and state of all live jobs, oldest first."""
        found: list[bytes] = await self._store.command("ZRANGE", LIVE, 0, -1)
        job_ids = [name.decode() for name in found]
        states = await self._field(job_ids, "state")
        known = frozenset[str](JobState)
        valid = [(n, JobState(s)) for n, s in zip(job_ids, states, strict=True) if s in known]
        return [(n, self._tenants[n], state) for n, state in valid if not state.terminal]

    async def reasons(self, job_ids: Sequence[str]) -> list[str]:
        """The reasons of jobs' states, in order; empty where none was given."""
        return await self._field(job_ids, "reason") if job_ids else []

    async def check_quota(self, tenant: str, max_live: int | None) -> None:
        """Raise `QuotaError` if a tenant has `max_live` or more live jobs."""
        if max_live is not None:
            used = sum(owner == tenant for _, owner, _ in await self.states())
            if used >= max_live:
                raise quota_error(tenant, used, max_live)

    async def leased(self, tenant: str, job_id: str) -> int:
        """Leased episodes of a job, according to Redis."""
        key = JobKeys(tenant, job_id).counts
        found = await self._store.command("HMGET", key, "leased", "eval:leased")
        return sum(int(number or 0) for number in found)

    def forget(self, job_id: str) -> None:
        """The job is about to be deleted: ask the store whether there is one of this id."""
        self._tenants.pop(job_id, None)
        self._credential_secrets.pop(job_id, None)

    async def repair(self) -> list[str]:
        """Unlist jobs that are over; call it before jobs can be submitted.

        Returns ids that a crash has left without a record, which stay listed until they are
        abandoned.
        """
        found: list[bytes] = await self._store.command("ZRANGE", LIVE, 0, -1)
        job_ids = [name.decode() for name in found]
        jobs = await self._read(job_ids)
        for job in jobs:
            if job is not None and job.status.state.terminal:
                await self.registry.note_end(job.status)
        return [job_id for job_id, job in zip(job_ids, jobs, strict=True) if job is None]

    async def transition(
        self,
        job_id: str,
        to: JobState,
        *,
        reason: str = "",
        origin: JobState | None = None,
        **fields: Value,
    ) -> Job:
        """Move a job to another state; in that state already, only its reason can change.

        `origin`: the only state it may be moved from; None: any.

        Raises:
            TransitionError: `JOB_TRANSITIONS` does not allow it, or it is not in `origin`.
        """
        key = await self._record(job_id)
        allowed = [state for state, after in JOB_TRANSITIONS.items() if to in after]
        origins = "".join(f"{state}," for state in allowed if origin in (None, state))
        once = "ended" if to.terminal else "running" if to is JobState.RUNNING else ""
        changes: dict[str, Value] = {"reason": clipped(reason, self._limits.reason_bytes), **fields}
        flat = [part for item in changes.items() for part in item]
        now = repr(await self._store.now())
        await self._store.run("job_transition", [key], job_id, to, origins, once, now, *flat)
        job = await self.get(job_id)
        if to.terminal:
            await self.registry.note_end(job.status)
        return job

    async def cancel(self, job_id: str, *, reason: str = "") -> Job:
        """Start to cancel a job.

        Raises:
            StateError: it has ended already.
        """
        job = await self.get(job_id)
        if job.status.state is JobState.CANCELLING:
            return job
        if job.status.state.terminal:
            raise StateError(f"job {job_id} {_ALREADY[job.status.state]}")
        return await self.transition(job_id, JobState.CANCELLING, reason=reason)

    async def note(self, job_id: str, **fields: Value) -> None:
        """Set fields of a record: step, version, incarnation, eval_reward, eval_step, ..."""
        flat = [part for item in fields.items() for part in item]
        await self._store.command("HSET", await self._record(job_id), *flat)

    async def note_tracker(self, job_id: str, tracker: TrackerStatus) -> None:
        """Set the status of a tracker."""
        limit = self._limits.reason_bytes
        short = replace(tracker, detail=clipped(tracker.detail, limit), url=tracker.url[:limit])
        await self.note(job_id, **{TRACKING + tracker.name: json.dumps(asdict(short))})

    async def noted(self, job_id: str, *names: str) -> list[str]:
        """Fields of a record; empty where none was set."""
        found = await self._store.command("HMGET", await self._record(job_id), *names)
        return [value.decode() if value is not None else "" for value in found]

    async def weights_key(self, job_id: str) -> bytes:
        """The 32-byte key that authenticates the job's weights; created on first use.

        It is not part of `Job`: only the job's trainers and rollout workers get it.
        """
        return await self._secret(job_id, "weights_key")

    async def credential_secret(self, job_id: str) -> bytes:
        """The 32-byte key of the credentials of the job's workers; created on first use.

        It never leaves this process. Read once: every call of a worker is checked with it.

        Raises:
            NotFoundError: no job has this id.
        """
        found = self._credential_secrets.get(job_id)
        if found is None:
            found = await self._secret(job_id, "credential_secret")
            self._credential_secrets[job_id] = found
        return found

    async def _secret(self, job_id: str, name: str) -> bytes:
        key = await self._record(job_id)
        await self._store.command("HSETNX", key, name, self._new_secret().hex())
        return bytes.fromhex((await self._store.command("HGET", key, name)).decode())

    async def claim(self, job: Job, owner: str, *, lease_s: float, epoch: int = 0) -> int:
        """Take ownership (epoch 0) or renew it; returns the epoch, or 0 if another replica owns it.

        Epochs are random, so that a store that has lost the last one does not repeat it.
        """
        tenant, job_id = job.status.tenant, job.status.job_id
        keys = [job_key(tenant, job_id, name) for name in ("owner", "epoch")]
        arguments = (owner, int(lease_s * 1000), epoch, self._new_epoch())
        return int(await self._store.run("job_claim", keys, *arguments))

    async def epoch(self, job: Job) -> int:
        """The epoch of the job's last owner; 0: it had none."""
        key = job_key(job.status.tenant, job.status.job_id, "epoch")
        return int(await self._store.command("GET", key) or 0)

    async def _read(self, job_ids: Sequence[str]) -> list[Job | None]:
        """Records in order, without specs; None where there is none."""
        records, now = await self._fields(job_ids)
        found = zip(job_ids, records, strict=True)
        return [
            readable_job(job_id, self._tenants.get(job_id, ""), each, now) if each else None
            for job_id, each in found
        ]

    async def _fields(self, job_ids: Sequence[str]) -> tuple[list[dict[str, str]], float]:
        """Records in order, empty where there is none, and the store's time."""
        await self._load_tenants(job_ids)
        now = await self._store.now()
        with self._store.waiting():
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hgetall(self._key(self._tenants.get(job_id, ""), job_id))
                found = await pipe.execute()
        return [decoded(each) for each in found], now

    async def _read_of(self, tenant: str, job_ids: Sequence[str]) -> dict[str, Job | None]:
        """Records of those jobs that belong to a tenant (empty: all); reads no others."""
        await self._load_tenants(job_ids)
        if tenant:
            job_ids = [job_id for job_id in job_ids if self._tenants.get(job_id) == tenant]
        return dict(zip(job_ids, await self._read(job_ids), strict=True)) if job_ids else {}

    async def _field(self, job_ids: Sequence[str], name: str) -> list[str]:
        """One field of several records, in order; empty where there is none."""
        await self._load_tenants(job_ids)
        with self._store.waiting():
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hget(self._key(self._tenants.get(job_id, ""), job_id), name)
                found: list[bytes | None] = await pipe.execute()
        return [value.decode() if value else "" for value in found]

    async def _load_tenants(self, job_ids: Sequence[str]) -> None:
        unknown = [job_id for job_id in job_ids if job_id not in self._tenants]
        if unknown:
            found = await self._store.command("HMGET", TENANTS, *unknown)
            pairs = zip(unknown, found, strict=True)
            self._tenants.update((job_id, name.decode()) for job_id, name in pairs if name)

    async def _chunk(self, index: str, before: str) -> list[tuple[str, int]]:
        max_score = f"({before}" if before else "+inf"
        with self._store.waiting():
            flat: Any = await self._store.redis.zrange(
                index,
                max_score,
                "-inf",
                desc=True,
                byscore=True,
                offset=0,
                num=_CHUNK,
                withscores=True,
            )
        return [(name.decode(), int(score)) for name, score in flat]

    async def _record(self, job_id: str) -> str:
        return self._key(await self.tenant_of(job_id), job_id)

    async def _list(self, job_id: str) -> None:
        """Add to the live jobs, from which `repair` may have removed it."""
        number = await self._store.command("ZSCORE", INDEX, job_id)
        await self._store.command("ZADD", LIVE, "NX", number, job_id)

    @staticmethod
    def _key(tenant: str, job_id: str, name: str = "record") -> str:
        return job_key(tenant, job_id, name)


def unknown_job(job_id: str) -> NotFoundError:
    """There is no such job, or the caller may not see it: the error does not say which."""
    return NotFoundError(f"job {job_id!r} is not known")


def _position(token: str) -> str:
    if token and not _PAGE_TOKEN.fullmatch(token):
        raise InvalidError(f"page_token: {token!r} was not given by this service")
    return token
