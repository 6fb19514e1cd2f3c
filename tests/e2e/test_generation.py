"""Learning samplers, waves, repairs and modes through all services, while processes die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.enums import Purpose
from paceline.errors import UnavailableError
from paceline_harness.methods.parts import built_in, marked
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 18
TURNS = 3
VICTIMS = ("environment", "experience", "rollout", "reward", "trainer")
WAVES: dict[str, Any] = {
    "batch_groups": 2,
    "group_size": 3,
    "max_staleness": 2,
    "lease_s": 3.0,
    "keep_trajectories": 4096,
    "sampler": {"kind": "weakest", "width": 8},
    "allocator": {"kind": "any_waves", "seed": 1},
}


def policy_tokens(trajectory: dict[str, Any]) -> list[int]:
    """Places of the tokens that this trajectory trains."""
    (transcript,) = trajectory["transcripts"]
    spans = [s for s in transcript["spans"] if s["source"] == "policy"]
    every = [place for span in spans for place in range(span["start"], span["end"])]
    return [place for place in every if place >= transcript["branch_token"]]


def test_waves_and_recalls_survive_kills(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    job = tiny_job(
        name="waves",
        stop={"steps": STEPS},
        tasks={"environment": "quiz", "options": {"turns": TURNS, "pause_s": 0.05}},
        reward=[{"kind": "environment"}],  # one for each turn
        # Untrained, the model hardly ever ends a turn; so some episodes see all of them.
        sampling={"max_tokens": 4, "max_context": 32, "stop": list("0123456789")},
        experience={**WAVES, "mode": "april", "filters": [{"kind": "any_repair", "seed": 3}]},
    )
    with platform.client() as client:
        job_id = client.submit(job).status.job_id

        def running(kind: str) -> list[psutil.Process]:
            own = job_id if kind in {"rollout", "trainer"} else ""
            pids = platform.pids(kind, own).values()
            return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

        def reached(step: int) -> bool:
            with suppress(UnavailableError):
                return client.get(job_id).status.step >= step
            return False

        for number, kind in enumerate(VICTIMS):
            until(
                lambda step=2 + 3 * number: reached(step), f"no progress before {kind}", PATIENCE_S
            )
            victim = running(kind)[0]
            victim.kill()
            until(lambda victim=victim: not goes_on(victim), f"{kind} lives on")
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        assert report.ok, report.problems
        rows = [row for row in client.list_metrics(job_id).rows if row.kind is Purpose.TRAIN]
    assert report.dropped["repaired"] > 0
    assert max(row.values["resumed_share"] for row in rows) > 0.0
    assert max(row.values["dropped_share"] for row in rows) > 0.0
    lines = [
        json.loads(line)
        for path in (platform.run_dir / "jobs" / job_id / "trajectories").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    children = [each for each in lines if each["transcripts"][0]["branch_token"]]
    assert children
    by_name = {(each["group_id"], each["index"]): each for each in lines}
    assert len(by_name) == len(lines)  # nothing is trained twice
    whole = [each for each in lines if not each["truncated"]]
    assert {each["score"]["reward"] for each in whole} == {float(TURNS)}  # no false zero
    for child in children:
        (transcript,) = child["transcripts"]
        parent = by_name.get((child["group_id"], transcript["parent"]))
        if parent is None:  # repaired meanwhile
            continue
        branch = transcript["branch_token"]
        assert transcript["tokens"][:branch] == parent["transcripts"][0]["tokens"][:branch]
        assert all(place >= branch for place in policy_tokens(child))


def test_guests_survive_kills(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    """Groups without a success get a stored one; what trains it and what keeps it are killed."""
    job = tiny_job(
        name="guests",
        stop={"steps": 20},
        tasks={"environment": "marking", "options": {"turns": 1}},
        reward=[{"kind": "environment"}],
        experience={
            "batch_groups": 2,
            "group_size": 3,
            "max_staleness": 1,
            "filters": [],
            "lease_s": 3.0,
            "sampler": {"kind": "weakest", "width": 3},
            "replay": {"kind": "dart_pool", "per_task": 2},
        },
        trainer={"optimizer": {"lr": 1e-4}, "checkpoint": {"every": 3}},
    )
    with platform.client() as client:
        job_id = client.submit(job).status.job_id

        def replayed(least: int) -> bool:
            with suppress(UnavailableError):
                return client.verify(job_id).counts.get("replayed", 0) >= least
            return False

        for number, kind in enumerate(("experience", "trainer", "experience", "environment")):
            until(lambda least=1 + number: replayed(least), f"no guest before {kind}", PATIENCE_S)
            victim = platform.pid_of(kind if kind != "trainer" else f"trainer-{job_id}")
            psutil.Process(victim).kill()
            until(lambda pid=victim: not psutil.pid_exists(pid), f"{kind} lives on")
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        rows = [row for row in client.list_metrics(job_id).rows if row.kind is Purpose.TRAIN]
    assert report.ok, report.problems
    assert {row.values["batch_episodes"] + row.values["replayed"] for row in rows} == {6}
    guests = {row.step: row.values["replayed"] for row in rows}
    assert report.counts["replayed"] == sum(guests.values()) > 0
    assert report.dropped["replaced"] >= report.counts["replayed"]  # not all groups are trained
    assert max(row.values["replayed_age_mean"] for row in rows) >= 1.0


def test_what_another_job_has_exported_is_replayed(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """`paceline replay import` before the first batch; one line is refused by its number."""
    tasks = {"environment": "arithmetic", "options": {"digits": 1, "size": 2}}
    plain = tiny_job(name="collects", tasks=tasks, eval=None, stop={"steps": 2})
    wanted = {"kind": "experience_replay", "share": 0.5}
    experience = {**plain["experience"], "max_staleness": 0, "replay": wanted}
    with platform.client() as client:
        first = client.submit(plain).status.job_id
        assert client.wait(first, timeout_s=PATIENCE_S).status.state == "succeeded", platform.logs()
        folder = platform.run_dir / "jobs" / first / "trajectories"
        found = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        path = tmp_path / "collected.jsonl"
        path.write_text("\n".join([*found[:20], "", '{"task_id": "other"}']) + "\n")
        # Otherwise the job is over before the import has begun.
        environment = psutil.Process(platform.pid_of("environment"))
        environment.suspend()
        job_id = client.submit(plain | {"name": "replays", "experience": experience}).status.job_id
        command = [
            sys.executable,
            "-m",
            "paceline.front.cli",
            "replay",
            "import",
            job_id,
            str(path),
        ]
        done = subprocess.run(
            [*command, "--run-dir", str(platform.run_dir)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "16 stored, 1 refused\n"), done.stderr
        assert f"{path}: line 22: transcripts: Field required" in done.stderr
        environment.resume()
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        rows = [row for row in client.list_metrics(job_id).rows if row.kind is Purpose.TRAIN]
    assert report.ok, report.problems
    assert [row.values["replayed"] for row in rows] == [16.0, 16.0]


@pytest.mark.extended
def test_allocators_of_methods_train(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    """Two steps of each, with rewards that differ by turn."""
    options: dict[str, dict[str, Any]] = {
        "dart_rollouts": {"slack": 1.5},
        "dars": {"schedule": "hardness_weighted"},
        "xrpo_planner": {"seeds": 2},
        # Whatever the rewards are, none is a success.
        "scope": {"count": 2, "success": 1e9},
        "rac": {"count": 2, "rounds": 2, "success": 1e9},
    }
    assert options.keys() == {*built_in("allocators")} - {"redundancy"}

    def run(kind: str) -> tuple[str, list[float]]:
        allocator = {"kind": kind, **options[kind]}
        groups = {"batch_groups": 2, "group_size": 4, "filters": [], "lease_s": 3.0}
        experience = {**groups, "allocator": allocator}
        job = marked(tiny_job(name=kind.replace("_", "-"), experience=experience))
        with platform.client() as client:
            job_id = client.submit(job | {"stop": {"steps": 2}}).status.job_id
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
            report = client.verify(job_id)
            rows = client.list_metrics(job_id).rows
        assert report.ok, report.problems
        return kind, [r.values["batch_episodes"] for r in rows if r.kind is Purpose.TRAIN]

    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(run, options))
    assert all(len(sizes) == 2 for sizes in found.values())
    assert found["scope"] == [2 * 6] * 2
    assert found["rac"] == [2 * 8] * 2


@pytest.mark.extended
def test_redundant_episodes_fill_single_slots(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    job = tiny_job(
        name="redundant",
        stop={"steps": 4},
        tasks={"environment": "quiz", "options": {"turns": 2, "pause_s": 0.05}},
        experience={
            "batch_groups": 2,
            "group_size": 3,
            "mode": "rollout_wise",
            "allocator": {"kind": "redundancy", "extra": 2},
            "filters": [],
        },
    )
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        rows = [row for row in client.list_metrics(job_id).rows if row.kind is Purpose.TRAIN]
    assert report.ok, report.problems
    assert report.dropped["surplus"] >= 4 * 2 * 2
    assert {row.values["batch_episodes"] for row in rows} == {6}
