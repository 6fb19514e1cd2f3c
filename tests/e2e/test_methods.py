"""Every part of every installed method trains through all services, and NaN does no harm.

Jobs are made of the parts found at run time: job i has the i-th part of each kind, so a new method
is tested as soon as it is installed. Starting a job's processes takes nearly all of its time. So
there are as many jobs as slots of the trainer need, and the advantages, of which there are more,
share them: one that is listed after another is estimated for the same batches and replaces it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import parse_job
from paceline.config.job import OptimizerSpec
from paceline.config.named import named
from paceline.enums import JobState, Purpose
from paceline.plugins import registry
from paceline.types import JobStatus
from paceline_harness.methods.parts import FOLLOWING, KINDS, Part, marked, parts, placed
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.checkpoints.checkpoint import Checkpoints, FoundCheckpoint
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.model import shard
from paceline_trainer.step.optimizer import Optimizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB_S = PATIENCE_S
AT_A_TIME = 2
STEPS = 2
GROUPS, SIZE = 2, 4
PARTS = parts()
# The advantage that shapings follow: it has one value per episode, as some of them need.
BEFORE = "grpo"
Job = dict[str, Any]


def chosen() -> dict[str, list[Part]]:
    """The parts of each job, by its name."""
    slots = [[part for part in PARTS if part.kind == kind] for kind in (*registry.SLOTS, "filters")]
    number = max(map(len, slots))
    found: dict[str, list[Part]] = {}
    for index in range(number):
        own = [each[index % len(each)] for each in slots]
        found[f"methods-{index}"] = own + advantages(index, number)
    return found


def advantages(index: int, number: int) -> list[Part]:
    """Every `number`-th advantage, and the shapings where they belong."""
    every = [part for part in PARTS if part.kind == "advantages"]
    shapings = [part for part in every if part.field == FOLLOWING]
    own = [part for part in every if part not in shapings][index::number]
    own.sort(key=lambda part: part.name == BEFORE)
    if own and own[-1].name == BEFORE:
        own += shapings
    return [*own[:1], *(replace(part, field=FOLLOWING) for part in own[1:])]


JOBS = chosen()


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over."""

    status: JobStatus
    used: frozenset[tuple[str, str]]  # kind and name of its plug-ins
    steps: dict[int, dict[str, float]]  # what the history has of each
    folder: Path
    trainer: str  # its log


def run(platform: Any, jobs: Iterable[Job]) -> list[Ended]:
    """Jobs to their ends, a few at a time."""

    def whole(job: Job) -> Ended:
        with platform.client() as client:
            job_id = client.submit(job).status.job_id
            view = client.wait(job_id, timeout_s=JOB_S)
            rows = client.list_metrics(job_id).rows
        return Ended(
            status=view.status,
            used=frozenset((each.kind, each.name) for each in named(parse_job(view.spec))),
            steps={row.step: row.values for row in rows if row.kind is Purpose.TRAIN},
            folder=platform.run_dir / "jobs" / job_id,
            trainer=(platform.run_dir / "logs" / f"trainer-{job_id}.log").read_text(),
        )

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(whole, jobs))


@pytest.fixture(scope="module")
def job_of(tiny_job: Callable[..., Job]) -> Callable[..., Job]:
    """Small jobs with episodes of two turns."""
    experience = {"batch_groups": GROUPS, "group_size": SIZE, "lease_s": 3.0}

    def make(**sections: Any) -> Job:
        return marked(tiny_job(experience=experience, **sections))

    return make


@pytest.fixture(scope="module")
def ended(platform: Any, job_of: Callable[..., Job]) -> dict[str, Ended]:
    """The jobs of all parts."""
    # One mini-batch makes some ratios 1; what counts here is that each part runs.
    trainer = {"objective": {"inert": True}}
    jobs = [
        placed(job_of(name=name, stop={"steps": STEPS}, trainer=trainer), *own)
        for name, own in JOBS.items()
    ]
    return dict(zip(JOBS, run(platform, jobs), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_these_parts_trains(name: str, ended: dict[str, Ended]) -> None:
    job = ended[name]
    listed = ", ".join(map(str, JOBS[name]))
    assert job.status.state is JobState.SUCCEEDED, f"{job.status.reason} ({listed})"
    assert job.status.step == STEPS
    assert list(job.steps) == list(range(1, STEPS + 1))
    for row in job.steps.values():
        assert row["skipped_updates"] == 0, listed
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0, listed
        for part in JOBS[name]:
            if part.kind == "corrections":
                assert 0 <= row[f"{part.name}_zeroed"] <= 1
                assert 0 <= row[f"{part.name}_weight"] <= row[f"{part.name}_weight_max"]


def test_every_installed_part_was_used(ended: dict[str, Ended]) -> None:
    used = {each for job in ended.values() for each in job.used if each[0] in KINDS}
    assert used == {(part.kind, part.name) for part in PARTS}


@pytest.fixture(scope="module")
def undefined(platform: Any, job_of: Callable[..., Job]) -> list[Ended]:
    """A job whose loss is NaN at step 2, and one from step 4 on, after its checkpoint."""

    def job(name: str, steps: int, **updates: int) -> Job:
        surrogate = {"kind": "undefined", **updates}
        trainer = {"objective": {"surrogate": surrogate}, "checkpoint": {"every": 3}}
        return job_of(name=name, trainer=trainer, stop={"steps": steps})

    return run(platform, [job("once", 3, first=1, last=1), job("for-good", 20, first=3)])


def groups_named(job: Ended) -> dict[int, set[str]]:
    """Groups of skipped updates in the trainer's log, by step."""
    pattern = r"update skipped: its loss is not finite step=(\d+) .* groups=(\S+)"
    return {int(step): set(names.split(",")) for step, names in re.findall(pattern, job.trainer)}


def groups_at_fault(job: Ended) -> dict[int, set[str]]:
    """Groups with a token of the lowest log-prob of a trained batch, by step: its loss is NaN."""
    folder = job.folder / "trajectories"
    files = [*sorted(folder.glob("step-*.jsonl")), *folder.glob("final.jsonl")]
    episodes = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    lows = [(min(one["transcripts"][0]["logprobs"]), one["group_id"]) for one in episodes]
    batches = [lows[start : start + GROUPS * SIZE] for start in range(0, len(lows), GROUPS * SIZE)]
    return {
        step: {group for low, group in batch if low == min(batch)[0]}
        for step, batch in enumerate(batches, 1)
    }


def test_a_step_whose_loss_is_nan_is_skipped_and_counted(undefined: list[Ended]) -> None:
    job = undefined[0]
    assert job.status.state is JobState.SUCCEEDED, job.status.reason
    counted = {step: row["nonfinite_updates"] for step, row in job.steps.items()}
    assert counted == {1: 0, 2: 1, 3: 0}
    skipped = job.steps[2]
    assert (skipped["loss"], skipped["grad_norm"], skipped["skipped_updates"]) == (0, 0, 1)
    assert job.steps[3]["grad_norm"] > 0
    assert groups_named(job) == {2: groups_at_fault(job)[2]}


def test_the_third_in_a_row_fails_the_job_and_its_checkpoint_stays(
    undefined: list[Ended], group: RankGroup, tiny_model: Path
) -> None:
    job = undefined[1]
    counted = {step: row["nonfinite_updates"] for step, row in job.steps.items()}
    assert counted == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
    names, faulty = groups_named(job), groups_at_fault(job)
    assert names.keys() == {4, 5, 6}
    assert (names[4], names[5]) == (faulty[4], faulty[5])

    assert job.status.state is JobState.FAILED
    (path,) = (job.folder / "checkpoints").iterdir()
    assert job.status.reason.endswith(
        "trainer.objective: loss or gradient was NaN or infinite in 3 steps in a row, the last one "
        "step 6. These updates were skipped, so they changed no weights; the log of the trainer "
        "names their groups. Check the slots of the objective and trainer.optimizer.lr. "
        f"The newest checkpoint is of step 3: {path}"
    )
    kept = Checkpoints(path.parent, group=group, keep=2)
    assert kept.find(max_step=20) == FoundCheckpoint(3)
    policy = load_policy(str(tiny_model))
    shard(policy, group, dtype="float32")
    kept.load(3, policy, Optimizer(policy, OptimizerSpec(), total_steps=20))
    assert all(bool(torch.isfinite(each).all()) for each in policy.parameters())
