"""Turns of a policy whose weights rollout workers have: token by token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from paceline.enums import FinishReason
from paceline.errors import LimitError
from paceline.platform.telemetry.tracing import NOTHING, Span
from paceline.plugins import Observation
from paceline.tokens.transcript import TranscriptBuilder
from paceline.types import EpisodeProgress, SamplingParams, Transcript, episode_id
from paceline_environment.episodes.peers import EpisodePeers
from paceline_environment.episodes.resume import resume_plan, unread_turns
from paceline_environment.jobs import GroupContext, JobDialogue
from paceline_environment.rollouts.turn import PrefixHolders, Turn, traced
from paceline_environment.stages import JobStages


class TokenTurns:
    """Renders observations into tokens and lets rollout workers continue them."""

    is_full = False  # what does not fit is not shown

    def __init__(
        self,
        *,
        group: GroupContext,
        index: int,
        attempt: int,
        sampling: SamplingParams,
        peers: EpisodePeers,
        stages: JobStages,
        span: Span = NOTHING,
    ) -> None:
        self.truncated = False
        self._group, self._job, self._peers = group, group.job, peers
        self._index, self._attempt, self._span = index, attempt, span
        self._sampling = sampling
        self._stages = stages
        self._start = group.starts.get(index)
        self._builder = TranscriptBuilder()
        self._turn: Turn | None = None
        self._said: list[Sequence[int]] = []  # tokens of each turn
        self._observations: list[Observation] = []
        self._holders = group.holders
        self._dialogue: JobDialogue | None = None
        self._workers: list[str] = []
        self._worker = ""  # of the previous turn
        self._generate_s = 0.0
        self._turn_began: float | None = None  # while one is generated

    @property
    def samples(self) -> bool:
        """Whether a turn is being generated."""
        return self._turn_began is not None

    @property
    def num_sampled(self) -> int:
        """Policy tokens so far, including those of an unfinished turn."""
        return self._builder.num_policy_tokens + (len(self._turn.tokens) if self._turn else 0)

    @property
    def num_policy_tokens(self) -> int:
        """Policy tokens of finished turns."""
        return self._builder.num_policy_tokens

    @property
    def workers(self) -> Sequence[str]:
        """The rollout workers that have generated."""
        return self._workers

    @property
    def engine(self) -> tuple[str, str]:
        """Engine and precision of the last one."""
        return self._peers.policy.engine(self._workers[-1] if self._workers else "")

    def generate_s(self, now: float) -> float:
        """How long its tokens took to sample, including those of an unfinished turn."""
        began = self._turn_began
        return self._generate_s + (0.0 if began is None else now - began)

    def waited_s(self, now: float) -> float:
        """Nothing: `tasks.episode_timeout_s` includes the time that it waits for workers."""
        del now
        return 0.0

    def begin(self, observation: Observation, holders: PrefixHolders) -> None:
        """The first observation, whose prompt `holders` have."""
        self._observations.append(observation)
        self._holders = holders

    async def open(self) -> None:
        """Render the first observation; raises as `GroupContext.first`."""
        with self._span.child("render"):
            self._builder = await self._group.first(self._observations[0])

    async def act(self, number: int) -> str:
        """Generate the next turn; returns its text."""
        turn = self._begin_turn(number)
        self._turn_began = started = self._peers.clock()
        with self._stages.wait("generate"), self._traced(turn, number):
            reason = await self._peers.policy.generate(turn)
        self._generate_s += self._peers.clock() - started
        self._turn_began = None
        self._builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        self._turn = None
        self._workers.extend(name for name in turn.workers if name not in self._workers)
        self._worker = turn.last
        self.truncated = reason is FinishReason.LENGTH
        self._said.append(turn.tokens)
        return await self._turn_text(turn.tokens)

    def reward(self, reward: float) -> None:
        """Mark the last turn with the environment's reward."""
        if turns := self._builder.turns:
            self._builder.mark_step(turns[-1].start, reward=reward)

    async def show(self, observation: Observation) -> bool:
        """Append an observation; False: it does not fit."""
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
            return False
        if len(self._builder) + len(rendered.tokens) >= self._job.spec.sampling.max_context:
            return False
        self._builder.add_spans(rendered.tokens, rendered.spans)
        return True

    async def resume(
        self, progress: EpisodeProgress, *, replayable: bool
    ) -> tuple[str, ...] | None:
        """Restore the tokens of an earlier attempt, those of a turn that was cut off included."""
        unread = unread_turns(progress)
        if unread:
            actions = list(progress.actions)
            for place, tokens in unread.items():
                actions[place] = await self._turn_text(tokens)
            progress = replace(progress, actions=tuple(actions))
        plan = resume_plan(progress, replayable=replayable)
        if plan is None:
            return None
        self._builder = plan.builder
        self._said = [said for _, said in plan.steps]
        if plan.cut_off:
            tokens, logprobs, versions = plan.builder.pop_turn()
            turn = self._turn = self._make_turn(plan.builder.tokens.copy())
            turn.tokens, turn.logprobs, turn.versions = tokens, logprobs, versions
        if self._attempt > 1:  # else they are those of a sibling
            count = plan.num_policy_tokens
            self._peers.stages.tokens_resumed += count
            self._peers.metrics.add("resumed_tokens", count, failed_service="environment")
        return tuple(action for action, _ in plan.steps)

    def lacks_observation(self, num_actions: int) -> bool:
        """Whether the transcript ends with the turn of that many actions."""
        return num_actions == len(self._builder.turns) and not self._builder.awaits_policy

    def replayed(self, observation: Observation) -> None:
        """An observation that the transcript has already."""
        self._observations.append(observation)

    def transcript(self, *, several: bool) -> Transcript:
        """The transcript so far, including an unfinished turn."""
        builder, turn = self._builder, self._turn
        if turn is not None and turn.tokens:
            builder = TranscriptBuilder.resume(builder.build())
            builder.add_policy(turn.tokens, turn.logprobs, turn.versions)
        return builder.build(steps=several)

    def reward_turns(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Fields of `RewardTurn`, as messages would be copied; the last turn may not be a step."""
        rewards = {step.start: step.reward for step in self._builder.steps}
        spans = self._builder.turns
        return [
            {"text": text, "reward": rewards.get(at.start, 0.0), "num_tokens": at.end - at.start}
            for at, text in zip(spans, texts[: len(spans)], strict=False)
        ]

    async def _turn_text(self, tokens: Sequence[int]) -> str:
        has_tools = bool(self._observations[0].tools)
        return await self._job.tokens.turn_text(tokens, keep_special=has_tools)

    def _traced(self, turn: Turn, number: int) -> AbstractContextManager[None]:
        if not self._span:
            return nullcontext()
        return traced(turn, self._span.child("generate", turn=number))

    def _begin_turn(self, number: int) -> Turn:
        assignment, spec = self._group.assignment, self._job.spec
        turn = self._turn
        if turn is None:
            turn = self._turn = self._make_turn(self._builder.tokens.copy())
        name = episode_id(assignment.group_id, self._index)
        turn.request_id = f"{name}#{self._attempt}.{number}"
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
            stages=self._stages,
            resumed=self._attempt > 1 and not self._workers,
        )
