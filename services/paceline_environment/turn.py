"""One turn of the policy: what is asked, and what has come of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.types import Sampling, VersionRun


@dataclass(slots=True)
class Home:
    """The rollout worker that holds the prefix of a group's episodes."""

    worker_id: str = ""


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
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[VersionRun] = field(default_factory=list[VersionRun])
    workers: list[str] = field(default_factory=list[str])
    sends: int = 0
    ending: asyncio.Future[Ending] | None = None

    @property
    def weight(self) -> int:
        """Tokens that a worker has to hold for it."""
        return len(self.prefix) + self.sampling.max_tokens

    def finished(self) -> str:
        """Reason to stop that the tokens alone tell; empty if more can follow."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.sampling.max_tokens else ""

    def end(self, ending: Ending) -> None:
        """Wake who waits for it."""
        if self.ending is not None and not self.ending.done():
            self.ending.set_result(ending)
