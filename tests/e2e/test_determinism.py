"""The same job and seed give the same tokens, with any number of workers and any failures."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from paceline.enums import WorkerKind
from paceline.errors import UnavailableError
from paceline.front.client.client import Client
from paceline.front.local.supervisor import Local
from paceline.platform.transport.metadata_channel import Metadata
from paceline.v1 import rollout_pb2
from paceline.v1.rollout_pb2_grpc import RolloutStub
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.gates import asked_at
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Episode = dict[str, Any]
Job = Callable[..., dict[str, Any]]
Names = list[str]
Disturb = Callable[["Site", str, Path], None]
STEPS, GROUPS, SIZE = 6, 4, 6
HELD = 3  # so many steps are trained before the gate of a job that is disturbed
PATTERN = "^[^7]{0,12}$"


@dataclass(frozen=True, slots=True)
class Run:
    """A finished job."""

    episodes: list[Episode]  # those that were trained, in the order of the batches
    dropped: dict[str, int]  # episodes by reason
    incarnation: int
    notes: list[dict[str, float]]  # of the advantages, by step

    @property
    def rollouts(self) -> set[str]:
        return {name for one in self.episodes for name in one["rollouts"]}


class Site:
    """A platform with two environment workers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        options = {WorkerKind.CONTROLLER: {"environment_replicas": 2}}
        self.local = Local(run_dir, http_port=0, options=options)
        self._rollouts: dict[str, Any] = {}  # by address

    def record(self, name: str) -> dict[str, Any]:
        """The record of a started process."""
        return json.loads((self.run_dir / "processes" / f"{name}.json").read_text())

    def family(self, name: str) -> list[psutil.Process]:
        """A process and its children; empty while it is being replaced."""
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            if pid := int(self.record(name)["pid"]):
                process = psutil.Process(pid)
                return [process, *process.children(recursive=True)]
        return []

    def num_running(self, name: str) -> int:
        """Requests currently in a rollout worker; 0 while it starts."""
        with contextlib.suppress(FileNotFoundError, grpc.RpcError):
            address = self.record(name)["labels"]["address"]
            if address not in self._rollouts:
                self._rollouts[address] = RolloutStub(grpc.insecure_channel(address))
            status = self._rollouts[address].Status(
                rollout_pb2.RolloutStatusRequest(), timeout=5, metadata=self._as_environment()
            )
            return int(status.running)
        return 0

    def _as_environment(self) -> Metadata:
        folder = self.run_dir / "service-keys"
        return metadata_of(folder, WorkerKind.ROLLOUT, WorkerKind.ENVIRONMENT)

    def client(self) -> Client:
        """An SDK client of its gateway."""
        return Client(self.local.url, token=self.local.token, timeout_s=60.0, outage_s=120.0)

    def run(self, job: dict[str, Any], during: Callable[[str], None] = lambda _: None) -> Run:
        """Run a job to its end."""
        with self.client() as client:
            job_id = client.submit(job).status.job_id
        during(job_id)
        return self.result(job_id)

    def result(self, job_id: str) -> Run:
        """The results of a finished job."""
        with self.client() as client:
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state == "succeeded", status.reason
            report = client.verify(job_id)
            assert report.ok, report.problems
        folder = self.run_dir / "jobs" / job_id / "trajectories"
        files = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("final.jsonl")]
        lines = [line for path in files for line in path.read_text().splitlines()]
        episodes = [plain(json.loads(line)) for line in lines]
        return Run(episodes, report.dropped, status.incarnation, self._notes(job_id))

    def _notes(self, job_id: str) -> list[dict[str, float]]:
        """Numbers that depend on what the advantages remember; steps may be trained again."""
        lines = (self.run_dir / "jobs" / job_id / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        by_step = {row["step"]: row for row in rows if row["kind"] == "train"}
        names = ("baseline", "forgetting", "distinct_answers", "replayed")
        return [{n: by_step[k][n] for n in names if n in by_step[k]} for k in sorted(by_step)]


def plain(trajectory: dict[str, Any]) -> Episode:
    """The results that must be equal, and the workers that produced them."""
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
        job = tiny_job(
            name=name,
            eval=None,
            tasks={"environment": "arithmetic", "options": {"digits": 1}, "seed": 11},
            sampling={"max_tokens": 40, "max_context": 56, "on_truncation": "score"},
            reward=[{"kind": "regex", "pattern": PATTERN}],
            experience={
                "batch_groups": GROUPS,
                "group_size": SIZE,
                "max_staleness": staleness,
                "lease_s": 3.0,
            },
            rollout={"replicas": replicas, "activation": activation},
            trainer={"optimizer": {"lr": 3e-3}, "checkpoint": {"every": 4}},
            stop={"steps": STEPS},
        )
        for part in ("model", "trainer"):
            # In bfloat16, log-probs depend on the rows that are computed together.
            job[part] = {**job[part], "dtype": "float32"}
        return job

    return make


@pytest.fixture(scope="module")
def alone(site: Site, job_of: Job) -> Run:
    """The results with a single rollout worker."""
    return site.run(job_of("one", replicas=1))


def gated(job: dict[str, Any], gate: Path, *, from_group: int) -> dict[str, Any]:
    """The job, with rewards of groups from this one on held back until a file exists."""
    reward = {"kind": "gated", "pattern": PATTERN}
    held = {"gate": str(gate), "from_group": from_group, "timeout_s": 600.0}
    return job | {"reward": [reward | held]}


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


def one_at_a_time(job: dict[str, Any]) -> dict[str, Any]:
    """The job, slowed down so that a step takes long enough to die in its middle."""
    return job | {"rollout": job["rollout"] | {"max_concurrent": 1}}


def kill_amid(site: Site, job_id: str, gate: Path, *, step: int, number: int, names: Names) -> None:
    """SIGKILL while a rollout worker samples, from a step on, or while the job already waits."""
    name, deadline = f"rollout-{job_id}-{number}", time.monotonic() + PATIENCE_S
    with site.client() as client:
        while True:
            # Looked for before: from the look at the worker to the kill there is no time to lose.
            found = [process for each in names for process in site.family(each)]
            late = asked_at(gate).exists()
            if late or (client.get(job_id).status.step >= step and site.num_running(name)):
                break
            assert time.monotonic() < deadline, f"{name} samples nothing at step {step}"
            time.sleep(0.01)
    kill(found)


def kill_held(site: Site, gate: Path, *, names: Names) -> None:
    """SIGKILL while an episode waits for its reward, so that its step cannot be finished."""
    deadline = time.monotonic() + PATIENCE_S
    while not asked_at(gate).exists():
        assert time.monotonic() < deadline, "nothing waits for its reward"
        time.sleep(0.01)
    for name in names:
        while not (found := site.family(name)):  # it is just being replaced
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.01)
        kill(found)


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_rollouts(site: Site, job_id: str, gate: Path) -> None:
    for number in range(2):
        names = [f"rollout-{job_id}-{number}"]
        kill_amid(site, job_id, gate, step=1 + number, number=number, names=names)


def kill_environments(site: Site, job_id: str, gate: Path) -> None:
    names = ["environment-0", "environment-1"]
    kill_amid(site, job_id, gate, step=1, number=0, names=names)
    kill_held(site, gate, names=names)


def kill_trainer(site: Site, job_id: str, gate: Path) -> None:
    kill_held(site, gate, names=[f"trainer-{job_id}"])


def pause_and_resume(site: Site, job_id: str, gate: Path) -> None:
    """Pause it while an episode waits for its reward; none of its processes is left meanwhile."""
    kill_held(site, gate, names=[])
    with site.client() as client:
        client.pause(job_id, reason="lunch")
        deadline = time.monotonic() + PATIENCE_S
        while (status := client.get(job_id).status).state != "paused":
            assert time.monotonic() < deadline, f"{status.state}: {status.reason}"
            time.sleep(0.1)
        assert not list((site.run_dir / "processes").glob(f"*{job_id}*"))
        gate.touch()
        client.resume(job_id)


def resumed(run: Run) -> bool:
    """Another trainer went on from the checkpoint of the pause."""
    return run.incarnation == 2


def moved(run: Run) -> bool:
    """Some episode continued on another rollout worker."""
    return any(len(one["rollouts"]) > 1 for one in run.episodes)


def leased_again(run: Run) -> bool:
    """Some episode continued on another environment worker."""
    return any(one["attempt"] > 1 for one in run.episodes)


def rewound(run: Run) -> bool:
    """The trainer restarted, and untrained episodes were generated again."""
    return run.incarnation == 2 and run.dropped.get("stale", 0) > 0


@pytest.mark.parametrize(
    ("disturb", "shows"),
    [
        pytest.param(kill_rollouts, moved, marks=pytest.mark.extended),
        pytest.param(kill_environments, leased_again, marks=pytest.mark.extended),
        # The next test kills a trainer too, and compares more.
        pytest.param(kill_trainer, rewound, marks=pytest.mark.extended),
        (pause_and_resume, resumed),
    ],
    ids=["rollout", "environment", "trainer", "pause"],
)
def test_whatever_dies_or_pauses_the_same_is_made(
    disturb: Disturb,
    shows: Callable[[Run], bool],
    alone: Run,
    site: Site,
    job_of: Job,
    tmp_path: Path,
) -> None:
    """A rollout worker may be idle when it dies; the results are the same anyway."""
    first = alone.episodes[HELD * GROUPS * SIZE - 1]["same"]["group"] + 1
    for number in range(4):
        name, gate = f"{disturb.__name__.replace('_', '-')}-{number}", tmp_path / f"gate-{number}"

        def during(job_id: str, gate: Path = gate) -> None:
            try:
                disturb(site, job_id, gate)
            finally:
                gate.touch()

        job = job_of(name, replicas=2)
        if disturb in (kill_rollouts, kill_environments):
            job = one_at_a_time(job)
        run = site.run(gated(job, gate, from_group=first), during)
        agree(alone, run)
        if shows(run):
            return
    pytest.fail("it died at other moments")


def remembering(job: dict[str, Any]) -> dict[str, Any]:
    """The job with advantages that remember tasks and answers, and so few tasks that they recur."""
    shaping = [{"kind": "outcome_exploration", "coef": 0.2}]
    tasks = job["tasks"] | {"options": {"digits": 1, "size": 8}}
    experience = {"advantage": "mssr", "advantage_shaping": shaping}
    return job | {"tasks": tasks, "experience": job["experience"] | experience}


def test_a_memory_survives_kills_of_experience_and_trainer(
    site: Site, job_of: Job, tmp_path: Path
) -> None:
    opened = tmp_path / "open"
    opened.touch()
    job = remembering(job_of("memory", replicas=1))
    quiet = site.run(gated(job, opened, from_group=0))
    assert len({each["baseline"] for each in quiet.notes}) > 2, "nothing was remembered"
    assert quiet.notes[-1]["distinct_answers"] > 1
    first = quiet.episodes[HELD * GROUPS * SIZE - 1]["same"]["group"] + 1
    gate = tmp_path / "gate"

    def during(job_id: str) -> None:
        try:
            kill_held(site, gate, names=["experience", f"trainer-{job_id}"])
        finally:
            gate.touch()

    run = site.run(gated(job | {"name": "memory-killed"}, gate, from_group=first), during)
    assert rewound(run)
    agree(quiet, run)
    for mine, theirs in zip(run.notes, quiet.notes, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


LONG, EVERY = 11, 5


def replaying(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """The job with a sampler that learns and stored episodes, and so few tasks that they recur."""
    tasks = job["tasks"] | {"options": {"digits": 1, "size": 6}}
    found = {
        "group_size": 4,
        "sampler": {"kind": "weakest", "width": 3},
        "replay": {"kind": kind, "per_task": 2},
    }
    return job | {
        "tasks": tasks,
        "experience": job["experience"] | found,
        "stop": {"steps": LONG},
    }


@pytest.mark.parametrize(
    "kind", ["experience_replay", pytest.param("dart_pool", marks=pytest.mark.extended)]
)
def test_sampler_and_replay_survive_kills_at_every_fifth_step(
    kind: str, site: Site, job_of: Job
) -> None:
    """Experience and trainer die at any moment of the step, with episodes under way."""
    name = kind.replace("_", "-")
    quiet = site.run(replaying(job_of(f"{name}-quiet", replicas=1), kind))
    assert sum(each["replayed"] for each in quiet.notes) > 0

    def reached(client: Client, job_id: str, step: int) -> bool:
        with contextlib.suppress(UnavailableError):  # experience was killed before
            return client.get(job_id).status.step >= step
        return False

    def during(job_id: str) -> None:
        with site.client() as client:
            for step in range(EVERY - 1, LONG, EVERY):
                deadline = time.monotonic() + PATIENCE_S
                while not reached(client, job_id, step):
                    assert time.monotonic() < deadline, f"step {step} is not reached"
                    time.sleep(0.02)
                for victim in ("experience", f"trainer-{job_id}"):
                    kill(site.family(victim))

    run = site.run(replaying(job_of(f"{name}-killed", replicas=2), kind), during)
    assert run.incarnation > LONG // EVERY
    assert len(run.episodes) == len(quiet.episodes)
    for mine, theirs in zip(run.episodes, quiet.episodes, strict=True):
        assert mine["same"] == theirs["same"]
    assert [each["replayed"] for each in run.notes] == [each["replayed"] for each in quiet.notes]


def test_an_asynchronous_run_has_the_same_tasks_and_seeds(
    alone: Run, site: Site, job_of: Job
) -> None:
    with site.client() as client:
        job_id = client.submit(job_of("async", replicas=2, staleness=2)).status.job_id
    first, second = drawn_by(alone), drawn_by(site.result(job_id))
    common = first.keys() & second.keys()
    assert len(common) > STEPS * GROUPS * SIZE // 2
    assert all(first[name] == second[name] for name in common)


def drawn_by(run: Run) -> dict[tuple[int, int], tuple[str, int]]:
    """Task and seed of each trained episode, by position of its task and within its group."""
    episodes = [one["same"] for one in run.episodes]
    return {(one["group"], one["index"]): (one["task"], one["seed"]) for one in episodes}
