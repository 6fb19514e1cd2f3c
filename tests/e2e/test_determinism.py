"""The same job and seed: the same tokens, whatever the number of workers and whatever dies."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.client import Client
from paceline.local import Local
from paceline.types import JobState, WorkerKind
from paceline.v1 import rollout_pb2
from paceline.v1.rollout_pb2_grpc import RolloutStub

pytestmark = pytest.mark.slow
Episode = dict[str, Any]
Job = Callable[..., dict[str, Any]]
Disturb = Callable[["Site", str], None]
STEPS, GROUPS, SIZE = 6, 4, 6


@dataclass(frozen=True, slots=True)
class Run:
    """A job that is over."""

    episodes: list[Episode]  # those that were trained, in the order of the batches
    dropped: dict[str, int]  # episodes by reason
    incarnation: int

    @property
    def rollouts(self) -> set[str]:
        return {name for one in self.episodes for name in one["rollouts"]}


class OverError(Exception):
    """The job was quicker than whoever waited for its middle."""


class Site:
    """A platform with two environment workers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        options = {WorkerKind.CONTROLLER: {"environment_replicas": 2}}
        self.local = Local(run_dir, http_port=0, options=options)
        self._rollouts: dict[str, Any] = {}  # by address

    def record(self, name: str) -> dict[str, Any]:
        """What is known of a started process."""
        return json.loads((self.run_dir / "processes" / f"{name}.json").read_text())

    def kill(self, name: str) -> None:
        """`kill -9`, its children too; one that is just being replaced is dead already."""
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            process = psutil.Process(int(self.record(name)["pid"]))
            for each in [process, *process.children(recursive=True)]:
                each.kill()

    def num_running(self, name: str) -> int:
        """Requests in a rollout worker at this moment; 0 while it starts."""
        with contextlib.suppress(FileNotFoundError, grpc.RpcError):
            address = self.record(name)["labels"]["address"]
            if address not in self._rollouts:
                self._rollouts[address] = RolloutStub(grpc.insecure_channel(address))
            status = self._rollouts[address].Status(rollout_pb2.RolloutStatusRequest(), timeout=5)
            return int(status.running)
        return 0

    def run(self, job: dict[str, Any], disturb: Disturb | None = None) -> Run:
        """Run a job to its end."""
        with Client(self.local.url, token=self.local.token) as client:
            job_id = client.submit(job).status.job_id
            if disturb is not None:
                with contextlib.suppress(OverError):
                    disturb(self, job_id)
            return self.result(job_id)

    def result(self, job_id: str) -> Run:
        """What a job has made, once it is over."""
        with Client(self.local.url, token=self.local.token) as client:
            status = client.wait(job_id, timeout_s=200).status
            assert status.state == "succeeded", status.reason
            report = client.audit(job_id)
            assert report.ok, report.problems
        folder = self.run_dir / "jobs" / job_id / "trajectories"
        files = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("final.jsonl")]
        lines = [line for path in files for line in path.read_text().splitlines()]
        episodes = [plain(json.loads(line)) for line in lines]
        return Run(episodes, report.dropped, status.incarnation)


def plain(trajectory: dict[str, Any]) -> Episode:
    """What must be the same, and who made it."""
    (transcript,) = trajectory["transcripts"]
    return {
        "same": {
            "group": int(trajectory["group_id"].split(".")[1]),
            "index": trajectory["index"],
            "task": trajectory["task_id"],
            "seed": trajectory["sampling"]["seed"],
            "tokens": transcript["tokens"],
            "spans": transcript["spans"],
            "reward": trajectory["score"]["reward"],
        },
        "logprobs": transcript["logprobs"],
        "rollouts": trajectory["provenance"]["rollout_workers"],
        "attempt": trajectory["attempt"],
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    with made.local:
        yield made


@pytest.fixture(scope="module")
def job_of(tiny_job: Job) -> Job:
    """A job whose rewards and lengths differ, so that it learns and drops groups; synchronous."""

    def make(name: str, *, replicas: int, staleness: int = 0) -> dict[str, Any]:
        activation = "in_flight" if staleness else "at_boundary"
        return tiny_job(
            name=name,
            eval=None,
            tasks={"environment": "arithmetic", "options": {"digits": 1}, "seed": 11},
            sampling={"max_tokens": 40, "max_context": 56, "truncated": "score"},
            reward=[{"kind": "regex", "pattern": "^[^7]{0,12}$"}],
            experience={
                "batch_groups": GROUPS,
                "group_size": SIZE,
                "max_staleness": staleness,
                "lease_s": 3.0,
            },
            # One at a time, so that a step takes long enough to die in its middle.
            rollout={"replicas": replicas, "activation": activation, "max_concurrent": 1},
            trainer={"optimizer": {"lr": 3e-3}, "checkpoint": {"every": 4}},
            stop={"steps": STEPS},
        )

    return make


@pytest.fixture(scope="module")
def alone(site: Site, job_of: Job) -> Run:
    """What one rollout worker makes."""
    return site.run(job_of("one", replicas=1))


def agree(run: Run, other: Run) -> None:
    assert len(run.episodes) == len(other.episodes) == STEPS * GROUPS * SIZE
    for mine, theirs in zip(run.episodes, other.episodes, strict=True):
        assert mine["same"] == theirs["same"]
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-5)


def test_the_job_is_worth_comparing(alone: Run) -> None:
    groups = [one["same"]["group"] for one in alone.episodes]
    assert max(groups) >= STEPS * GROUPS, "no group was dropped and replaced"
    assert groups == sorted(groups)
    assert len({len(one["same"]["tokens"]) for one in alone.episodes}) > 10


def test_two_rollout_workers_make_the_same(alone: Run, site: Site, job_of: Job) -> None:
    run = site.run(job_of("two", replicas=2))
    assert len(run.rollouts) == 2
    assert set(run.dropped) == {"filtered"}, "something was sampled with old weights"
    agree(alone, run)


def amid(site: Site, job_id: str, *, step: int, number: int) -> str:
    """Wait until a rollout worker is sampling, at a step or later; its name."""
    name, deadline = f"rollout-{job_id}-{number}", time.monotonic() + 120
    with Client(site.local.url, token=site.local.token) as client:
        while (status := client.get(job_id).status).step < step or not site.num_running(name):
            if JobState(status.state).terminal:
                raise OverError
            assert time.monotonic() < deadline, f"{name} samples nothing at step {step}"
            time.sleep(0.01)
    return name


def kill_rollouts(site: Site, job_id: str) -> None:
    for number in range(2):
        site.kill(amid(site, job_id, step=1 + number, number=number))


def kill_environments(site: Site, job_id: str) -> None:
    for number in range(2):
        amid(site, job_id, step=1 + number, number=number)
        site.kill("environment-0")
        site.kill("environment-1")


def kill_trainer(site: Site, job_id: str) -> None:
    amid(site, job_id, step=2, number=0)
    site.kill(f"trainer-{job_id}")


def moved(run: Run) -> bool:
    """Some episode went on at another rollout worker."""
    return any(len(one["rollouts"]) > 1 for one in run.episodes)


def leased_again(run: Run) -> bool:
    """Some episode went on at another environment worker."""
    return any(one["attempt"] > 1 for one in run.episodes)


def rewound(run: Run) -> bool:
    """The trainer came back, and what it had not trained yet was made again."""
    return run.incarnation == 2 and run.dropped["stale"] > 0


@pytest.mark.parametrize(
    ("disturb", "shows"),
    [(kill_rollouts, moved), (kill_environments, leased_again), (kill_trainer, rewound)],
    ids=["rollout", "environment", "trainer"],
)
def test_whatever_dies_the_same_is_made(
    disturb: Disturb, shows: Callable[[Run], bool], alone: Run, site: Site, job_of: Job
) -> None:
    """On a busy machine the moment may be missed; what is made is the same even so."""
    for number in range(4):
        name = f"{disturb.__name__.replace('_', '-')}-{number}"
        run = site.run(job_of(name, replicas=2), disturb)
        agree(alone, run)
        if shows(run):
            return
    pytest.fail("it died at other moments")


def test_asynchronous_runs_have_the_same_tasks_and_seeds(
    alone: Run, site: Site, job_of: Job
) -> None:
    with Client(site.local.url, token=site.local.token) as client:
        jobs = [job_of(f"async-{n}", replicas=n, staleness=2) for n in (1, 2)]
        ids = [client.submit(job).status.job_id for job in jobs]
    drawn = [drawn_by(run) for run in (alone, *map(site.result, ids))]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        common = drawn[first].keys() & drawn[second].keys()
        assert len(common) > STEPS * GROUPS * SIZE // 2
        assert all(drawn[first][name] == drawn[second][name] for name in common)


def drawn_by(run: Run) -> dict[tuple[int, int], tuple[str, int]]:
    """Task and seed of each trained episode, by place in the order of tasks, and in its group."""
    episodes = [one["same"] for one in run.episodes]
    return {(one["group"], one["index"]): (one["task"], one["seed"]) for one in episodes}
