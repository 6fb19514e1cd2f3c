"""What an environment worker knows of each job: read once, shared by all its episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline import artefacts, plugins
from paceline.chat import Dialogue, Tokenizer
from paceline.config import JobSpec, parse_job
from paceline.config.limits import LimitSettings
from paceline.errors import InvalidError
from paceline.interfaces import Environment, Observation
from paceline.rpc import call
from paceline.transcript import TranscriptBuilder
from paceline.types import Assignment, Purpose, Sampling, Source, Span
from paceline.v1 import jobs_pb2, types_pb2
from paceline_environment.turn import Home

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

_MOST_JOBS = 64


@dataclass(frozen=True, slots=True)
class JobContext:
    """A job as its episodes see it."""

    job_id: str
    spec: JobSpec
    tokenizer: Tokenizer
    environment: Callable[..., Environment]
    topology: Callable[..., Any]
    rewards: str  # JSON of the `reward:` section
    part_s: float  # seconds that its slowest part may take
    samplings: dict[Purpose, Sampling]
    options: dict[Purpose, dict[str, Any]]
    limits: LimitSettings

    def dialogue(self) -> Dialogue:
        """Renders the observations of one episode."""
        return Dialogue(self.tokenizer, max_bytes=self.limits.prompt_bytes)

    def make_environment(self, purpose: Purpose) -> Environment:
        """A world for one episode."""
        return self.environment(**self.options[purpose])


class Group:
    """What the episodes of an assignment share, the rendered first observation above all."""

    def __init__(self, *, job: JobContext, assignment: Assignment, task: types_pb2.Task) -> None:
        self.job = job
        self.assignment = assignment
        self.task = task
        self.home = Home()
        self._shown: dict[Any, tuple[tuple[int, ...], tuple[Span, ...]]] = {}

    def first(self, observation: Observation) -> TranscriptBuilder:
        """A transcript that begins with an observation, rendered once for all who see it.

        Raises:
            InvalidError: it leaves the policy no room to answer.
            LimitError: its text is too long to be looked at.
        """
        key = (observation.messages, observation.text)
        if key not in self._shown:
            self._shown[key] = _render_first(self.job, observation)
        tokens, spans = self._shown[key]
        builder = TranscriptBuilder()
        builder.add_spans(tokens, spans)
        return builder


def _render_first(
    job: JobContext, observation: Observation
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    shown = job.dialogue().show(observation)
    most = job.spec.sampling.max_context
    if len(shown.tokens) >= most:
        raise InvalidError(
            f"prompt of {len(shown.tokens)} tokens does not fit max_context {most}; "
            "raise sampling.max_context or make the tasks shorter"
        )
    # A policy needs something to go on from; an empty observation begins with an end token.
    if not shown.tokens:
        return job.tokenizer.eos[:1], (Span(0, 1, Source.TEMPLATE),)
    return shown.tokens, shown.spans


class Jobs:
    """Reads jobs from experience; one read for all who ask at the same time."""

    def __init__(
        self,
        *,
        jobs: JobsAsyncStub,
        experience: ExperienceAsyncStub,
        limits: LimitSettings | None = None,
    ) -> None:
        self._limits = limits or LimitSettings()
        self._jobs = jobs
        self._experience = experience
        self._known: dict[str, asyncio.Task[JobContext]] = {}

    def cached(self, job_id: str) -> JobContext | None:
        """The job, if it has been read."""
        task = self._known.get(job_id)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self, job_id: str) -> JobContext:
        """The job.

        Raises:
            InvalidError: it cannot be run here: a plug-in or the tokenizer is missing.
            PacelineError: experience cannot be reached.
        """
        if job_id not in self._known:
            if len(self._known) >= _MOST_JOBS:
                del self._known[next(iter(self._known))]
            self._known[job_id] = asyncio.create_task(self._read(job_id))
        reading = self._known[job_id]
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done() and (reading.cancelled() or reading.exception()):
                self._known.pop(job_id, None)

    async def _read(self, job_id: str) -> JobContext:
        request = jobs_pb2.GetJobRequest(job_id=job_id)
        job = await call(self._jobs.GetJob, request, timeout_s=20.0, idempotent=True)
        spec = parse_job(json.loads(job.spec_json))
        digests = job.artefacts.items()
        files = {name: await artefacts.fetch(self._experience, digest) for name, digest in digests}
        return build_context(job_id, spec, Tokenizer.from_files(files), limits=self._limits)


def build_context(
    job_id: str, spec: JobSpec, tokenizer: Tokenizer, *, limits: LimitSettings
) -> JobContext:
    """Find the plug-ins of a job and fix how it samples."""
    sampling = spec.sampling
    train = Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_tokens=tokenizer.eos,
        stop_strings=sampling.stop,
    )
    samplings, options = {Purpose.TRAIN: train}, {Purpose.TRAIN: spec.tasks.options}
    if spec.eval is not None:
        samplings[Purpose.EVAL] = replace(train, temperature=spec.eval.temperature)
        options[Purpose.EVAL] = {**spec.tasks.options, **spec.eval.options}
    return JobContext(
        job_id=job_id,
        spec=spec,
        tokenizer=tokenizer,
        environment=plugins.find("environments", spec.tasks.environment),
        topology=plugins.find("topologies", "linear"),
        rewards=json.dumps([part.model_dump(mode="json") for part in spec.reward]),
        part_s=max(part.timeout_s for part in spec.reward),
        samplings=samplings,
        options=options,
        limits=limits,
    )
