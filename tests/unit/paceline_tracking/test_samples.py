"""Which steps get a table of trajectories, and what it says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from paceline.config.tracking import TrackedSamples
from paceline.enums import JobState, Purpose, TokenSource
from paceline.errors import UnavailableError
from paceline.isolation.code.tokenizers.jobs import JobTokenizer, LocalTokenizer
from paceline.tokens.chat import Tokenizer
from paceline.types import (
    Job,
    JobStatus,
    SamplingParams,
    Score,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline_tracking.history import HistoryReader, TrackedRow
from paceline_tracking.samples import Samples

WORDS = {"one": 0, "plus": 1, "is": 2, "two": 3}
JOB = Job(JobStatus("j", "j", "t", JobState.RUNNING, step=4), spec="{}")


def trajectory(version: int, group: int = 0) -> Trajectory:
    transcript = Transcript(
        tokens=(0, 1, 0, 3),
        spans=(TokenSpan(0, 3, TokenSource.ENVIRONMENT), TokenSpan(3, 4, TokenSource.POLICY)),
        logprobs=(-0.5,),
        versions=(VersionRun(version, 1),),
    )
    return Trajectory(
        group_id=f"j.{group}",
        index=1,
        attempt=0,
        task_id="t",
        purpose=Purpose.TRAIN,
        transcripts=(transcript,),
        score=Score(reward=0.5, parts={"exact": 0.5}),
        sampling=SamplingParams(max_tokens=1),
        truncated=True,
        response_text="two",
    )


class Kept:
    """The part of a ledger that is asked for samples."""

    def __init__(self, *found: Trajectory) -> None:
        self.found = found
        self.away = False
        self.tokenizers = 0

    async def job(self, job_id: str) -> Job:
        return JOB

    async def trajectories(self, job_id: str, count: int) -> Sequence[Trajectory]:
        if self.away:
            raise UnavailableError("away")
        return self.found[:count]

    async def tokenizer(self, job: Job) -> JobTokenizer:
        self.tokenizers += 1
        fast = FastTokenizer(WordLevel(WORDS, unk_token="one"))
        return LocalTokenizer(Tokenizer(fast=fast, special={}, template="", eos=()))


def of(kept: Kept, spec: TrackedSamples | None) -> Samples:
    return Samples(ledger=cast(HistoryReader, kept), job=JOB, spec=spec)


def train(step: int, **values: int) -> TrackedRow:
    return TrackedRow(step - 1, step, Purpose.TRAIN, dict(values))


async def test_a_sample_is_the_trajectory_as_text() -> None:
    samples = of(Kept(trajectory(7)), TrackedSamples(every=2))
    row = train(2, version=7)
    samples.note(row)
    index, (sample,) = await samples.of([row])
    assert index == 1
    assert (sample.prompt, sample.response) == ("one plus one", "two")
    assert (sample.reward, sample.parts) == (0.5, {"exact": 0.5})
    assert (sample.version, sample.truncated, sample.episode) == (7, True, "j.0/1")
    # Version 7 is that before step 2, and the job has come to step 4.
    assert sample.staleness == 2


@pytest.mark.parametrize(
    ("noted", "staleness"), [([], -1), ([TrackedRow(0, 3, Purpose.EVAL, {"version": 7})], 0)]
)
async def test_staleness_needs_the_step_of_the_version(
    noted: list[TrackedRow], staleness: int
) -> None:
    samples = of(Kept(trajectory(7)), TrackedSamples(every=2))
    for row in noted:
        samples.note(row)
    _, (sample,) = await samples.of([train(2)])
    assert sample.staleness == staleness


async def test_the_last_row_that_is_due_gets_the_newest() -> None:
    kept = Kept(*[trajectory(0, group) for group in range(5)])
    samples = of(kept, TrackedSamples(every=2, count=3))
    rows = [*map(train, range(1, 6)), TrackedRow(5, 6, Purpose.EVAL, {})]
    index, found = await samples.of(rows)
    assert index == 3
    assert [sample.episode for sample in found] == ["j.0/1", "j.1/1", "j.2/1"]
    await samples.of(rows)
    assert kept.tokenizers == 1


async def test_nothing_is_due_for_other_rows_or_without_the_section() -> None:
    kept = Kept(trajectory(0))
    assert await of(kept, TrackedSamples(every=10)).of([train(9), train(11)]) == (-1, ())
    assert await of(kept, TrackedSamples(every=1)).of([TrackedRow(0, 1, Purpose.EVAL, {})]) == (
        -1,
        (),
    )
    assert await of(kept, None).of([train(10)]) == (-1, ())
    assert kept.tokenizers == 0


async def test_what_cannot_be_had_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(trajectory(0))
    kept.away = True
    samples = of(kept, TrackedSamples(every=1))
    assert await samples.of([train(1)]) == (-1, ())
    assert "no samples" in caplog.text
    kept.away = False
    index, found = await samples.of([train(2)])
    assert (index, len(found)) == (1, 1)
