"""One episode: reset, [render, generate, step]*, score. A topology drives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.chat import Dialogue
from paceline.errors import DeadlineError, LimitError, PacelineError
from paceline.interfaces import Environment, Observation, StepResult
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tasks.digest import number
from paceline.tracing import NOTHING, OFF, Span, Tracer
from paceline.transcript import TranscriptBuilder
from paceline.types import (
    Progress,
    Provenance,
    Sampling,
    Score,
    Timing,
    Trajectory,
    Transcript,
    VerifierStatus,
    episode_id,
)
from paceline.v1 import reward_pb2
from paceline_environment.jobs import Group
from paceline_environment.policy import Policy
from paceline_environment.scoring import Scoring
from paceline_environment.stages import Stages
from paceline_environment.turn import Turn

Result = TypeVar("Result")
log = Log("episode")


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom the episodes of a worker talk to."""

    worker_id: str
    policy: Policy
    scoring: Scoring
    stages: Stages
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = OFF


class ScoringFailedError(PacelineError):
    """The reward service could not score; says nothing about the episode."""


class Episode:
    """One attempt at a task. `over` once nothing more is to be said."""

    def __init__(
        self,
        *,
        group: Group,
        index: int,
        attempt: int,
        peers: Peers,
        progress: Progress | None,
        span: Span = NOTHING,
    ) -> None:
        assignment = group.assignment
        self.over = False
        self.environment_reward = 0.0
        self._group, self._job, self._peers = group, group.job, peers
        self._index, self._attempt = index, attempt
        self._progress = progress
        self._span = span
        self._environment = self._job.make_environment(assignment.purpose)
        self._builder = TranscriptBuilder()
        self._sampling = sampling_of(group, index)
        self._turn: Turn | None = None
        self._actions: list[str] = []
        self._ends: list[int] = []  # last token of each turn
        self._shown: list[Observation] = []
        self._dialogue: Dialogue | None = None
        self._truncated = False
        self._text = ""
        self._workers: list[str] = []
        self._worker = ""  # of the previous turn
        self._generate_s = self._environment_s = self._reward_s = 0.0

    @property
    def environment(self) -> Environment:
        """Its world."""
        return self._environment

    @property
    def num_sampled(self) -> int:
        """Policy tokens so far, those of an unfinished turn among them."""
        return self._builder.num_policy_tokens + (len(self._turn.tokens) if self._turn else 0)

    async def run(self) -> Trajectory:
        """From the start, or from the progress of an earlier attempt, to a scored trajectory.

        Raises:
            PacelineError: it has to be given back.
        """
        started = self._peers.clock()
        try:
            transcripts: tuple[Transcript, ...] = await self._job.topology(self)
        finally:
            await self._within(self._environment.close(), "close")
        score = await self._score()
        if score.status is VerifierStatus.INFRA_ERROR:
            raise ScoringFailedError(score.detail or "reward: infra_error")
        return self._trajectory(transcripts, score, self._peers.clock() - started)

    async def reset(self) -> None:
        """Start the world and show the first observation; go on from progress if there is any."""
        assignment = self._group.assignment
        observation = await self._within(
            self._environment.reset(assignment.task, assignment.seed), "reset"
        )
        self._shown.append(observation)
        if self._progress is not None and await self._resume(self._progress):
            return
        with self._span.child("render"):
            self._builder = self._group.first(observation)

    async def act(self) -> str:
        """Let the policy speak; its words."""
        turn = self._begin_turn()
        started = self._peers.clock()
        with self._peers.stages.wait("generate"), self._generating(turn):
            reason = await self._peers.policy.generate(turn)
        self._generate_s += self._peers.clock() - started
        self._builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        self._turn = None
        self._workers.extend(name for name in turn.workers if name not in self._workers)
        self._worker = turn.last
        self._truncated = reason == "length"
        self._ends.append(turn.tokens[-1] if turn.tokens else -1)
        self._text = self._job.tokenizer.decode(turn.tokens)
        return self._text

    async def step(self, action: str) -> None:
        """Apply an action and show what follows, if anything does and fits."""
        self._actions.append(action)
        if self._truncated and self._job.spec.sampling.truncated == "zero":
            self.over = True
            return
        result = await self._within(self._environment.step(action), "step")
        self._note(result)
        if not self.over:
            self._show(result.observation)

    def transcript(self) -> Transcript:
        """What was said so far, an unfinished turn included."""
        builder, turn = self._builder, self._turn
        if turn is not None and turn.tokens:
            builder = TranscriptBuilder.resume(builder.build())
            builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        return builder.build(steps=len(self._actions) > 1 or not self.over)

    def progress(self) -> Progress:
        """What another worker needs to go on."""
        return Progress(
            group_id=self._group.assignment.group_id,
            index=self._index,
            attempt=self._attempt,
            transcripts=(self.transcript(),),
            actions=tuple(self._actions),
        )

    @contextmanager
    def _generating(self, turn: Turn) -> Generator[None]:
        """The turn's span, under the names of the conventions for generative AI."""
        with self._span.child("generate", turn=len(self._actions)) as span:
            turn.span = span
            yield
            if span:
                span.set(
                    versions=[run.version for run in turn.versions],
                    **{
                        "gen_ai.operation.name": "text_completion",
                        "gen_ai.request.max_tokens": turn.sampling.max_tokens,
                        "gen_ai.request.temperature": turn.sampling.temperature,
                        "gen_ai.usage.input_tokens": len(turn.prefix),
                        "gen_ai.usage.output_tokens": len(turn.tokens),
                        "gen_ai.response.finish_reasons": [turn.finished() or "stop"],
                    },
                )

    def _begin_turn(self) -> Turn:
        assignment, spec = self._group.assignment, self._job.spec
        turn = self._turn
        if turn is None:
            turn = self._turn = self._make_turn(self._builder.tokens.copy())
        name = episode_id(assignment.group_id, self._index)
        turn.request_id = f"{name}#{self._attempt}.{len(self._actions)}"
        turn.previous = self._worker
        turns = self._builder.turns
        turn.shared = turns[0].start if turns else len(turn.prefix)
        room = spec.sampling.max_context - len(turn.prefix)
        if room < self._sampling.max_tokens:
            turn.sampling = replace(self._sampling, max_tokens=room)
        return turn

    def _make_turn(self, prefix: list[int]) -> Turn:
        return Turn(
            request_id="",
            job_id=self._job.job_id,
            prefix=prefix,
            sampling=self._sampling,
            pinned_version=self._group.assignment.pinned_version,
            min_version=self._group.assignment.min_version,
            timeout_s=self._job.spec.tasks.episode_timeout_s,
            home=self._group.home,
            resumed=self._attempt > 1 and not self._workers,
        )

    async def _resume(self, progress: Progress) -> bool:
        """Rebuild the world by its actions; False (and counted) where that cannot be done."""
        stages, metrics = self._peers.stages, self._peers.metrics
        transcript = progress.transcripts[0] if progress.transcripts else None
        if transcript is None or not transcript.tokens:
            return False
        builder = TranscriptBuilder.resume(transcript)
        num_turns, num_actions = len(builder.turns), len(progress.actions)
        unfinished = num_turns == num_actions + 1
        if not self._environment.replayable or not (unfinished or num_turns == num_actions):
            stages.restarted += 1
            stages.tokens_lost += transcript.num_policy_tokens
            metrics.add("lost_tokens", transcript.num_policy_tokens)
            log.warning("episode restarts", group=progress.group_id, index=self._index)
            return False
        ends = [builder.tokens[span.end - 1] for span in builder.turns]
        self._builder = builder
        for action, end in zip(progress.actions, ends, strict=False):
            await self._replay(action, end)
        if unfinished:
            tokens, logprobs, versions = builder.pop_turn()
            turn = self._turn = self._make_turn(builder.tokens.copy())
            turn.tokens, turn.logprobs, turn.versions = tokens, logprobs, versions
        stages.tokens_resumed += transcript.num_policy_tokens
        metrics.add("resumed_tokens", transcript.num_policy_tokens, on="environment")
        return True

    async def _replay(self, action: str, end: int) -> None:
        """Take one step again; what the policy was shown then is in the transcript already."""
        self._actions.append(action)
        self._ends.append(end)
        self._text = action
        result = await self._within(self._environment.step(action), "step")
        last = len(self._actions) == len(self._builder.turns) and not self._builder.awaits_policy
        self._note(result, again=not last)
        if self.over:
            return
        if last:
            self._show(result.observation)
        else:
            self._shown.append(result.observation)

    def _note(self, result: StepResult, *, again: bool = False) -> None:
        self.environment_reward += result.reward
        turns = self._builder.turns
        if not again and turns:
            self._builder.mark_step(turns[-1].start, reward=result.reward)
        if result.truncated:
            self._truncated = True
        self.over = result.done or self._truncated

    def _show(self, observation: Observation) -> None:
        """Append an observation; an episode for which it is too long ends as truncated."""
        if self._dialogue is None:
            self._dialogue = self._job.dialogue()
            for shown, end in zip(self._shown, self._ends, strict=True):
                self._dialogue.show(shown)
                self._dialogue.turn(end)
        else:
            self._dialogue.turn(self._ends[-1])
        self._shown.append(observation)
        try:
            with self._span.child("render"):
                rendered = self._dialogue.show(observation)
        except LimitError:
            self.over = self._truncated = True
            return
        if len(self._builder) + len(rendered.tokens) >= self._job.spec.sampling.max_context:
            self.over = self._truncated = True
            return
        self._builder.add_spans(rendered.tokens, rendered.spans)

    async def _within(self, work: Awaitable[Result], what: str) -> Result:
        limit_s = self._job.spec.tasks.step_timeout_s
        started = self._peers.clock()
        try:
            with self._peers.stages.wait("step"), self._span.child(f"environment.{what}"):
                async with asyncio.timeout(limit_s):
                    return await work
        except TimeoutError:
            raise DeadlineError(f"environment: {what} took more than {limit_s:g} s") from None
        finally:
            took_s = self._peers.clock() - started
            self._environment_s += took_s
            self._peers.metrics.add("calls", call=what)
            self._peers.metrics.add("call_seconds", took_s, call=what)

    async def _score(self) -> Score:
        if self._truncated and self._job.spec.sampling.truncated == "zero":
            return Score(reward=0.0, parts={}, detail="truncated")
        started = self._peers.clock()
        item = reward_pb2.ScoreItem(
            episode_id=episode_id(self._group.assignment.group_id, self._index),
            task=self._group.task,
            response_text=self._text,
            environment_reward=self.environment_reward,
            truncated=self._truncated,
        )
        scoring, stages, job = self._peers.scoring, self._peers.stages, self._job
        waiting = stages.waits_on(scoring.awaited(job.job_id))
        with stages.wait("score"), waiting, self._span.child("score", kind="client") as span:
            item.trace = span.sent
            score = await scoring.score(
                job_id=job.job_id,
                rewards=job.rewards,
                item=item,
                tenant=job.spec.tenant,
                part_s=job.part_s,
            )
        self._reward_s = self._peers.clock() - started
        return score

    def _trajectory(
        self, transcripts: tuple[Transcript, ...], score: Score, total_s: float
    ) -> Trajectory:
        assignment = self._group.assignment
        engine, precision = self._peers.policy.engine(self._workers[-1] if self._workers else "")
        return Trajectory(
            group_id=assignment.group_id,
            index=self._index,
            attempt=self._attempt,
            task_id=assignment.task.task_id,
            purpose=assignment.purpose,
            transcripts=transcripts,
            score=score,
            sampling=self._sampling,
            truncated=self._truncated,
            environment_reward=self.environment_reward,
            response_text=self._text,
            timing=Timing(self._generate_s, self._environment_s, self._reward_s, total_s),
            provenance=Provenance(
                environment_worker=self._peers.worker_id,
                rollout_workers=tuple(self._workers),
                engine=engine,
                precision=precision,
                trace=self._span.traceparent,
            ),
        )


def sampling_of(group: Group, index: int) -> Sampling:
    """How an episode is sampled; its seed depends on group and index, not on the attempt."""
    assignment = group.assignment
    seed = number(assignment.seed, index) >> 1
    return replace(group.job.samplings[assignment.purpose], seed=seed)
