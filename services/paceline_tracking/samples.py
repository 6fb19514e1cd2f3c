"""Samples trajectories of a job for trackers, every `every` steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.config.tracking import TrackedSamples
from paceline.enums import Purpose
from paceline.errors import PacelineError
from paceline.isolation.code.tokenizers.jobs import JobTokenizer
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TrackedSample
from paceline.types import Job
from paceline_tracking.history import HistoryReader, TrackedRow
from paceline_tracking.points import prompt_of, sample_of

log = Log("samples")


class Samples:
    """Samples of one job for one tracker."""

    def __init__(self, *, ledger: HistoryReader, job: Job, spec: TrackedSamples | None) -> None:
        self._ledger = ledger
        self._job = job
        self._spec = spec
        self._tokenizer: JobTokenizer | None = None
        self._steps: dict[int, int] = {}  # by version

    def note(self, row: TrackedRow) -> None:
        """Learn the step of a version: the one before the first row that names it."""
        version = row.values.get("version")
        if isinstance(version, int):
            step = row.step if row.kind is Purpose.EVAL else row.step - 1
            self._steps.setdefault(version, step)

    async def of(self, rows: Sequence[TrackedRow]) -> tuple[int, Sequence[TrackedSample]]:
        """The index of the last row that is due for samples, and the newest trajectories.

        Samples are optional: if they cannot be read, there are none. -1: nothing is due.
        """
        if self._spec is None:
            return -1, ()
        due = [
            row for row in rows if row.kind is Purpose.TRAIN and row.step % self._spec.every == 0
        ]
        if not due:
            return -1, ()
        try:
            return due[-1].index, await self._newest(due[-1], self._spec.count)
        except PacelineError as error:
            log.warning("no samples", job=self._job.status.job_id, error=error)
            return -1, ()

    async def _newest(self, row: TrackedRow, count: int) -> Sequence[TrackedSample]:
        job_id = self._job.status.job_id
        found = await self._ledger.trajectories(job_id, count)
        if self._tokenizer is None:
            self._tokenizer = await self._ledger.tokenizer(self._job)
        step = max(row.step, (await self._ledger.job(job_id)).status.step)
        text = partial(self._tokenizer.turn_text, keep_special=False)
        return [
            sample_of(
                each,
                prompt=await text(prompt_of(each)),
                staleness=self._staleness(each.oldest_version, step),
            )
            for each in found
        ]

    def _staleness(self, version: int, step: int) -> int:
        """Staleness in steps when trained, estimated from the job's step; -1: unknown."""
        known = self._steps.get(version)
        return -1 if known is None else max(step - 1 - known, 0)
