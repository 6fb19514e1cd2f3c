"""The context of a job in an environment worker: read once, shared by all of its episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.config import JobSpec, job_of
from paceline.config.job import RewardSpec
from paceline.config.limits import LimitSettings
from paceline.config.named import own_transform, problems
from paceline.enums import Purpose, TokenSource
from paceline.errors import InvalidError
from paceline.isolation.code.tokenizers.jobs import JobTokenizer, LocalTokenizers, Tokenizers
from paceline.platform.digest import number
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.server import artifacts
from paceline.platform.server.job_records import fetch_job
from paceline.platform.transport.endpoints import WorkerEndpoints
from paceline.plugins import (
    Environment,
    Observation,
    Topology,
    TransformContext,
    declared,
    registry,
)
from paceline.tokens.chat import Rendered
from paceline.tokens.dialogue import DialogueState
from paceline.tokens.transcript import TranscriptBuilder
from paceline.types import Assignment, EpisodeStart, SamplingParams, TokenSpan
from paceline.v1 import types_pb2
from paceline_environment.outside.model import OutsideModel
from paceline_environment.rollouts.turn import PrefixHolders
from paceline_environment.scoring import MAX_ITEMS
from paceline_environment.variants import Call, JobTransform, ShownVariant, parsed
from paceline_environment.worlds.factories import Settings, own_transform_of, worlds_of
from paceline_environment.worlds.worlds import JobWorlds

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub

_MAX_JOBS = 64
_NO_START = EpisodeStart()
_First = tuple[tuple[int, ...], tuple[TokenSpan, ...]]


@dataclass(frozen=True, slots=True)
class JobContext:
    """A job as its episodes see it."""

    job_id: str
    spec: JobSpec
    tokenizer: JobTokenizer | None  # None: an outside endpoint answers
    environment: Callable[..., Environment]
    topology: Topology
    rewards: str  # JSON of the `reward:` section
    part_s: float  # longest time of its reward parts for the items of a call, in seconds
    sampling: SamplingParams
    eval_temperatures: dict[str, float]  # by name of the eval
    options: dict[Purpose, dict[str, dict[str, Any]]]  # and by name of the eval; training: empty
    limits: LimitSettings
    transform: JobTransform | None = None
    outside: OutsideModel | None = None  # the model of an outside endpoint

    @property
    def tokens(self) -> JobTokenizer:
        """The tokenizer of a job that has one."""
        assert self.tokenizer is not None
        return self.tokenizer

    def dialogue(self) -> JobDialogue:
        """Renders the observations of one episode."""
        return JobDialogue(self.tokens, max_bytes=self.limits.prompt_bytes)

    def make_environment(self, assignment: Assignment) -> Environment:
        """An environment for one episode."""
        return self.environment(**self.options[assignment.purpose][assignment.eval_set])

    def sampling_of(self, assignment: Assignment, *, seed: int) -> SamplingParams:
        """How an episode is sampled."""
        if assignment.purpose is not Purpose.EVAL:
            return replace(self.sampling, seed=seed)
        temperature = self.eval_temperatures[assignment.eval_set]
        return replace(self.sampling, seed=seed, temperature=temperature)


class JobDialogue:
    """A dialogue that the job's tokenizer renders, wherever it runs."""

    def __init__(self, tokenizer: JobTokenizer, *, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._state = DialogueState(max_bytes=max_bytes)

    async def show(self, observation: Observation) -> Rendered:
        """Tokens of an observation, given everything before it; raises as `JobTokenizer.show`."""
        rendered, prefix = await self._tokenizer.show(self._state.observed(observation))
        self._state.shown(prefix)
        return rendered

    def turn(self, tokens: Sequence[int]) -> None:
        """End the policy's turn, of these tokens; its last ones may be the template's end."""
        self._state.turn(tokens)


class GroupContext:
    """State that the episodes of an assignment share, above all the rendered first observation."""

    def __init__(self, *, job: JobContext, assignment: Assignment, task: types_pb2.Task) -> None:
        self.job = job
        self.assignment = assignment
        self.task = task
        self.holders = PrefixHolders()  # of the environment's own prompt
        self._holders: dict[Any, PrefixHolders] = {}
        starts = assignment.starts
        self.starts = dict(zip(assignment.indices, starts, strict=True)) if starts else {}
        self._rendered: dict[Any, _First | InvalidError] = {}
        self._rendering = asyncio.Lock()
        self._texts: dict[tuple[int, ...], str] = {}  # of prompts
        self._decoding = asyncio.Lock()
        self._shown: dict[Any, ShownVariant | InvalidError] = {}
        self._transforming = asyncio.Lock()

    def sampling_of(self, index: int) -> SamplingParams:
        """How an episode is sampled; its seed depends on its index, not on its attempt."""
        seed = number(self.assignment.seed, index) >> 1
        sampling = self.job.sampling_of(self.assignment, seed=seed)
        start = self.starts.get(index)
        if start is None or not start.temperature:
            return sampling
        return replace(sampling, temperature=start.temperature)

    def holders_of(self, observation: Observation) -> PrefixHolders:
        """The rollout workers that hold the prompt of a variant."""
        return self._holders.setdefault(_key(observation), PrefixHolders())

    async def shown(self, observation: Observation, index: int) -> ShownVariant | None:
        """A first observation as the job's transform shows it, once for all that start alike.

        None: the job has none.

        Raises:
            InvalidError: the transform has failed.
            PacelineError: it took too long.
        """
        transform = self.job.transform
        if transform is None:
            return None
        start = self.starts.get(index) or _NO_START
        key = (_key(observation), start.variant, start.meta, start.tasks)
        async with self._transforming:
            if key not in self._shown:
                try:
                    context = self._transform_context(start)
                    self._shown[key] = await transform(observation, context)
                except InvalidError as error:  # it would fail for its siblings too
                    self._shown[key] = error
        variant = self._shown[key]
        if isinstance(variant, InvalidError):
            raise type(variant)(variant.message)
        if variant.original and self.job.outside is None:
            await self.first(observation)
        return variant

    def _transform_context(self, start: EpisodeStart) -> TransformContext:
        assignment = self.assignment
        return TransformContext(
            task=assignment.task,
            purpose=assignment.purpose,
            seed=assignment.seed,
            variant=start.variant,
            meta=parsed(start.meta),
            tasks=tuple(assignment.tasks[place] for place in start.tasks),
        )

    async def first(self, observation: Observation) -> TranscriptBuilder:
        """A transcript that begins with an observation, rendered once per group.

        Raises:
            InvalidError: it leaves the policy no tokens to answer with.
            LimitError: its text is longer than limit prompt_bytes.
            PacelineError: the tokenizer is out of reach.
        """
        key = _key(observation)
        rendered = self._rendered.get(key)
        if rendered is None:
            rendered = await self._render(key, observation)
        if isinstance(rendered, InvalidError):
            raise type(rendered)(rendered.message)
        tokens, spans = rendered
        builder = TranscriptBuilder()
        builder.add_spans(tokens, spans)
        return builder

    async def prompt_text(self, tokens: tuple[int, ...]) -> str:
        """The text of a prompt, decoded once per group; raises as `JobTokenizer.turn_text`."""
        async with self._decoding:
            if tokens not in self._texts:
                text = await self.job.tokens.turn_text(tokens, keep_special=True)
                self._texts[tokens] = text
            return self._texts[tokens]

    async def _render(self, key: Any, observation: Observation) -> _First | InvalidError:
        async with self._rendering:
            if key not in self._rendered:
                try:
                    self._rendered[key] = await _render_first(self.job, observation)
                except InvalidError as error:  # its siblings need not find it out for themselves
                    self._rendered[key] = error
            return self._rendered[key]


def _key(observation: Observation) -> Any:
    tools = repr(observation.tools) if observation.tools else ""
    return (observation.messages, observation.text, tools)


async def _render_first(job: JobContext, observation: Observation) -> _First:
    rendered = await job.dialogue().show(observation)
    max_context = job.spec.sampling.max_context
    if len(rendered.tokens) >= max_context:
        raise InvalidError(
            f"prompt of {len(rendered.tokens)} tokens does not fit max_context {max_context}; "
            "raise sampling.max_context or make the tasks shorter"
        )
    # An engine needs at least one token of context: an empty observation becomes an end token.
    if not rendered.tokens:
        return job.tokens.eos[:1], (TokenSpan(0, 1, TokenSource.TEMPLATE),)
    return rendered.tokens, rendered.spans


class Jobs:
    """Reads jobs from experience and caches them; concurrent callers share one read."""

    def __init__(
        self,
        *,
        jobs: JobsAsyncStub,
        experience: ExperienceAsyncStub,
        worlds: JobWorlds,
        tokenizers: Tokenizers | None = None,
        limits: LimitSettings | None = None,
        settings: Settings | None = None,
        endpoints: WorkerEndpoints | None = None,
    ) -> None:
        """`settings` of an operator for environments, by name; `tokenizers`: here if null."""
        self._endpoints = endpoints or WorkerEndpoints({})
        self._tokenizers = tokenizers or LocalTokenizers()
        self._limits = limits or LimitSettings()
        self._settings = settings or {}
        self._jobs = jobs
        self._worlds = worlds
        self._experience = experience
        self._known: dict[str, asyncio.Task[JobContext]] = {}

    def cached(self, job_id: str) -> JobContext | None:
        """A job that has been read; None if it has not."""
        task = self._known.get(job_id)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()

    async def get(self, job_id: str) -> JobContext:
        """A job, from the cache or from experience.

        Raises:
            InvalidError: this worker cannot run it: a plug-in or the tokenizer is missing.
            InstallError: what its code requires cannot be installed.
            PacelineError: experience cannot be reached.
        """
        if job_id not in self._known:
            if len(self._known) >= _MAX_JOBS:
                del self._known[next(iter(self._known))]
            self._known[job_id] = asyncio.create_task(self._read(job_id))
        reading = self._known[job_id]
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done() and (reading.cancelled() or reading.exception()):
                self._known.pop(job_id, None)

    async def _read(self, job_id: str) -> JobContext:
        job = await fetch_job(self._jobs, job_id, timeout_s=20.0)
        spec = job_of(job)
        tokenizer = outside = None
        if spec.model.endpoint is None:
            files = partial(self._files, job.artifacts)
            tokenizer = await self._tokenizers.of(job_id, files)
        else:
            outside = OutsideModel(self._endpoints, job_id, spec)
        if spec.code is not None and (spec.has_own_environment or own_transform(spec)):
            await self._worlds.prepare(spec.code.digest, QueueOwner(spec.tenant, job_id))
        return build_context(
            job_id,
            spec,
            tokenizer,
            limits=self._limits,
            environment=worlds_of(job_id, spec, self._worlds, self._settings),
            own_transform=own_transform_of(job_id, spec, self._worlds),
            outside=outside,
        )

    async def _files(self, digests: Mapping[str, str]) -> dict[str, bytes]:
        entries = digests.items()
        return {name: await artifacts.fetch(self._experience, digest) for name, digest in entries}


def _topology(spec: JobSpec) -> Topology:
    plugin = spec.sampling.topology
    if wrong := list(problems(spec, {"topologies", "transforms"}, in_process=True)):
        raise InvalidError("; ".join(wrong))
    return partial(registry.find("topologies", plugin.kind), **plugin.options)


def _transform(spec: JobSpec, own: Call | None) -> JobTransform | None:
    plugin, timeout_s = spec.tasks.transform, spec.tasks.step_timeout_s
    if plugin is None:
        return None
    if own is not None:
        return JobTransform(own, kind=plugin.kind, timeout_s=timeout_s)
    return JobTransform.of(plugin, timeout_s=timeout_s)


def build_context(
    job_id: str,
    spec: JobSpec,
    tokenizer: JobTokenizer | None,
    *,
    limits: LimitSettings,
    environment: Callable[..., Environment],
    own_transform: Call | None = None,
    outside: OutsideModel | None = None,
) -> JobContext:
    """Load a job's plug-ins and compute its sampling parameters.

    `own_transform` calls the transform of the job's own code, if it is there.
    """
    sampling = spec.sampling
    train = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_tokens=() if tokenizer is None else tokenizer.eos,
        stop_strings=sampling.stop,
    )
    evals = spec.eval_sets.items()
    options = {
        Purpose.TRAIN: {"": spec.tasks.options},
        Purpose.EVAL: {
            name: {**spec.tasks.options, **evaluation.options} for name, evaluation in evals
        },
    }
    return JobContext(
        job_id=job_id,
        spec=spec,
        tokenizer=tokenizer,
        environment=environment,
        topology=_topology(spec),
        rewards=json.dumps([part.model_dump(mode="json") for part in spec.reward]),
        part_s=max(_part_s(part) for part in spec.reward),
        sampling=train,
        eval_temperatures={name: evaluation.temperature for name, evaluation in evals},
        options=options,
        limits=limits,
        transform=_transform(spec, own_transform),
        outside=outside,
    )


def _part_s(part: RewardSpec) -> float:
    """Seconds that a reward part may take for a call.

    Children report each score in time, or are replaced; programs and endpoints may all
    take as long as they may.
    """
    declaration = declared(registry.options_of("rewards", part.kind))
    takes_turns = declaration.programs or declaration.endpoints
    return part.timeout_s * (MAX_ITEMS if takes_turns else 1)
