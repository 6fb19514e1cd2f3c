"""GPUs of jobs that start, grow, shrink, die and end, and of controllers that come and go."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import JobSpec, parse_job
from paceline.config.service import ControllerOptions, PoolOptions
from paceline.enums import JobState
from paceline.front.local.devices.device import described
from paceline_controller.jobs.placements import Placements
from paceline_controller.jobs.plan import LiveJob, Wanted, plan, replicas_of
from paceline_controller.jobs.queue import schedule

OPTIONS = ControllerOptions(pools={"default": PoolOptions()})
WITHOUT_GPUS = {JobState.QUEUED, JobState.PAUSED}


def job(name: str, *, age_s: float = 0.0, world_size: int = 1, **rollout: Any) -> LiveJob:
    spec = spec_of(world_size, json.dumps(rollout))
    return LiveJob(name, JobState.QUEUED, 0, spec, age_s=age_s)


@cache
def spec_of(world_size: int, rollout: str) -> JobSpec:
    raw = {
        "name": "j",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
        "trainer": {"world_size": world_size},
        "rollout": json.loads(rollout),
    }
    return parse_job(raw)


class Machine:
    """The controller's passes over jobs and processes, without processes."""

    def __init__(self, text: str) -> None:
        self.devices = described(text)
        self.jobs: dict[str, LiveJob] = {}
        self.sizes: dict[str, int] = {}
        self.running: dict[str, Wanted] = {}  # also dead ones, and those that drain
        self.waits: Mapping[str, str] = {}
        self.restart()

    def restart(self) -> None:
        """Another controller takes over."""
        self.placements = Placements(self.devices)

    def once(self, *, stopping: bool = True) -> None:
        """One pass; what is unwanted goes on for now unless `stopping`."""
        held: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, process in self.running.items():
            if process.devices:
                indices = tuple(device.index for device in process.devices)
                held.setdefault(process.job_id, {})[name] = indices
        self.placements.refresh(self.jobs.values(), held)
        able = {n: job for n, job in self.jobs.items() if not self.placements.problem(job)}
        queue = schedule(able.values(), {}, {}, OPTIONS, self.placements.room())
        self.waits = queue.waits
        for job_id in queue.starts:
            self.jobs[job_id] = replace(self.jobs[job_id], state=JobState.STARTING)
        self.placements.refresh(self.jobs.values(), held)
        wanted = replicas_of(plan(self.jobs.values(), OPTIONS, self.sizes).values())
        placed = {process.name: process for process in self.placements.placed(wanted)}
        if stopping:
            self.running = {n: p for n, p in self.running.items() if n in placed}
        self.running = {**placed, **self.running}

    def gpus(self, name: str) -> tuple[int, ...]:
        """Indices of the GPUs that a process sees."""
        return tuple(device.index for device in self.running[name].devices or ())


def test_shared_services_see_no_gpu_and_a_job_has_its_own() -> None:
    machine = Machine("2x80GiB")
    machine.jobs["a"] = job("a")
    machine.once()
    assert machine.gpus("trainer-a") == (0,)
    assert machine.gpus("rollout-a-0") == (1,)
    assert machine.running["environment-0"].devices == ()
    assert (
        Placements().placed([Wanted("x", machine.running["environment-0"].kind)])[0].devices is None
    )


def test_the_second_job_waits_and_says_for_what() -> None:
    machine = Machine("3x80GiB")
    machine.jobs |= {"a": job("a", age_s=9), "b": job("b", age_s=5)}
    machine.once()
    assert "and 1 of 3 is free (GPU 2)" in machine.waits["b"]
    assert machine.jobs["b"].state is JobState.QUEUED
    del machine.jobs["a"]
    machine.once(stopping=False)  # its processes drain
    assert machine.jobs["b"].state is JobState.QUEUED
    machine.once()
    machine.once()
    assert machine.gpus("trainer-b") == (0,)


def test_a_job_that_no_machine_here_can_run_is_told_at_once() -> None:
    placements = Placements(described("2x80GiB"))
    text = placements.problem(job("a", world_size=3))
    assert text == (
        "devices: it needs 4 GPUs (trainer 3, 1 rollout worker with 1), and this machine has 2"
    )
    assert not placements.problem(job("b"))


def test_a_large_job_is_not_passed_by_small_ones_for_ever() -> None:
    machine = Machine("4x80GiB")
    machine.jobs |= {"a": job("a", age_s=9000)}
    machine.once()
    machine.jobs |= {"big": job("big", age_s=5000, world_size=3), "s": job("s", age_s=4000)}
    machine.once()
    assert machine.jobs["s"].state is JobState.QUEUED
    assert "GPUs are kept for job big" in machine.waits["s"]


def test_workers_beyond_the_gpus_do_not_exist_until_one_is_free() -> None:
    machine = Machine("4x80GiB")
    machine.jobs["a"] = job("a", scaling={"min_replicas": 1, "max_replicas": 8})
    machine.sizes = {"rollout-a": 5}
    machine.once()
    assert sorted(n for n in machine.running if n.startswith("rollout")) == [
        "rollout-a-0",
        "rollout-a-1",
        "rollout-a-2",
    ]
    machine.sizes = {"rollout-a": 1}
    machine.jobs["b"] = job("b")
    for _ in range(3):  # its workers are stopped, their GPUs released, and given
        machine.once()
    assert machine.gpus("trainer-b") == (2,)


def test_a_job_goes_to_another_gpu_when_its_own_has_gone() -> None:
    machine = Machine("3x80GiB")
    machine.jobs["a"] = job("a", colocate=False)
    machine.once()
    machine.placements.see([d for d in machine.devices if d.index != 0])
    del machine.running["trainer-a"]  # it died, and starts again
    machine.once()
    assert machine.gpus("trainer-a") == (2,)
    assert machine.gpus("rollout-a-0") == (1,)
    machine.placements.see([])  # a driver that does not answer
    machine.once()
    assert machine.gpus("rollout-a-0") == (1,)
    machine.placements.see([d for d in machine.devices if d.index == 1])
    assert machine.placements.waits_for("a").startswith("waits for GPUs: it needs 2 GPUs")


def test_a_worker_beyond_the_first_ones_goes_to_another_gpu_too() -> None:
    machine = Machine("5x80GiB")
    machine.jobs["a"] = job("a", scaling={"min_replicas": 1, "max_replicas": 3})
    machine.sizes = {"rollout-a": 3}
    machine.once()
    lost = machine.gpus("rollout-a-2")
    machine.placements.see([d for d in machine.devices if d.index not in lost])
    del machine.running["rollout-a-2"]
    machine.once()
    assert machine.gpus("rollout-a-2") == (4,)


def test_colocated_workers_share_the_trainers_gpu() -> None:
    machine = Machine("1x80GiB")
    machine.jobs["a"] = job("a")
    machine.once()
    assert machine.gpus("trainer-a") == machine.gpus("rollout-a-0") == (0,)
    assert machine.running["rollout-a-0"].memory_share == 0.45
    assert machine.running["trainer-a"].memory_share is None


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["1x80GiB", "2x80GiB", "8x80GiB", "3x80GiB+2x24GiB"]), st.integers())
def test_no_gpu_is_given_twice_and_none_leaks(text: str, seed: int) -> None:
    """Over 100 passes each with starts, ends, pauses, deaths, growth, restarts of controllers."""
    rng = random.Random(seed)
    machine = Machine(text)
    for number in range(100):
        event = rng.randrange(7)
        some = rng.choice(list(machine.jobs) or [""])
        if event < 2:
            world = rng.choice([1, 1, 2, 3])
            colocate = rng.choice([None, None, True, False])
            bounds = {"min_replicas": 1, "max_replicas": 4}
            made = job(f"j{number}", world_size=world, scaling=bounds, colocate=colocate)
            if not machine.placements.problem(made):
                machine.jobs[made.job_id] = made
        elif event == 2 and some:
            del machine.jobs[some]
        elif event == 3 and some:
            states = list({JobState.RUNNING, JobState.PAUSED, JobState.PAUSING})
            if machine.jobs[some].state is not JobState.QUEUED:
                machine.jobs[some] = replace(machine.jobs[some], state=rng.choice(states))
        elif event == 4 and some:
            machine.sizes[f"rollout-{some}"] = rng.randrange(1, 5)
        elif event == 5:
            machine.restart()
        elif machine.running:
            machine.running.pop(rng.choice(list(machine.running)))
        machine.once(stopping=rng.random() < 0.7)
        _check(machine)
    machine.jobs.clear()
    machine.once()
    machine.once()
    assert not any(process.devices for process in machine.running.values())
    assert not machine.placements.room().lack(job("last"))


def _check(machine: Machine) -> None:
    owners: dict[int, set[str]] = {}
    for process in machine.running.values():
        for device in process.devices or ():
            owners.setdefault(device.index, set()).add(process.job_id)
    assert all(len(jobs) == 1 for jobs in owners.values()), owners
