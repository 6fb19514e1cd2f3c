"""One turn of the policy: what is asked, and what has come of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.tracing import NOTHING, Span
from paceline.types import Sampling, VersionRun


@dataclass(slots=True)
class Home:
    """The rollout workers that hold what the episodes of a group begin with."""

    workers: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class Ending:
    """How an answer ended at one worker."""

    reason: str  # stop | length | abort | error
    code: str = ""  # gRPC status name, with reason error
    text: str = ""


@dataclass(slots=True)
class Turn:
    """Grows while the policy speaks; whoever looks sees every token that has arrived."""

    request_id: str
    job_id: str
    prefix: Sequence[int]
    sampling: Sampling  # of the whole turn
    pinned_version: int
    min_version: int
    timeout_s: float
    home: Home
    shared: int = 0  # first tokens of the prefix that the group's episodes have in common
    previous: str = ""  # worker of the episode's previous turn: it holds most of the prefix
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[VersionRun] = field(default_factory=list[VersionRun])
    workers: list[str] = field(default_factory=list[str])
    last: str = ""  # the newest of them
    sends: int = 0
    resumed: bool = False  # begun by another worker; its next token is told of in the log
    span: Span = NOTHING
    ending: asyncio.Future[Ending] | None = None

    @property
    def weight(self) -> int:
        """Tokens that a worker has to hold for it."""
        return len(self.prefix) + self.sampling.max_tokens

    @property
    def held(self) -> dict[str, int]:
        """Tokens of the prefix that workers hold, as far as they keep them."""
        held = dict.fromkeys(self.home.workers, self.shared)
        if self.previous:
            held[self.previous] = len(self.prefix)
        return held

    def finished(self) -> str:
        """Reason to stop that the tokens alone tell; empty if more can follow."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_tokens else ""

    def end(self, ending: Ending) -> None:
        """Wake who waits for it."""
        if self.ending is not None and not self.ending.done():
            self.ending.set_result(ending)
