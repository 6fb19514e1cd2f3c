"""One episode: reset, [render, generate, step]*, score. A topology decides who speaks when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from paceline.enums import FinishReason, ScoreStatus
from paceline.errors import LimitError, PacelineError
from paceline.plugins import Environment, Observation, StepResult
from paceline.telemetry.logs import Log
from paceline.telemetry.metrics import Metrics
from paceline.telemetry.tracing import NOTHING, OFF, Span, Tracer
from paceline.tokens.transcript import TranscriptBuilder
from paceline.types import (
    EpisodeProgress,
    Provenance,
    Score,
    Timing,
    Trajectory,
    Transcript,
    episode_id,
)
from paceline.v1 import reward_pb2
from paceline_environment.episodes.calls import EnvironmentCalls, loads_of
from paceline_environment.episodes.resume import has_begun, resume_plan, unread_turns
from paceline_environment.episodes.texts import texts_of
from paceline_environment.jobs import GroupContext, JobDialogue
from paceline_environment.rollouts.failover import PolicyClient
from paceline_environment.rollouts.turn import Turn, traced
from paceline_environment.scoring import Scoring
from paceline_environment.stages import Stages
from paceline_environment.variants import ShownVariant, with_prompt

Result = TypeVar("Result")
log = Log("episode")


@dataclass(frozen=True, slots=True)
class EpisodePeers:
    """Clients and instruments that all episodes of a worker share."""

    worker_id: str
    policy: PolicyClient
    scoring: Scoring
    stages: Stages
    calls: EnvironmentCalls
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = OFF


class ScoringFailedError(PacelineError):
    """The reward service failed to score an episode; the episode itself may be fine."""


class Episode:
    """One attempt at a task, run by `task`. `over` once the policy has no further turn."""

    def __init__(
        self,
        *,
        group: GroupContext,
        index: int,
        attempt: int,
        peers: EpisodePeers,
        task: asyncio.Task[None],
        progress: EpisodeProgress | None,
        span: Span = NOTHING,
    ) -> None:
        assignment = group.assignment
        self.over = False
        self.environment_reward = 0.0
        self.sampled = False  # it needs no further tokens
        self.changes = 0  # of what `progress` returns, while no turn is generated
        self.scored_with_others = False  # those that came with the same reply
        self._group, self._job, self._peers = group, group.job, peers
        self._index, self._attempt = index, attempt
        self._progress, self._span = progress, span
        self._environment = self._job.make_environment(assignment)
        limit_s, loads = self._job.spec.tasks.step_timeout_s, loads_of(self._environment)
        self._stages = peers.stages.of(self._job.job_id)
        self._call = peers.calls.of(limit_s, task, loads, stages=self._stages)
        self._builder = TranscriptBuilder()
        self._start = group.starts.get(index)
        self._sampling = group.sampling_of(index)
        self._turn: Turn | None = None
        self._actions: list[str] = []
        self._said: list[Sequence[int]] = []  # tokens of each turn
        self._observations: list[Observation] = []
        self._own: Observation | None = None  # the first one, before it was transformed
        self._variant: ShownVariant | None = None
        self._holders = group.holders
        self._dialogue: JobDialogue | None = None
        self._truncated = False
        self._text = ""
        self._workers: list[str] = []
        self._worker = ""  # of the previous turn
        self._generate_s = self._environment_s = self._reward_s = 0.0
        self._turn_began: float | None = None  # while one is generated

    @property
    def environment(self) -> Environment:
        """The environment that the episode runs in."""
        return self._environment

    @property
    def samples(self) -> bool:
        """Whether a turn is being generated."""
        return self._turn_began is not None

    @property
    def num_sampled(self) -> int:
        """Policy tokens so far, including those of an unfinished turn."""
        return self._builder.num_policy_tokens + (len(self._turn.tokens) if self._turn else 0)

    def sampling_s(self, now: float) -> float:
        """How long its tokens took to sample, including those of an unfinished turn."""
        began = self._turn_began
        return self._generate_s + (0.0 if began is None else now - began)

    async def run(self) -> Trajectory:
        """Run from the start, or from the progress of an earlier attempt, and score the result.

        Raises:
            PacelineError: the attempt failed and its lease has to be given back.
        """
        started = self._peers.clock()
        try:
            transcripts = await self._job.topology(self)
        finally:
            await self._timed(self._environment.close(), "close")
        self.sampled = True
        self.changes += 1
        score = await self._score()
        if score.status is ScoreStatus.INFRA_ERROR:
            raise ScoringFailedError(score.detail or "reward: infra_error")
        transcripts = await self._submitted(transcripts)
        texts = await texts_of(transcripts, self._group)
        return self._trajectory(transcripts, score, texts, self._peers.clock() - started)

    async def reset(self) -> None:
        """Reset the environment and render its first observation, or resume from progress."""
        assignment = self._group.assignment
        observation = await self._timed(
            self._environment.reset(assignment.task, assignment.seed), "reset"
        )
        if self._job.transform is not None:
            observation = await self._transformed(observation)
        self._observations.append(observation)
        if self._progress is not None:
            resumed = await self._resume(self._progress)
            self.changes += 1
            if resumed:
                return
        with self._span.child("render"):
            self._builder = await self._group.first(observation)

    async def _transformed(self, observation: Observation) -> Observation:
        self._own = observation
        with self._span.child("transform"):
            self._variant = await self._group.shown(observation, self._index)
        if self._variant is None:
            return observation
        self._holders = self._group.holders_of(self._variant.observation)
        return self._variant.observation

    async def act(self) -> str:
        """Generate the next turn; returns its text."""
        turn = self._begin_turn()
        self._turn_began = started = self._peers.clock()
        with self._stages.wait("generate"), self._traced(turn):
            reason = await self._peers.policy.generate(turn)
        self._generate_s += self._peers.clock() - started
        self._turn_began = None
        self.changes += 1
        self._builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        self._turn = None
        self._workers.extend(name for name in turn.workers if name not in self._workers)
        self._worker = turn.last
        self._truncated = reason is FinishReason.LENGTH
        self._said.append(turn.tokens)
        self._text = await self._turn_text(turn.tokens)
        return self._text

    async def _turn_text(self, tokens: Sequence[int]) -> str:
        has_tools = bool(self._observations[0].tools)
        return await self._job.tokenizer.turn_text(tokens, keep_special=has_tools)

    async def step(self, action: str) -> None:
        """Apply an action and render the next observation, unless the episode is over."""
        self._actions.append(action)
        if self._truncated and self._job.spec.sampling.on_truncation == "zero":
            self.over = True
            return
        result = await self._timed(self._environment.step(action), "step")
        self._record(result)
        if not self.over:
            await self._show(result.observation)

    def transcript(self) -> Transcript:
        """The transcript so far, including an unfinished turn."""
        builder, turn = self._builder, self._turn
        if turn is not None and turn.tokens:
            builder = TranscriptBuilder.resume(builder.build())
            builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        # The mark of an only turn says nothing, unless the environment has rewarded it.
        several = len(self._actions) > 1 or not self.over
        return builder.build(steps=several or self.environment_reward != 0.0)

    def progress(self) -> EpisodeProgress:
        """What another worker needs to resume this episode."""
        return EpisodeProgress(
            group_id=self._group.assignment.group_id,
            index=self._index,
            attempt=self._attempt,
            transcripts=(self.transcript(),),
            actions=tuple(self._actions),
            sampled=self.sampled,
        )

    def _traced(self, turn: Turn) -> AbstractContextManager[None]:
        if not self._span:
            return nullcontext()
        return traced(turn, self._span.child("generate", turn=len(self._actions)))

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
        remaining = spec.sampling.max_context - len(turn.prefix)
        if self._start is not None and self._start.max_tokens:
            left = self._start.max_tokens - self._builder.num_policy_tokens
            remaining = min(remaining, max(left, 1))
        if remaining < self._sampling.max_tokens:
            turn.sampling = replace(self._sampling, max_tokens=remaining)
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
            holders=self._holders,
            resumed=self._attempt > 1 and not self._workers,
        )

    async def _resume(self, progress: EpisodeProgress) -> bool:
        """Rebuild the environment from the actions; False if the episode has to restart."""
        unread = unread_turns(progress)
        if unread:
            actions = list(progress.actions)
            for place, tokens in unread.items():
                actions[place] = await self._turn_text(tokens)
            progress = replace(progress, actions=tuple(actions))
        plan = resume_plan(progress, replayable=self._environment.replayable)
        stages, metrics = self._peers.stages, self._peers.metrics
        if plan is None:
            if has_begun(progress):
                lost = progress.transcripts[0].num_policy_tokens
                stages.restarted += 1
                stages.tokens_lost += lost
                metrics.add("lost_tokens", lost)
                log.warning("episode restarts", group=progress.group_id, index=self._index)
            return False
        self._builder = plan.builder
        for action, said in plan.steps:
            await self._replay(action, said)
        if plan.cut_off:
            tokens, logprobs, versions = plan.builder.pop_turn()
            turn = self._turn = self._make_turn(plan.builder.tokens.copy())
            turn.tokens, turn.logprobs, turn.versions = tokens, logprobs, versions
        if self._attempt > 1:  # else they are those of a sibling
            stages.tokens_resumed += plan.num_policy_tokens
            metrics.add("resumed_tokens", plan.num_policy_tokens, failed_service="environment")
        return True

    async def _replay(self, action: str, said: Sequence[int]) -> None:
        """Repeat a step; the transcript already has its observation unless it was the last one."""
        self._actions.append(action)
        self._said.append(said)
        self._text = action
        result = await self._timed(self._environment.step(action), "step")
        last = len(self._actions) == len(self._builder.turns) and not self._builder.awaits_policy
        self._record(result, replayed=not last)
        if self.over:
            return
        if last:
            await self._show(result.observation)
        else:
            self._observations.append(result.observation)

    def _record(self, result: StepResult, *, replayed: bool = False) -> None:
        self.environment_reward += result.reward
        turns = self._builder.turns
        if not replayed and turns:
            self._builder.mark_step(turns[-1].start, reward=result.reward)
        if result.truncated or (not result.done and self._is_spent()):
            self._truncated = True
        self.over = result.done or self._truncated

    def _is_spent(self) -> bool:
        """Whether the limits of an allocator leave it no further turn."""
        start = self._start
        if start is None:
            return False
        turns, tokens = len(self._actions), self._builder.num_policy_tokens
        return 0 < start.max_turns <= turns or 0 < start.max_tokens <= tokens

    async def _show(self, observation: Observation) -> None:
        """Append an observation; if it does not fit, the episode ends as truncated."""
        if self._dialogue is None:
            self._dialogue = self._job.dialogue()
            for earlier, said in zip(self._observations, self._said, strict=True):
                await self._dialogue.show(earlier)
                self._dialogue.turn(said)
        else:
            self._dialogue.turn(self._said[-1])
        self._observations.append(observation)
        try:
            with self._span.child("render"):
                rendered = await self._dialogue.show(observation)
        except LimitError:
            self.over = self._truncated = True
            return
        if len(self._builder) + len(rendered.tokens) >= self._job.spec.sampling.max_context:
            self.over = self._truncated = True
            return
        self._builder.add_spans(rendered.tokens, rendered.spans)

    async def _timed(self, work: Awaitable[Result], name: str) -> Result:
        """Await a call of the environment, within the job's `step_timeout_s`."""
        call = self._call
        try:
            with call.begin(name), self._span.child(f"environment.{name}"):
                return await work
        finally:
            self._environment_s += call.seconds

    async def _score(self) -> Score:
        if self._truncated and self._job.spec.sampling.on_truncation == "zero":
            return Score(reward=0.0, parts={}, detail="truncated")
        started = self._peers.clock()
        variant, meta = self._told()
        item = reward_pb2.ScoreItem(
            episode_id=episode_id(self._group.assignment.group_id, self._index),
            task=self._group.task,
            response_text=self._text,
            environment_reward=self.environment_reward,
            truncated=self._truncated,
            turns=self._turns(),  # pyright: ignore[reportArgumentType]
            max_tokens=self._sampling.max_tokens,
            variant=variant,
            variant_meta=meta,
        )
        scoring, job = self._peers.scoring, self._job
        waiting = self._peers.stages.waits_on(scoring.awaited(job.job_id))
        with self._stages.wait("score"), waiting, self._span.child("score", kind="client") as span:
            if span:
                item.trace = span.sent
            score = await scoring.score(
                job_id=job.job_id,
                rewards=job.rewards,
                item=item,
                tenant=job.spec.tenant,
                code=job.spec.code.digest if job.spec.code else "",
                part_s=job.part_s,
            )
        self._reward_s = self._peers.clock() - started
        self.scored_with_others = True
        return score

    def _told(self) -> tuple[str, str]:
        """Name and meta of the variant."""
        if self._variant is not None:
            return self._variant.name, self._variant.meta
        return (self._start.variant, self._start.meta) if self._start else ("", "")

    async def _submitted(self, transcripts: tuple[Transcript, ...]) -> tuple[Transcript, ...]:
        """The transcripts, with the task's own prompt if they are to be trained so."""
        if self._variant is None or not self._variant.original or self._own is None:
            return transcripts
        prompt = (await self._group.first(self._own)).build()
        return tuple(with_prompt(each, prompt) for each in transcripts)

    def _turns(self) -> list[dict[str, Any]]:
        """Fields of `RewardTurn`, as messages would be copied; the last turn may not be a step."""
        rewards = {step.start: step.reward for step in self._builder.steps}
        spans = self._builder.turns
        texts = [*self._actions, self._text][: len(spans)]
        return [
            {"text": text, "reward": rewards.get(at.start, 0.0), "num_tokens": at.end - at.start}
            for at, text in zip(spans, texts, strict=False)
        ]

    def _trajectory(
        self,
        transcripts: tuple[Transcript, ...],
        score: Score,
        texts: tuple[str, str],
        total_s: float,
    ) -> Trajectory:
        assignment = self._group.assignment
        variant, meta = self._told()
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
            topology=self._job.spec.sampling.topology.kind,
            environment_reward=self.environment_reward,
            response_text=self._text,
            prompt_text=texts[0],
            completion_text=texts[1],
            timing=Timing(self._generate_s, self._environment_s, self._reward_s, total_s),
            provenance=Provenance(
                environment_worker=self._peers.worker_id,
                rollout_workers=tuple(self._workers),
                engine=engine,
                precision=precision,
                prompt_variant=variant,
                variant_meta=meta,
                trace=self._span.traceparent,
            ),
        )
