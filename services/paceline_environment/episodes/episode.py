"""One episode: reset, [render, generate, step]*, score. A topology decides who speaks when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from paceline.enums import ScoreStatus
from paceline.errors import PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.tracing import NOTHING, Span
from paceline.plugins import Environment, Observation, StepResult
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
from paceline_environment.episodes.calls import loads_of
from paceline_environment.episodes.peers import EpisodePeers
from paceline_environment.episodes.policies.base import PolicyTurns
from paceline_environment.episodes.policies.chat_turns import ChatTurns
from paceline_environment.episodes.policies.token_turns import TokenTurns
from paceline_environment.episodes.resume import has_begun, num_policy_tokens
from paceline_environment.episodes.texts import texts_of
from paceline_environment.jobs import GroupContext
from paceline_environment.variants import ShownVariant, with_prompt

Result = TypeVar("Result")
log = Log("episode")


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
        self._stages = peers.stages.of(self._job.job_id, assignment.pinned_version)
        self._call = peers.calls.of(limit_s, task, loads, stages=self._stages)
        self._start = group.starts.get(index)
        self._sampling = group.sampling_of(index)
        self._policy = self._policy_turns()
        self._actions: list[str] = []
        self._own: Observation | None = None  # the first one, before it was transformed
        self._variant: ShownVariant | None = None
        self._truncated = False
        self._text = ""
        self._environment_s = self._reward_s = 0.0

    @property
    def environment(self) -> Environment:
        """The environment that the episode runs in."""
        return self._environment

    @property
    def samples(self) -> bool:
        """Whether a turn is being generated."""
        return self._policy.samples

    @property
    def num_sampled(self) -> int:
        """Policy tokens so far, including those of an unfinished turn."""
        return self._policy.num_sampled

    def sampling_s(self, now: float) -> float:
        """How long its tokens took to sample, including those of an unfinished turn."""
        return self._policy.generate_s(now)

    def waited_s(self, now: float) -> float:
        """Waiting time so far that does not count against `tasks.episode_timeout_s`."""
        return self._policy.waited_s(now)

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
        holders = self._group.holders
        if self._variant is not None:
            holders = self._group.holders_of(observation)
        self._policy.begin(observation, holders)
        if self._progress is not None:
            resumed = await self._resume(self._progress)
            self.changes += 1
            if resumed:
                return
        await self._policy.open()

    async def _transformed(self, observation: Observation) -> Observation:
        self._own = observation
        with self._span.child("transform"):
            self._variant = await self._group.shown(observation, self._index)
        return observation if self._variant is None else self._variant.observation

    async def act(self) -> str:
        """Let the policy take its turn; returns its text."""
        text = await self._policy.act(len(self._actions))
        self.changes += 1
        self._truncated = self._policy.truncated
        if not self._policy.is_full:
            self._text = text
        return text

    async def step(self, action: str) -> None:
        """Apply an action and render the next observation, unless the episode is over."""
        if self._policy.is_full:
            self.over = True
            return
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
        # The mark of an only turn says nothing, unless the environment has rewarded it.
        several = len(self._actions) > 1 or not self.over
        return self._policy.transcript(several=several or self.environment_reward != 0.0)

    def progress(self) -> EpisodeProgress:
        """The progress that another worker needs to resume this episode."""
        return EpisodeProgress(
            group_id=self._group.assignment.group_id,
            index=self._index,
            attempt=self._attempt,
            transcripts=(self.transcript(),),
            actions=tuple(self._actions),
            sampled=self.sampled,
        )

    def _policy_turns(self) -> PolicyTurns:
        if (model := self._job.outside) is not None:
            return ChatTurns(
                model=model,
                limits=self._job.limits,
                sampling=self._sampling,
                stages=self._peers.stages,
                job_stages=self._stages,
                span=self._span,
                clock=self._peers.clock,
            )
        return TokenTurns(
            group=self._group,
            index=self._index,
            attempt=self._attempt,
            sampling=self._sampling,
            peers=self._peers,
            stages=self._stages,
            span=self._span,
        )

    async def _resume(self, progress: EpisodeProgress) -> bool:
        """Rebuild the environment from the actions; False if the episode has to restart."""
        actions = await self._policy.resume(progress, replayable=self._environment.replayable)
        if actions is None:
            if has_begun(progress):
                lost = num_policy_tokens(progress)
                self._peers.stages.restarted += 1
                self._peers.stages.tokens_lost += lost
                self._peers.metrics.add("lost_tokens", lost)
                log.warning("episode restarts", group=progress.group_id, index=self._index)
            return False
        for action in actions:
            await self._replay(action)
        return True

    async def _replay(self, action: str) -> None:
        """Repeat a step; the transcript already has its observation unless it was the last one."""
        self._actions.append(action)
        self._text = action
        result = await self._timed(self._environment.step(action), "step")
        last = self._policy.lacks_observation(len(self._actions))
        self._record(result, replayed=not last)
        if self.over:
            return
        if last:
            await self._show(result.observation)
        else:
            self._policy.replayed(result.observation)

    def _record(self, result: StepResult, *, replayed: bool = False) -> None:
        self.environment_reward += result.reward
        if not replayed:
            self._policy.reward(result.reward)
        if result.truncated or (not result.done and self._is_spent()):
            self._truncated = True
        self.over = result.done or self._truncated

    def _is_spent(self) -> bool:
        """Whether the limits of an allocator leave it no further turn."""
        start = self._start
        if start is None:
            return False
        turns, tokens = len(self._actions), self._policy.num_policy_tokens
        return 0 < start.max_turns <= turns or 0 < start.max_tokens <= tokens

    async def _show(self, observation: Observation) -> None:
        """Show the next observation; if it does not fit, the episode ends as truncated."""
        if not await self._policy.show(observation):
            self.over = self._truncated = True

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
        variant, meta = self._variant_name_and_meta()
        item = reward_pb2.ScoreItem(
            episode_id=episode_id(self._group.assignment.group_id, self._index),
            task=self._group.task,
            response_text=self._text,
            environment_reward=self.environment_reward,
            truncated=self._truncated,
            turns=self._policy.reward_turns([*self._actions, self._text]),  # pyright: ignore[reportArgumentType]
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

    def _variant_name_and_meta(self) -> tuple[str, str]:
        """Name and meta of the variant."""
        if self._variant is not None:
            return self._variant.name, self._variant.meta
        return (self._start.variant, self._start.meta) if self._start else ("", "")

    async def _submitted(self, transcripts: tuple[Transcript, ...]) -> tuple[Transcript, ...]:
        """The transcripts, with the task's own prompt if they are to be trained so."""
        is_other = self._variant is not None and self._variant.original
        if not is_other or self._own is None or self._job.outside is not None:
            return transcripts
        prompt = (await self._group.first(self._own)).build()
        return tuple(with_prompt(transcript, prompt) for transcript in transcripts)

    def _trajectory(
        self,
        transcripts: tuple[Transcript, ...],
        score: Score,
        texts: tuple[str, str],
        total_s: float,
    ) -> Trajectory:
        assignment = self._group.assignment
        variant, meta = self._variant_name_and_meta()
        engine, precision = self._policy.engine
        generate_s = self._policy.generate_s(self._peers.clock())
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
            timing=Timing(generate_s, self._environment_s, self._reward_s, total_s),
            provenance=Provenance(
                environment_worker=self._peers.worker_id,
                rollout_workers=tuple(self._policy.workers),
                engine=engine,
                precision=precision,
                prompt_variant=variant,
                variant_meta=meta,
                trace=self._span.traceparent,
            ),
        )
