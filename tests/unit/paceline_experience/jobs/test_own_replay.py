"""A replay that came with a job stores and offers as an installed one, or fails that job alone."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import JobSpec
from paceline.config.uploads import CodeSpec
from paceline.errors import InvalidError
from paceline.generation.replays import experience_replay
from paceline.isolation.sandbox import landlock
from paceline_experience.jobs.job_parts import JobParts
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from conftest import OwnCode

    from paceline_experience.jobs.own_functions import OwnFunctions
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.world import World, Worlds

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
DEEDS = '''
import os
from paceline.plugins import Guest


class Deeds:
    """Keeps all and offers the newest; does its deed in its method from a step on."""

    def __init__(self, *, what: str = "", step: int = 0):
        self.what, self.step, self.asked = what, step, 0

    def keep(self, group, context):
        self.asked += 1
        due = context.step >= self.step
        if due and self.what == "hang":
            while True:
                pass
        if due and self.what == "exit":
            os._exit(3)
        if due and self.what == "outside":
            return [len(group.rewards)]
        if due and self.what == "unordered":
            return [1, 0]
        if due and self.what == "endless":
            return iter(int, 1)
        if due and self.what == "nan":
            return [float("nan")]
        if due and self.what == "nothing":
            return None
        if due and self.what == "counts":
            return [self.asked % 2]
        return range(len(group.rewards))

    def offer(self, group, stored, context):
        if self.what == "raise":
            raise RuntimeError("a bug in the replay")
        if self.what == "memory":
            bytearray(64 << 30)
        if self.what == "stranger":
            return [0]
        if self.what == "absent":
            return [Guest(len(stored))]
        if self.what == "nan guest":
            return [Guest(float("nan"))]
        if self.what == "twice":
            return [Guest(0), Guest(0)]
        if self.what == "all":
            return [Guest(0, replaces=n) for n in range(len(group.rewards))]
        if self.what == "crowd":
            return [Guest(0)] * 10**6
        return [Guest(len(stored) - 1)]


class Half:
    def keep(self, group, context):
        return []


def function(group, context):
    return []
'''


@pytest.fixture
def functions(own_code: OwnCode) -> OwnFunctions:
    plain = inspect.getsource(experience_replay)
    return own_code({"deeds.py": DEEDS, "plain.py": plain})


def spec_of(replay: dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "job",
            "model": {"path": "m"},
            "code": {"digest": "0" * 64},
            "tasks": {"environment": "arithmetic", "seed": 7},
            "reward": [{"kind": "exact"}],
            "experience": {"batch_groups": 2, "group_size": 2, "replay": replay},
        }
    )


def deed(what: str, **options: Any) -> dict[str, Any]:
    return {"kind": "deeds:Deeds", "what": what, **options}


REPLAY = "experience.replay: deeds:Deeds: "


@pytest.mark.parametrize(
    ("replay", "says"),
    [
        (deed(""), ""),
        ({"kind": "plain:ExperienceReplay", "share": 0.5}, ""),
        ({"kind": "plain:ExperienceReplay", "share": 2}, r"replay.share: .*less than or equal"),
        (deed("", off=1), r"experience.replay.off: unknown option of 'deeds:Deeds'"),
        ({"kind": "deeds:Absent"}, r"experience.replay.kind: .*no attribute 'Absent'"),
        ({"kind": "deeds:function"}, r"deeds:function is a function \(deeds.py:\d+\); a class"),
        ({"kind": "deeds:Half"}, r"deeds:Half has no method offer; it needs keep, offer"),
        (deed("raise"), rf"{REPLAY}RuntimeError: a bug in the replay \(deeds.py:\d+\)"),
        (deed("memory"), rf"{REPLAY}MemoryError.*\(deeds.py:\d+\)"),
        (deed("exit"), rf"{REPLAY}its process has ended"),
        (deed("outside"), rf"{REPLAY}ValueError: keep\(\) returned places \[2\] of 2.*\(deeds.py"),
        (deed("unordered"), rf"{REPLAY}ValueError: keep\(\) returned .* ascending .*\(deeds.py"),
        (deed("endless"), rf"{REPLAY}ValueError: keep\(\) returned places \[0, 0, 0\].*\(deeds.py"),
        (deed("nan"), rf"{REPLAY}TypeError: keep\(\) returned .*float.*\(deeds.py:\d+\)"),
        (deed("nothing"), rf"{REPLAY}TypeError: keep\(\) returned .*NoneType.*\(deeds.py:\d+\)"),
        (deed("counts"), rf"{REPLAY}ValueError: asked again, it answers "),
        (deed("stranger"), rf"{REPLAY}TypeError: offer\(\) returned a guest of type int.*deeds.py"),
        (deed("absent"), rf"{REPLAY}ValueError: offer\(\) returned places \[1\] of 1.*\(deeds.py"),
        (deed("nan guest"), rf"{REPLAY}TypeError: offer\(\) returned .*float.*\(deeds.py:\d+\)"),
        (deed("twice"), rf"{REPLAY}ValueError: offer\(\) returned places \[0, 0\] of 1.*deeds.py"),
        (deed("all"), rf"{REPLAY}ValueError: offer\(\) returned .*\(deeds.py:\d+\)"),
        (deed("crowd"), rf"{REPLAY}ValueError: offer\(\) returned .*\(deeds.py:\d+\)"),
    ],
)
async def test_what_is_wrong_is_heard_at_submit(
    functions: OwnFunctions, replay: dict[str, Any], says: str
) -> None:
    if not says:
        await functions.check(JobParts(spec_of(replay)))
        return
    with pytest.raises(InvalidError, match=says):
        await functions.check(JobParts(spec_of(replay)))


async def test_one_that_hangs_at_submit_is_refused(own_code: OwnCode) -> None:
    functions = own_code({"deeds.py": DEEDS}, call_s=2.0)
    with pytest.raises(InvalidError, match=rf"{REPLAY}did not answer within 2 s"):
        await functions.check(JobParts(spec_of(deed("hang"))))


async def with_own(functions: OwnFunctions, world: World, job_id: str) -> World:
    spec = world.spec.model_copy(update={"code": CodeSpec(digest="0" * 64)})
    return replace(world, job_id=job_id, spec=spec, own=await functions.of(job_id, JobParts(spec)))


async def trained(world: World, steps: int, *, kills: bool = False) -> list[Any]:
    """The samples of some steps of one task; processes of code are killed meanwhile."""
    ledger = await world.started()
    found: list[Any] = []
    for step in range(steps):
        (leased,) = await ledger.leases.lease(worker_id="w", train=4, evals=0)
        rewards = [float(n <= step % 3) for n in range(4)]
        done = [world.made(leased, n, reward=r, version=step) for n, r in enumerate(rewards)]
        await ledger.submit(done)
        for each in sealed_processes() if kills else ():
            each.kill()
        async with asyncio.timeout(PATIENCE_S):
            while not (await ledger.live()).ready_groups:
                await asyncio.sleep(0.01)
        if kills:  # experience too
            ledger.close()
            ledger = await world.opened()
        share = await ledger.take(incarnation=1, step=step, rank=0, world=1)
        shown = share.stats.replayed, share.stats.reward_mean, len(share.samples)
        found.append((*shown, [sample.replace(b"j2", b"j1") for sample in share.samples]))
        await ledger.commit(incarnation=1, step=step, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(incarnation=1, step=step + 1, parent=step, num_bytes=10)
    await world.clean(ledger)
    ledger.close()
    return found


async def test_it_trains_what_an_installed_one_trains_whatever_is_killed(
    store: Store, worlds: Worlds, functions: OwnFunctions
) -> None:
    found: list[list[Any]] = []
    for job_id, kind in (("j1", "experience_replay"), ("j2", "plain:ExperienceReplay")):
        experience = {
            "batch_groups": 1,
            "group_size": 4,
            "max_staleness": 0,
            "filters": [],
            "replay": {"kind": kind, "share": 0.4, "max_age": 3, "at_least": 0.5},
        }
        world = replace(worlds(store, experience=experience, num_tasks=1), job_id=job_id)
        is_own = ":" in kind
        if is_own:
            world = await with_own(functions, world, job_id)
        found.append(await trained(world, 6, kills=is_own))
    installed, own = found
    assert own == installed
    assert sum(step[0] for step in installed) > 5


@pytest.mark.parametrize(
    ("replay", "says"),
    [
        (deed("outside", step=1), f"{REPLAY}ValueError: keep() returned places [2] of 2"),
        (deed("exit"), f"{REPLAY}its process has ended"),
        (deed("hang"), f"{REPLAY}did not answer within 3 s"),
    ],
)
async def test_one_that_fails_later_fails_its_job_by_name(
    store: Store, worlds: Worlds, own_code: OwnCode, replay: dict[str, Any], says: str
) -> None:
    """And another job of the same service goes on meanwhile."""
    functions = own_code({"deeds.py": DEEDS}, call_s=3.0 if "3 s" in says else PATIENCE_S)
    shared: dict[str, Any] = {"filters": [], "batch_groups": 1, "group_size": 2}
    wrong = await with_own(
        functions, worlds(store, experience={**shared, "replay": replay, "max_staleness": 0}), "j1"
    )
    right = await with_own(
        functions, worlds(store, experience={**shared, "replay": deed("")}), "j2"
    )
    state, reason = await ended(wrong)
    assert (state, says in reason) == ("failed", True), reason
    assert await ended(right, steps=2) == ("", "")


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
