"""Jobs are paused, resumed, forked, cancelled and deleted in every state while services die.

Each comes to an end, and when it is deleted nothing of it is left in store, run directory or
cluster. Waits only bound hangs. `HISTORIES_SEED` chooses other histories, `AGAIN` repeats each.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from paceline.enums import JobState, WorkerKind
from paceline.errors import NotFoundError, PacelineError
from paceline.platform import wire
from paceline.v1 import jobs_pb2 as pb
from paceline_controller.runtimes.kubernetes.resources import TRAINING_JOBS, Object
from paceline_harness.lifecycle.histories import KILLS, LATE, History, Step, histories
from paceline_harness.lifecycle.installation import retried
from paceline_harness.lifecycle.late import LateRequest
from paceline_harness.lifecycle.workers import LATE_STEP
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from conftest import Installations, Place

HANG_S = PATIENCE_S
SEED = int(os.environ.get("HISTORIES_SEED", "0"))
HISTORIES = histories(SEED)
NAME = "probe-job"  # part of all names that belong to a job
_EARLY = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
_ENDING = frozenset({"cancel", "delete", "kubectl delete"})


@dataclass
class Run:
    """Makes a history happen."""

    place: Place
    history: History
    family: list[str] = field(default_factory=list[str])  # the job, and a fork of it
    ended: bool = False  # asked to be cancelled or deleted
    may_pause: bool = False  # asked to pause, and not resumed since
    stays_paused: bool = False  # seen as paused, and not asked for anything else since
    late: LateRequest | None = None
    events: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.installation = self.place.installation
        self.jobs = self.installation.jobs
        self.began_s = time.monotonic()

    def log(self, what: str) -> None:
        self.events.append(f"{time.monotonic() - self.began_s:7.3f} {what}")

    async def run(self) -> None:
        await self.begin()
        for step in self.history.steps:
            await self.reach(step.state)
            await self.take(step)
        self.installation.machine.let_jobs_end()
        for job_id in self.family:
            await self.check_end(job_id)
        for job_id in self.family:
            await self.delete(job_id)
        await self.check_nothing_left()

    def spec(self, **more: Any) -> dict[str, Any]:
        failure = {"metric": "train/loss", "above": 0.5, "end": "failed"}
        return {
            "model": {"path": str(self.place.model)},
            "tasks": {"environment": "arithmetic"},
            "eval": {"every": 2, "tasks": 1, "options": {"split": "heldout"}},
            "reward": [{"kind": "exact"}],
            "experience": {
                "batch_groups": 1,
                "group_size": 2,
                "max_staleness": 2,
                "lease_s": 3600,  # whoever waits for a lease to expire hangs
            },
            "stop": {"steps": LATE_STEP + 2, "when": [failure] if self.history.fails else []},
            **({"ttl_seconds_after_finished": 0} if self.history.ttl else {}),
            **more,
        }

    async def begin(self) -> None:
        if not self.history.of_object:
            await self.submit(self.spec(name=NAME))
            return
        body = {
            "apiVersion": TRAINING_JOBS.api_version,
            "kind": TRAINING_JOBS.kind,
            "metadata": {"name": NAME},
            "spec": self.spec(),
        }
        await self.installation.cluster.create(TRAINING_JOBS, body)

        async def submitted() -> bool:
            found = await self.object()
            job_id = ((found or {}).get("status") or {}).get("jobId")
            self.family += [job_id] if job_id else []
            return bool(job_id)

        await self.until(submitted, "the object has no job")

    async def submit(self, spec: dict[str, Any]) -> None:
        request = pb.SubmitJobRequest(spec_json=json.dumps(spec), request_id=uuid.uuid4().hex)
        job = await retried(lambda: call(self.jobs.SubmitJob, request))
        self.family.append(job.status.job_id)
        self.log(f"{job.status.job_id} is submitted")

    async def state_now(self, job_id: str) -> JobState | None:
        """As the store has it, which costs the services nothing; None: it is gone."""
        found: Any = await self.place.redis.hget(f"{{default/{job_id}}}:record", "state")
        return None if found is None else JobState(found.decode())

    async def state(self, job_id: str) -> JobState | None:
        """As users see it; None: it is gone."""
        request = pb.GetJobRequest(job_id=job_id)
        try:
            job = await retried(lambda: call(self.jobs.GetJob, request))
        except NotFoundError:
            return None
        return wire.member_of(JobState, job.status.state, "state")

    async def object(self) -> Object | None:
        if not self.history.of_object:
            return None
        try:
            return await self.installation.cluster.get(TRAINING_JOBS, NAME)
        except NotFoundError:
            return None

    async def until(
        self, condition: Callable[[], Awaitable[bool]], what: str, *, every_s: float = 0.03
    ) -> None:
        deadline = time.monotonic() + HANG_S
        while not await condition():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(every_s)

    async def reach(self, wanted: JobState) -> None:
        """Bring the job into a state, or past it."""
        asked = set[JobState]()
        if wanted in (JobState.SUCCEEDED, JobState.FAILED):
            self.installation.machine.let_jobs_end()

        async def reached() -> bool:
            state = await self.observe(self.family[0])
            if state in (None, wanted) or state.terminal or wanted is JobState.QUEUED:
                return True
            if (wanted, state) in _PASSED:
                return True
            pausing = wanted in (JobState.PAUSING, JobState.PAUSED)
            if pausing and state in _EARLY - asked:
                await self.ask("suspend" if self.history.of_object else "pause")
                asked.add(state)
                return False
            if not pausing and state is JobState.PAUSED:
                await self.ask("unsuspend" if self.history.of_object else "resume")
            return False

        await self.until(reached, f"{self.family[0]} is never {wanted}", every_s=0.004)

    async def observe(self, job_id: str) -> JobState | None:
        """Its state, after a check that it is paused and resumed only if somebody has asked.

        An object pauses and resumes its job by itself, as its `spec.suspend` says.
        """
        if self.late is not None and self.late.job_id == job_id:
            state = await self.state_now(job_id)
            if state is not None and self.late.is_stale(state):
                await self.deliver()
        state = await self.state_now(job_id)
        if state in (JobState.PAUSING, JobState.PAUSED):
            asked = self.may_pause and job_id == self.family[0]
            assert asked, "it pauses by itself"
        if not self.history.of_object and job_id == self.family[0]:
            assert state is JobState.PAUSED or not self.stays_paused, "it resumes by itself"
            self.stays_paused = state is JobState.PAUSED
        return state

    async def deliver(self) -> None:
        """Let a late request of a controller arrive, which knows less than its successor."""
        late, self.late = self.late, None
        if late is None:
            return
        before = await self.state_now(late.job_id)
        try:
            await self.installation.deliver(late)
        except PacelineError as error:
            self.log(f"{late.state} arrives late, and is refused: {error}")
            return
        self.log(f"{late.state} arrives late, when the job is {before}")
        assert late.state is not JobState.PAUSED or before not in _EARLY, "it pauses a resumed job"

    async def take(self, step: Step) -> None:
        state = await self.observe(self.family[0])
        self.log(f"{state} ({step.state}): {step.request or 'nothing'}, {step.kill} dies")
        async with asyncio.TaskGroup() as both:
            both.create_task(self.kill(step))
            await asyncio.sleep(max(0.0, -step.lag_s))
            if step.request:
                await self.ask(step.request)

    async def kill(self, step: Step) -> None:
        await asyncio.sleep(max(0.0, step.lag_s))
        if step.kill == LATE:
            self.late = await self.installation.replace_controller()
            self.log(f"controller was killed before {self.late} arrived")
        elif step.kill is not None:
            await self.installation.kill(WorkerKind(step.kill), self.family[0])
            self.log(f"{step.kill} was killed")

    async def ask(self, what: str, job_id: str = "") -> None:
        """Ask until it is answered; it may be refused."""
        job_id = job_id or self.family[0]
        self.ended = self.ended or what in _ENDING
        self.may_pause = self.may_pause or what in ("pause", "suspend")
        self.stays_paused = self.stays_paused and what in ("pause", "fork", "suspend", "unsuspend")
        try:
            if what in ("suspend", "unsuspend", "kubectl delete"):
                await self.ask_cluster(what)
            elif what == "fork":
                await self.fork(job_id)
            else:
                requests: dict[str, tuple[Any, Any]] = {
                    "pause": (self.jobs.PauseJob, pb.PauseJobRequest(job_id=job_id)),
                    "resume": (self.jobs.ResumeJob, pb.ResumeJobRequest(job_id=job_id)),
                    "cancel": (self.jobs.CancelJob, pb.CancelJobRequest(job_id=job_id)),
                    "delete": (self.jobs.DeleteJob, pb.DeleteJobRequest(job_id=job_id, force=True)),
                }
                method, request = requests[what]
                await retried(lambda: call(method, request))
            if what == "resume" and not self.history.of_object:
                self.may_pause = False
            self.log(f"{what} is accepted")
        except PacelineError as error:
            self.log(f"{what} is refused: {type(error).__name__}: {error}")

    async def fork(self, job_id: str) -> None:
        if len(self.family) > 1:
            return
        request = pb.GetJobRequest(job_id=job_id)
        parent = await retried(lambda: call(self.jobs.GetJob, request))
        spec = json.loads(parent.spec_json)
        await self.submit(spec | {"fork": {"job": job_id, "step": "latest"}})

    async def ask_cluster(self, what: str) -> None:
        if not self.history.of_object:
            return
        cluster = self.installation.cluster
        if what == "kubectl delete":
            await cluster.delete(TRAINING_JOBS, NAME)
        else:
            suspend = {"spec": {"suspend": what == "suspend"}}
            await cluster.patch(TRAINING_JOBS, NAME, suspend)

    async def check_end(self, job_id: str) -> None:
        """A job that is paused is resumed."""
        of_object = self.history.of_object and job_id == self.family[0]

        async def over() -> bool:
            state = await self.observe(job_id)
            if state is JobState.PAUSED:
                await self.ask("unsuspend" if of_object else "resume", job_id)
            return state is None or state.terminal

        await self.until(over, f"{job_id} does not end")
        await self.deliver()
        state = await self.state(job_id)
        self.log(f"{job_id} is over: {state}")
        allowed: set[JobState | None] = {
            JobState.FAILED if self.history.fails else JobState.SUCCEEDED
        }
        allowed |= {None} if self.history.ttl else set()
        if self.ended and job_id == self.family[0]:
            allowed |= {JobState.CANCELLED, None}
        assert state in allowed, state
        if state is not None:
            request = pb.VerifyJobRequest(job_id=job_id)
            try:
                report = await retried(lambda: call(self.jobs.VerifyJob, request))
            except NotFoundError:  # its deletion has begun
                return
            assert report.ok, report.problems

    async def delete(self, job_id: str) -> None:
        async def gone() -> bool:
            return await self.state(job_id) is None

        if not self.history.ttl:
            await self.ask("delete", job_id)  # once: it goes on by itself
        await self.until(gone, f"{job_id} is not deleted")

    async def check_nothing_left(self) -> None:
        left: list[str] = []

        async def clean() -> bool:
            left[:] = [each for each in await self.names_in_use() if NAME in each]
            return not left and await self.object() is None

        try:
            await self.until(clean, "something is left")
        finally:
            if left:
                self.log(f"left: {left}")

    async def names_in_use(self) -> list[str]:
        """Names of all files, ports, processes, keys and members of keys, and listed jobs."""
        installation, redis = self.installation, self.place.redis
        run_dir = installation.run_dir
        found = [f"process {name}" for name in installation.machine.names]
        for folder, _, names in os.walk(run_dir):  # passes over what vanishes meanwhile
            found += [folder, *(f"{folder}/{name}" for name in names)]
        found += json.loads((run_dir / "ports.json").read_text())
        keys: Any = await redis.keys()
        for key in [name.decode() for name in keys]:
            found.append(f"key {key}")
            kind: Any = await redis.type(key)
            if kind == b"hash":
                pairs: Any = await redis.hgetall(key)
                found += [f"{key}: {k!r} {v!r}" for k, v in pairs.items()]
            elif kind == b"zset":
                found += [f"{key}: {member!r}" for member in await redis.zrange(key, 0, -1)]
        listed = await retried(lambda: call(self.jobs.ListJobs, pb.ListJobsRequest()))
        return found + [f"listed {each.status.job_id}" for each in listed.jobs]

    async def report(self) -> str:
        """What jobs and processes are doing, for a test that fails."""
        states = {job_id: await self.state_now(job_id) for job_id in self.family}
        ended = self.installation.ends()
        return "\n".join([str(self.history), *self.events, f"{states}\n{ended}"])


# What a job has passed that is waited for in a state.
_PASSED = frozenset(
    {
        (JobState.STARTING, JobState.RUNNING),
        (JobState.PAUSING, JobState.PAUSED),
    }
)


def test_every_process_dies_in_every_state() -> None:
    kills = {(step.state, step.kill) for each in HISTORIES for step in each.steps}
    assert kills == {(state, kind) for state in JobState for kind in KILLS}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [*range(len(HISTORIES))] * int(os.environ.get("AGAIN", "1")))
def test_every_job_ends_and_leaves_nothing(
    runner: asyncio.Runner, installations: Installations, number: int
) -> None:
    async def happen() -> None:
        async with installations() as place:
            run = Run(place, HISTORIES[number])
            try:
                await run.run()
            except BaseException:
                print(await run.report())
                raise
            print("\n".join(run.events))

    runner.run(happen())
