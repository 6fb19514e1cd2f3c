"""Turns of a model behind an outside endpoint: message by message, tokens are not known."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config.limits import LimitSettings
from paceline.errors import InvalidError, LimitError
from paceline.platform.telemetry.tracing import NOTHING, Span
from paceline.platform.transport.endpoints import RefusedError
from paceline.plugins import Observation
from paceline.types import EpisodeProgress, Reply, SamplingParams, Transcript
from paceline_environment.outside.history import ChatHistory
from paceline_environment.outside.model import OutsideModel
from paceline_environment.outside.replies import LENGTH, ChatTurn, is_full
from paceline_environment.rollouts.turn import PrefixHolders
from paceline_environment.stages import JobStages, Stages

ENGINE = "endpoint"


class ChatTurns:
    """Shows observations as messages and lets the endpoint answer them."""

    workers: Sequence[str] = ()
    engine = (ENGINE, "")

    def __init__(
        self,
        *,
        model: OutsideModel,
        limits: LimitSettings,
        sampling: SamplingParams,
        stages: Stages,
        job_stages: JobStages,
        span: Span = NOTHING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_full = False
        self._model, self._limits, self._sampling = model, limits, sampling
        self._stages, self._job_stages = stages, job_stages
        self._span, self._clock = span, clock
        self._history = ChatHistory()
        self._first = Observation()
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._replies: list[Reply] = []
        self._kept: ChatTurn | None = None  # of an earlier attempt, and no action yet
        self._generate_s = self._waited_s = 0.0
        self._waits_since: float | None = None
        self._asked_at: float | None = None

    @property
    def truncated(self) -> bool:
        """Whether the last turn ran out of tokens, or had no room."""
        cut = bool(self._replies) and self._replies[-1].finish_reason == LENGTH
        return self.is_full or cut

    @property
    def samples(self) -> bool:
        """Nothing of an unfinished turn could be saved."""
        return False

    @property
    def num_sampled(self) -> int:
        """Policy tokens as the endpoint counts them; a reply without a count has one."""
        return sum(max(reply.completion_tokens, 1) for reply in self._replies)

    @property
    def num_policy_tokens(self) -> int:
        """Policy tokens, as far as the endpoint counts them."""
        return sum(max(reply.completion_tokens, 0) for reply in self._replies)

    def generate_s(self, now: float) -> float:
        """How long the endpoint took to answer, repetitions included."""
        began = self._asked_at
        return self._generate_s + (0.0 if began is None else now - began)

    def waited_s(self, now: float) -> float:
        """How long its requests have waited for other ones of the job."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else now - since)

    def begin(self, observation: Observation, holders: PrefixHolders) -> None:
        """The first observation, with the tools of the episode."""
        del holders
        self._first, self._tools = observation, observation.tools

    async def open(self) -> None:
        """Show the first observation; raises `LimitError` if it is too long."""
        self._check_size(self._first)
        self._history.observed(self._first)

    async def act(self, number: int) -> str:
        """Ask for the next turn; returns its text, with calls of tools as Hermes writes them."""
        turn, self._kept = self._kept, None
        if turn is None:
            with self._span.child("generate", turn=number, kind="client") as span:
                turn = await self._ask()
                if span and turn is not None:
                    span.set(**_attributes(turn.reply, self._sampling))
        if turn is None:
            self.is_full = True
            return ""
        self._history.replied(turn.message)
        self._replies.append(turn.reply)
        return turn.reply.text

    async def _ask(self) -> ChatTurn | None:
        """The endpoint's turn; None: the dialogue has become too long for the model."""
        body = self._model.request(self._history.messages, self._tools, self._sampling)
        self._waits_since = self._clock()
        try:
            with self._stages.waits_on(ENGINE):
                return await self._model.ask(body, self._job_stages, begun=self._begun)
        except RefusedError as error:
            if not is_full(error):
                raise
            if not self._replies:
                raise InvalidError(error.message) from None
            return None
        finally:
            now = self._clock()
            self._generate_s, self._waited_s = self.generate_s(now), self.waited_s(now)
            self._asked_at = self._waits_since = None

    def _begun(self) -> None:
        now = self._clock()
        self._waited_s, self._waits_since = self.waited_s(now), None
        self._asked_at = now

    def reward(self, reward: float) -> None:
        """The environment's reward for the last turn."""
        if self._replies:
            self._replies[-1] = replace(self._replies[-1], reward=reward)

    async def show(self, observation: Observation) -> bool:
        """Show the next observation; False: it is too long, or the context is full."""
        last = self._replies[-1]
        if last.prompt_tokens + last.completion_tokens >= self._model.max_context:
            return False
        try:
            self._check_size(observation)
        except LimitError:
            return False
        self._history.observed(observation)
        return True

    async def resume(
        self, progress: EpisodeProgress, *, replayable: bool
    ) -> tuple[str, ...] | None:
        """Restore the dialogue of an earlier attempt; a reply without an action is kept."""
        first = progress.transcripts[0] if progress.transcripts else None
        if first is None or not first.replies or not replayable:
            return None
        history, replies = ChatHistory(json.loads(first.messages)), list(first.replies)
        if len(replies) == len(progress.actions) + 1 and history.ends_with_reply:
            self._kept = ChatTurn(replies.pop(), history.pop())
        if len(replies) != len(progress.actions):
            self._kept = None
            return None
        self._history, self._replies = history, replies
        self._stages.tokens_resumed += sum(max(r.completion_tokens, 0) for r in first.replies)
        return progress.actions

    def lacks_observation(self, num_actions: int) -> bool:
        """Whether the dialogue ends with the turn of that many actions."""
        return num_actions == len(self._replies) and self._history.ends_with_reply

    def replayed(self, observation: Observation) -> None:
        """The dialogue has it already."""

    def transcript(self, *, several: bool) -> Transcript:
        """The dialogue so far."""
        del several
        messages = json.dumps(self._history.messages)
        if self._kept is not None:
            messages = json.dumps([*self._history.messages, self._kept.message])
        kept = () if self._kept is None else (self._kept.reply,)
        return Transcript((), (), (), (), messages=messages, replies=(*self._replies, *kept))

    def reward_turns(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Fields of `RewardTurn` of each turn."""
        del texts
        return [
            {"text": r.text, "reward": r.reward, "num_tokens": max(r.completion_tokens, 0)}
            for r in self._replies
        ]

    def _check_size(self, observation: Observation) -> None:
        texts = [observation.text, *(message.content for message in observation.messages)]
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        most = self._limits.prompt_bytes
        if size > most:
            raise LimitError(f"limit prompt_bytes: an observation has {size} bytes; at most {most}")


def _attributes(reply: Reply, sampling: SamplingParams) -> dict[str, Any]:
    """Attributes of OpenTelemetry's conventions for generative AI."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.response.model": reply.model,
        "gen_ai.response.finish_reasons": [reply.finish_reason],
        "gen_ai.usage.input_tokens": reply.prompt_tokens,
        "gen_ai.usage.output_tokens": reply.completion_tokens,
    }
