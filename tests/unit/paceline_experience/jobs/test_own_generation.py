"""Samplers and allocators that came with a job and do what they should not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec
from paceline.config.uploads import CodeSpec
from paceline.errors import InvalidError
from paceline.isolation.sandbox import landlock
from paceline_experience.jobs.job_parts import JobParts
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import OwnCode

    from paceline_experience.jobs.own_functions import OwnFunctions
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
DEEDS = '''
import os, time
from typing import Annotated
from pydantic import Field
from paceline.plugins import Limits, Pick, Start


class Deeds:
    """Draws in order, and does its deed at the draw `at`."""

    def __init__(self, size, *, seed, epochs, what: str = "", at: Annotated[int, Field(ge=0)] = 0):
        self.size, self.epochs, self.what, self.at = size, epochs, what, at
        self.drawn = 0

    def next(self):
        due = self.drawn == self.at
        self.drawn += 1
        if self.epochs and self.drawn > self.epochs * self.size:
            return None
        if due and self.what == "raise":
            raise RuntimeError("a bug in the sampler")
        if due and self.what == "hang":
            while True:
                pass
        if due and self.what == "exit":
            os._exit(3)
        if due and self.what == "memory":
            bytearray(64 << 30)
        if due and self.what == "outside":
            return self.size
        if due and self.what == "text":
            return "task"
        if due and self.what == "nan":
            return Pick(0, meta={"weight": float("nan")})
        if due and self.what == "long":
            return Pick(0, variant="v" * 2000)
        return (self.drawn - 1) % self.size

    def state(self):
        if self.what == "state" and self.drawn > self.at:
            return {"seen": list(range(2000))}
        if self.what == "no json" and self.drawn > self.at:
            return {"seen": {1, 2}}
        if self.what == "nan state" and self.drawn > self.at:
            return {"mean": float("nan")}
        return {"drawn": 0 if self.what == "forgets" else self.drawn}

    def load(self, state):
        self.drawn = state["drawn"]


class Learning(Deeds):
    def remember(self, memory):
        self.known = memory.get("known", 0)

    def observe(self, outcomes, context):
        if self.what == "observe":
            return [1]
        if self.what == "swell":
            return {"big": "x" * 5000}
        return {"known": len(outcomes)}


class Half:
    def __init__(self, size, *, seed, epochs):
        pass

    def next(self):
        return 0


class Waves:
    """One episode each; does its deed in its method."""

    def __init__(self, *, group_size, what: str = "", step: int = 0):
        self.size, self.what, self.step = group_size, what, step

    def start(self, pick, context):
        if context.step >= self.step:
            if self.what == "start":
                raise RuntimeError("a bug in the allocator")
            if self.what == "crowd":
                return [Start()] * 10**6
            if self.what == "none":
                return []
            if self.what == "limit":
                return [Start(limits=Limits(max_tokens=-1))]
            if self.what == "nan":
                return [Start(meta={"weight": float("nan")})]
            if self.what == "number":
                return 3
        return [Start()] * self.size

    def more(self, group, context):
        if self.what == "more":
            raise RuntimeError("a bug in the second wave")
        if self.what == "orphan":
            return [Start(parent=(99, 1))]
        return []


def make(size, *, seed, epochs):
    return Deeds(size, seed=seed, epochs=epochs)
'''


@pytest.fixture
def functions(own_code: OwnCode) -> OwnFunctions:
    return own_code({"deeds.py": DEEDS})


def spec_of(**experience: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "code": {"digest": "0" * 64},
        "tasks": {"environment": "arithmetic", "seed": 7},
        "reward": [{"kind": "exact"}],
        "experience": {"batch_groups": 2, "group_size": 2, **experience},
    }
    return JobSpec.model_validate(fields)


async def checked(functions: OwnFunctions, spec: JobSpec, num_tasks: int = 12) -> None:
    """As at submit."""
    await functions.check(JobParts(spec))
    await functions.check_generation(JobParts(spec), num_tasks)


SAMPLER, ALLOCATOR = "experience.sampler: deeds:Deeds: ", "experience.allocator: deeds:Waves: "


def deed(what: str, kind: str = "Deeds", **options: Any) -> dict[str, Any]:
    return {"sampler": {"kind": f"deeds:{kind}", "what": what, **options}}


def waves(what: str, **options: Any) -> dict[str, Any]:
    return {"allocator": {"kind": "deeds:Waves", "what": what, **options}}


@pytest.mark.parametrize(
    ("experience", "says"),
    [
        ({}, ""),
        (deed(""), ""),
        ({**deed("", "Learning"), **waves("")}, ""),
        ({"sampler": "deeds:Absent"}, r"experience.sampler.kind: .*no attribute 'Absent'"),
        ({"sampler": "other:Absent"}, r"experience.sampler.kind: other:Absent: ModuleNotFound"),
        ({"sampler": "deeds:make"}, r"sampler.kind: deeds:make is a function \(deeds.py:\d+\)"),
        ({"sampler": "deeds:Half"}, r"deeds:Half has no method state, load; it needs next, state"),
        ({"sampler": "deeds:Waves"}, r"deeds:Waves has no method next, state, load"),
        ({"allocator": "deeds:Deeds"}, r"deeds:Deeds has no method start, more"),
        (deed("", at=-1), r"experience.sampler.at: .*greater than or equal to 0 \(got -1\)"),
        (deed("", off=1), r"experience.sampler.off: unknown option of 'deeds:Deeds'"),
        (deed("raise"), rf"{SAMPLER}RuntimeError: a bug in the sampler \(deeds.py:21\)"),
        (deed("memory"), rf"{SAMPLER}MemoryError.*\(deeds.py:\d+\)"),
        (deed("exit"), rf"{SAMPLER}its process has ended"),
        (deed("outside"), rf"{SAMPLER}ValueError: next\(\) returned 12: task 12 of 12.*\(deeds.py"),
        (deed("text"), rf"{SAMPLER}TypeError: next\(\) returned 'task'.*\(deeds.py:\d+\)"),
        (deed("nan"), rf"{SAMPLER}ValueError: next\(\) returned Pick.*JSON compliant.*\(deeds.py"),
        (deed("long"), rf"{SAMPLER}ValueError: next\(\) .* bytes; at most 1024 .*\(deeds.py:\d+\)"),
        (deed("state"), rf"{SAMPLER}ValueError: state\(\) has \d+ bytes; at most 1024.*\(deeds.py"),
        (deed("no json"), rf"{SAMPLER}TypeError: state\(\) is not JSON: .*\(deeds.py:\d+\)"),
        (deed("nan state"), rf"{SAMPLER}ValueError: state\(\) is not JSON: .*\(deeds.py:\d+\)"),
        (deed("forgets"), rf"{SAMPLER}ValueError: made anew, and with load\(\) of the state"),
        (deed("observe", "Learning"), r"TypeError: observe\(\) returned \[1\]; .*\(deeds.py:\d+\)"),
        (deed("swell", "Learning"), r"ValueError: memory 'big' has 5002 bytes"),
        (waves("start"), rf"{ALLOCATOR}RuntimeError: a bug in the allocator \(deeds.py:\d+\)"),
        (waves("crowd"), rf"{ALLOCATOR}ValueError: start\(\) returned more than 512 episodes"),
        (waves("none"), rf"{ALLOCATOR}ValueError: start\(\) returned 0 episodes; 1 to 512"),
        (waves("limit"), rf"{ALLOCATOR}ValueError: start\(\) returned limit max_tokens is -1"),
        (waves("nan"), rf"{ALLOCATOR}ValueError: start\(\) returned .*JSON compliant.*\(deeds.py"),
        (waves("number"), rf"{ALLOCATOR}TypeError: start\(\) returned .*int.*\(deeds.py:\d+\)"),
        (waves("more"), rf"{ALLOCATOR}RuntimeError: a bug in the second wave \(deeds.py:\d+\)"),
        (waves("orphan"), rf"{ALLOCATOR}ValueError: parent 99 is no finished episode"),
    ],
)
async def test_what_is_wrong_is_heard_at_submit(
    functions: OwnFunctions, experience: dict[str, Any], says: str
) -> None:
    if not says:
        await checked(functions, spec_of(**experience))
        return
    with pytest.raises(InvalidError, match=says):
        await checked(functions, spec_of(**experience))


async def test_one_that_hangs_at_submit_is_refused(own_code: OwnCode) -> None:
    functions = own_code({"deeds.py": DEEDS}, call_s=2.0)
    with pytest.raises(InvalidError, match=rf"{SAMPLER}did not answer within 2 s"):
        await checked(functions, spec_of(**deed("hang")))


async def test_too_few_tasks_for_a_batch_are_refused(functions: OwnFunctions) -> None:
    spec = spec_of(**deed(""), batch_groups=100)
    once = spec.model_copy(update={"tasks": spec.tasks.model_copy(update={"epochs": 3})})
    with pytest.raises(InvalidError, match="12 tasks has only 36 groups"):
        await checked(functions, once)


@pytest.mark.parametrize(
    ("experience", "says"),
    [
        (deed("raise", at=70), f"{SAMPLER}RuntimeError: a bug in the sampler (deeds.py:21)"),
        (deed("exit", at=70), f"{SAMPLER}its process has ended"),
        (deed("hang", at=70), f"{SAMPLER}did not answer within 3 s"),
        (deed("state", at=70), f"{SAMPLER}ValueError: state() has"),
        (waves("start", step=2), f"{ALLOCATOR}RuntimeError: a bug in the allocator (deeds.py:"),
        (waves("more"), f"{ALLOCATOR}RuntimeError: a bug in the second wave (deeds.py:"),
    ],
)
async def test_one_that_fails_later_fails_its_job_by_name(
    store: Store, worlds: Worlds, own_code: OwnCode, experience: dict[str, Any], says: str
) -> None:
    """And another job of the same service goes on meanwhile."""
    functions = own_code({"deeds.py": DEEDS}, call_s=3.0 if "3 s" in says else PATIENCE_S)
    wrong = await with_own(functions, worlds(store, experience={"filters": [], **experience}), "j1")
    right = await with_own(functions, worlds(store, experience={"filters": [], **deed("")}), "j2")
    state, reason = await ended(wrong)
    assert (state, reason[: len(says)]) == ("failed", says)
    assert await ended(right, steps=2) == ("", "")


async def test_what_is_not_answered_is_said_meanwhile(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    world = await with_own(functions, worlds(store, experience=deed("hang")), "j1")
    ledger = await world.started()
    assert not await ledger.leases.lease(worker_id="w", train=8, evals=0)
    async with asyncio.timeout(PATIENCE_S):
        while not (said := (await ledger.live()).unanswered):
            await asyncio.sleep(0.05)
    assert said.startswith("experience.sampler: deeds:Deeds has not answered for ")
    assert ledger.leases.demand().new  # what would be admitted, once there are tasks
    ledger.close()


async def with_own(functions: OwnFunctions, world: World, job_id: str) -> World:
    spec = world.spec.model_copy(update={"code": CodeSpec(digest="0" * 64)})
    return replace(world, job_id=job_id, spec=spec, own=await functions.of(job_id, JobParts(spec)))


async def ended(world: World, steps: int = 1000) -> tuple[str, str]:
    """How a job ends that is played; empty if it does all steps."""
    ledger = await world.started()
    before, step = len(world.hooks.ends), 0
    takes = asyncio.create_task(ledger.take(incarnation=1, step=0, rank=0, world=1))
    async with asyncio.timeout(PATIENCE_S):
        while len(world.hooks.ends) == before and step < steps:
            await world.filled(ledger, version=step)
            await ledger.sweep()
            await asyncio.sleep(0.005)
            if takes.done() and not (share := await takes).stop:
                done, _ = await ledger.commit(
                    incarnation=1, step=step, batch_id=share.batch_id, metrics={}
                )
                if done == step:
                    continue  # it has failed meanwhile
                step += 1
                await ledger.publish_version(incarnation=1, step=step, parent=step - 1, num_bytes=1)
                takes = asyncio.create_task(ledger.take(incarnation=1, step=step, rank=0, world=1))
    takes.cancel()
    await world.clean(ledger)
    ledger.close()
    return world.hooks.ends[-1] if len(world.hooks.ends) > before else ("", "")
