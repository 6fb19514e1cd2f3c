"""One turn of the policy: its request, and the tokens sampled so far."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.enums import FinishReason
from paceline.platform.telemetry.tracing import NOTHING, Span
from paceline.types import SamplingParams, VersionRun
from paceline_environment.stages import JobStages


@dataclass(slots=True)
class PrefixHolders:
    """The rollout workers that hold the common prefix of a group's episodes."""

    workers: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class TurnEnd:
    """How generation ended on one worker."""

    reason: FinishReason
    code: str = ""  # name of a gRPC status, if the reason is `ERROR`
    text: str = ""


@dataclass(slots=True)
class Turn:
    """Tokens are appended as they arrive, so that progress of an unfinished turn can be saved."""

    request_id: str
    job_id: str
    prefix: Sequence[int]
    sampling: SamplingParams  # of the whole turn
    pinned_version: int
    min_version: int
    timeout_s: float
    holders: PrefixHolders
    shared: int = 0  # length of the prefix that the group's episodes have in common
    previous: str = ""  # worker of the episode's previous turn: it holds most of the prefix
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[VersionRun] = field(default_factory=list[VersionRun])
    workers: list[str] = field(default_factory=list[str])
    last: str = ""  # the newest of `workers`
    sends: int = 0
    stages: JobStages | None = None  # of the episode
    resumed: bool = False  # begun on another worker; the next token is logged
    span: Span = NOTHING
    ending: asyncio.Future[TurnEnd] | None = None

    @property
    def weight(self) -> int:
        """Maximum number of tokens that a worker holds for it."""
        return len(self.prefix) + self.sampling.max_tokens

    @property
    def held(self) -> dict[str, int]:
        """Tokens of the prefix by worker that has seen them; it may have evicted them since."""
        held = dict.fromkeys(self.holders.workers, self.shared)
        if self.previous:
            held[self.previous] = len(self.prefix)
        return held

    def finished(self) -> FinishReason | None:
        """The finish reason as far as the tokens show it; None if the turn can continue."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.sampling.max_tokens else None

    def end(self, ending: TurnEnd) -> None:
        """Wake the caller that awaits `ending`; a second call has no effect."""
        if self.ending is not None and not self.ending.done():
            self.ending.set_result(ending)


@contextmanager
def traced(turn: Turn, span: Span) -> Generator[None]:
    """Trace a turn with the attributes of OpenTelemetry's conventions for generative AI."""
    with span:
        turn.span = span
        yield
        span.set(
            versions=[run.version for run in turn.versions],
            **{
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.max_tokens": turn.sampling.max_tokens,
                "gen_ai.request.temperature": turn.sampling.temperature,
                "gen_ai.usage.input_tokens": len(turn.prefix),
                "gen_ai.usage.output_tokens": len(turn.tokens),
                "gen_ai.response.finish_reasons": [turn.finished() or FinishReason.STOP],
            },
        )
