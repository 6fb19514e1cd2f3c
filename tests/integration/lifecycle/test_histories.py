"""Jobs are paused, resumed, forked, cancelled and deleted in every state while services die.

Each comes to an end, and when it is deleted nothing of it is left anywhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline import wire
from paceline.enums import JobState, WorkerKind
from paceline.errors import NotFoundError, PacelineError
from paceline.transport.rpc import call
from paceline.v1 import jobs_pb2 as pb
from paceline_controller.runtimes.kubernetes.resources import TRAINING_JOBS, Object, name_of
from paceline_harness.lifecycle.installation import heard

if TYPE_CHECKING:
    from conftest import Place

ASKS = ("pause", "resume", "cancel", "delete", "fork", "suspend", "unsuspend", "kubectl delete")
KILLED = (
    *(WorkerKind.EXPERIENCE, WorkerKind.GATEWAY, WorkerKind.CONTROLLER, WorkerKind.TRAINER),
    *(WorkerKind.ENVIRONMENT, WorkerKind.REWARD, WorkerKind.ROLLOUT),
)
PATIENCE_S = 0.4  # until a job is in the state that a moment waits for
END_S = 60.0
CALL_S = 5.0
EXAMPLES = int(os.environ.get("LIFECYCLE_EXAMPLES", "12"))


@dataclass(frozen=True)
class Moment:
    """In a state of the job something is asked, and a process dies meanwhile."""

    state: JobState
    ask: str
    killed: WorkerKind | None
    lag_s: float  # from the question to the death; negative: the other way round
    whose: int = 0  # 0: of the first job; else of a fork, if there is one


@dataclass(frozen=True)
class Story:
    """What happens to a job and its forks."""

    moments: tuple[Moment, ...]
    of_object: bool
    ttl: bool


MOMENTS = st.builds(
    Moment,
    state=st.sampled_from([*JobState]),
    ask=st.sampled_from([*ASKS, ""]),
    killed=st.sampled_from([None, *KILLED]),
    lag_s=st.sampled_from([-0.03, 0.0, 0.001, 0.003, 0.01, 0.03]),
    whose=st.integers(0, 2),
)
STORIES = st.builds(
    Story,
    moments=st.lists(MOMENTS, min_size=1, max_size=5).map(tuple),
    of_object=st.booleans(),
    ttl=st.sampled_from([False, False, True]),
)


@dataclass
class Teller:
    """Lets a story happen."""

    place: Place
    story: Story
    family: list[str] = field(default_factory=list[str])
    object_name: str = ""
    ended: set[str] = field(default_factory=set[str])  # asked to be cancelled or deleted
    told: list[str] = field(default_factory=list[str])
    asked: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def __post_init__(self) -> None:
        self.installation = self.place.installation
        self.jobs = self.installation.jobs
        self.began_s = time.monotonic()

    def say(self, what: str) -> None:
        self.told.append(f"{time.monotonic() - self.began_s:7.3f} {what}")

    async def tell(self) -> None:
        try:
            async with asyncio.timeout(4 * END_S):
                await self.begin()
                for moment in self.story.moments:
                    await self.happen(moment)
                for job_id in self.family:  # grows while forks are made
                    await self.see_the_end_of(job_id)
                for job_id in self.family:
                    await self.delete(job_id)
                await self.see_nothing_left()
        except BaseException:
            print(await self.situation())
            raise

    async def situation(self) -> str:
        """What jobs and processes are doing, for a test that fails."""
        listed = await self.jobs.ListJobs(pb.ListJobsRequest(), timeout=CALL_S)
        for job_id in self.family:
            try:
                report = await call(self.jobs.VerifyJob, pb.VerifyJobRequest(job_id=job_id))
                self.say(" ".join(str(report).split()))
            except PacelineError as error:
                self.say(f"{job_id}: {error}")
        machine = self.installation.machine
        processes = {name: await machine.last_words(name) for name in machine.names}
        return "\n".join([str(self.story), *self.told, f"{listed}\n{processes}"])

    def spec(self, **more: Any) -> dict[str, Any]:
        return {
            "model": {"path": str(self.place.model)},
            "tasks": {"environment": "arithmetic"},
            "eval": {"every": 2, "tasks": 1, "options": {"split": "heldout"}},
            "reward": [{"kind": "exact"}],
            "experience": {"batch_groups": 1, "group_size": 2, "max_staleness": 2, "lease_s": 60},
            "stop": {"steps": 4},
            **({"ttl_seconds_after_finished": 0} if self.story.ttl else {}),
            **more,
        }

    async def begin(self) -> None:
        if not self.story.of_object:
            await self.submit(self.spec(name="told"))
            return
        self.object_name = f"told-{uuid.uuid4().hex[:8]}"
        body = {
            "apiVersion": TRAINING_JOBS.api_version,
            "kind": TRAINING_JOBS.kind,
            "metadata": {"name": self.object_name},
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
        job = await heard(lambda: call(self.jobs.SubmitJob, request, timeout_s=CALL_S))
        self.family.append(job.status.job_id)
        self.say(f"{job.status.job_id} is submitted")

    async def state_now(self, job_id: str) -> JobState | None:
        """As the store has it, which costs the services nothing; None: it is gone."""
        found = await self.place.redis.hget(f"{{default/{job_id}}}:record", "state")
        return None if found is None else JobState(found.decode())

    async def state(self, job_id: str) -> JobState | None:
        """As users see it; None: it is gone."""
        request = pb.GetJobRequest(job_id=job_id)
        try:
            job = await heard(lambda: call(self.jobs.GetJob, request, timeout_s=CALL_S))
        except NotFoundError:
            return None
        return wire.member_of(JobState, job.status.state, "state")

    async def object(self) -> Object | None:
        if not self.object_name:
            return None
        try:
            return await self.installation.cluster.get(TRAINING_JOBS, self.object_name)
        except NotFoundError:
            return None

    async def until(
        self, condition: Callable[[], Awaitable[bool]], what: str, within_s: float = END_S
    ) -> None:
        deadline = time.monotonic() + within_s
        while not await condition():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.03)

    async def happen(self, moment: Moment) -> None:
        job_id = self.family[min(moment.whose, len(self.family) - 1)]
        deadline = time.monotonic() + PATIENCE_S
        while (state := await self.state_now(job_id)) not in (None, moment.state):
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.004)
        self.say(f"{job_id} is {state}: {moment.ask or 'nothing'}, {moment.killed} dies")
        self.asked[state or "gone", moment.ask] += 1
        async with asyncio.TaskGroup() as both:
            both.create_task(self.kill(moment, job_id))
            await asyncio.sleep(max(0.0, -moment.lag_s))
            if moment.ask:
                await self.ask(moment.ask, job_id)

    async def kill(self, moment: Moment, job_id: str) -> None:
        await asyncio.sleep(max(0.0, moment.lag_s))
        if moment.killed is not None:
            await self.installation.kill(moment.killed, job_id)
            self.say(f"{moment.killed} was killed")

    async def ask(self, what: str, job_id: str) -> None:
        """Ask until somebody has heard it; it may be refused."""
        if what in ("cancel", "delete", "kubectl delete"):
            self.ended.add(job_id)
        try:
            if what in ("suspend", "unsuspend", "kubectl delete"):
                await self.ask_cluster(what)
            elif what == "fork":
                await self.fork(job_id)
            else:
                method, request = {
                    "pause": (self.jobs.PauseJob, pb.PauseJobRequest(job_id=job_id)),
                    "resume": (self.jobs.ResumeJob, pb.ResumeJobRequest(job_id=job_id)),
                    "cancel": (self.jobs.CancelJob, pb.CancelJobRequest(job_id=job_id)),
                    "delete": (self.jobs.DeleteJob, pb.DeleteJobRequest(job_id=job_id, force=True)),
                }[what]
                await heard(lambda: call(method, request, timeout_s=CALL_S))
            self.say(f"{what} was heard")
        except PacelineError as error:
            self.say(f"{what} is refused: {type(error).__name__}: {error}")

    async def fork(self, job_id: str) -> None:
        request = pb.GetJobRequest(job_id=job_id)
        parent = await heard(lambda: call(self.jobs.GetJob, request, timeout_s=CALL_S))
        which = "best" if len(self.family) % 2 else "latest"
        await self.submit(json.loads(parent.spec_json) | {"fork": {"job": job_id, "step": which}})

    async def ask_cluster(self, what: str) -> None:
        if not self.object_name:
            return
        cluster = self.installation.cluster
        if what == "kubectl delete":
            self.ended.add(self.family[0])
            await cluster.delete(TRAINING_JOBS, self.object_name)
        else:
            suspend = {"spec": {"suspend": what == "suspend"}}
            await cluster.patch(TRAINING_JOBS, self.object_name, suspend)

    async def see_the_end_of(self, job_id: str) -> None:
        """A job that is paused is resumed."""

        async def over() -> bool:
            state = await self.state_now(job_id)
            if state is JobState.PAUSED:
                await self.ask("unsuspend", job_id)
                await self.ask("resume", job_id)
            return state is None or state.terminal

        await self.until(over, f"{job_id} does not end")
        state = await self.state(job_id)
        self.say(f"{job_id} is over: {state}")
        allowed: set[JobState | None] = {JobState.SUCCEEDED}
        allowed |= {None} if self.story.ttl else set()
        allowed |= {JobState.CANCELLED, None} if job_id in self.ended else set()
        assert state in allowed, state
        if state is not None:
            request = pb.VerifyJobRequest(job_id=job_id)
            report = await heard(lambda: call(self.jobs.VerifyJob, request, timeout_s=CALL_S))
            assert report.ok, report.problems

    async def delete(self, job_id: str) -> None:
        async def gone() -> bool:
            return await self.state_now(job_id) is None

        if not self.story.ttl:
            await self.ask("delete", job_id)  # once: it goes on by itself
        await self.until(gone, f"{job_id} is not deleted")
        assert await self.state(job_id) is None

    async def see_nothing_left(self) -> None:
        left: list[str] = []

        async def clean() -> bool:
            left[:] = [each for job_id in self.family for each in await self.left_of(job_id)]
            return not left and await self.object() is None

        try:
            await self.until(clean, "something is left", within_s=10)
        except AssertionError:
            self.say(f"left: {left} {await self.object() if self.object_name else ''}")
            raise

    async def left_of(self, job_id: str) -> list[str]:
        """Names of everything that names the job."""
        installation, redis = self.installation, self.place.redis
        run_dir = installation.run_dir
        found: list[str] = []
        for folder, _, names in os.walk(run_dir):  # passes over what vanishes meanwhile
            found += [folder, *(f"{folder}/{name}" for name in names)]
        found += json.loads((run_dir / "ports.json").read_text())
        found += [f"process {name}" for name in installation.machine.names]
        for key in [name.decode() for name in await redis.keys()]:
            found.append(f"key {key}")
            kind = (await redis.type(key)).decode()
            if kind == "hash":
                pairs: Any = await redis.hgetall(key)
                found += [
                    f"{key}: {k.decode()} {v.decode('utf8', 'replace')}" for k, v in pairs.items()
                ]
            elif kind == "zset":
                members: Any = await redis.zrange(key, 0, -1)
                found += [f"{key}: {member.decode()}" for member in members]
        return [each for each in found if job_id in each]


@pytest.mark.timeout(1800)
def test_every_job_ends_and_leaves_nothing(place: Place) -> None:
    asked: Counter[tuple[str, str]] = Counter()
    told: list[Teller] = []

    async def happen(stories: list[Story]) -> None:
        tellers = [Teller(place, story) for story in stories]
        async with asyncio.TaskGroup() as together:
            for teller in tellers:
                together.create_task(teller.tell())
        for teller in tellers:
            asked.update(teller.asked)
        told.extend(tellers)
        request = pb.ListJobsRequest()
        jobs = await heard(lambda: call(place.installation.jobs.ListJobs, request))
        if left := [each.status.job_id for each in jobs.jobs]:
            print("\n".join(line for each in tellers for line in [str(each.story), *each.told]))
            raise AssertionError(f"requests have made jobs that nobody was told of: {left}")
        names = await place.installation.cluster.list(TRAINING_JOBS)
        assert not [name_of(each) for each in names[0]]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(st.lists(STORIES, min_size=1, max_size=6))
    def histories(stories: list[Story]) -> None:
        place.runner.run(happen(stories))

    place.runner.run(happen([Story((), of_object=False, ttl=False)]))  # what starts first is slow
    histories()
    print(len(told), sum(asked.values()), sorted(asked.items()))
