"""The stream on which work comes in; made anew, and nothing forgotten, whenever it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline import wire
from paceline.errors import PacelineError
from paceline.logs import Log
from paceline.rpc import backoff_s, exchange
from paceline.types import Assignment, Progress
from paceline.v1 import experience_pb2 as pb
from paceline_environment.coalesce import portions

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub

log = Log("leases")
_STREAM_S = 24 * 3600.0
_WINDOW_S = 0.01
_MOST_PAUSE_S = 1.0  # before a broken stream is made anew
_MOST_TOKENS = 500_000  # of one message, well below the limit of gRPC


class Key(NamedTuple):
    """An attempt at an episode."""

    job_id: str
    group_id: str
    sibling: int
    attempt: int


@dataclass(slots=True)
class Outbox:
    """What the next message will say."""

    credits: int = 0
    eval_credits: int = 0
    progress: list[Progress] = field(default_factory=list[Progress])
    renew: list[Key] = field(default_factory=list[Key])
    give_back: list[tuple[Key, str, str]] = field(default_factory=list[tuple[Key, str, str]])
    holds_no_more: bool = False  # `renew` names every open episode


class Leases:
    """Client of `Experience.Lease`.

    `hello` says what a new stream begins with: all free slots, and all open episodes to renew.
    """

    def __init__(
        self,
        *,
        experience: ExperienceAsyncStub,
        worker_id: str,
        environments: Sequence[str],
        hello: Callable[[], Outbox],
        receive: Callable[[list[Assignment], list[Key]], None],
    ) -> None:
        self._experience = experience
        self._first = {"worker_id": worker_id, "environments": environments}
        self._hello = hello
        self._receive = receive
        self._outbox = Outbox()
        self._wake = asyncio.Event()
        self._finishing = False
        self._stream = 0

    def add_credits(self, train: int, evals: int) -> None:
        """Slots have become free."""
        self._outbox.credits += train
        self._outbox.eval_credits += evals
        self._wake.set()

    def renew(self, keys: Sequence[Key], progress: Sequence[Progress]) -> None:
        """Keep leases; `progress` renews those it speaks of."""
        self._outbox.renew.extend(keys)
        self._outbox.progress.extend(progress)
        self._wake.set()

    def give_back(self, key: Key, reason: str, detail: str) -> None:
        """Let someone else try."""
        self._outbox.give_back.append((key, reason, detail))
        self._wake.set()

    def finish(self) -> None:
        """Send what is left and close the stream; `run` returns."""
        self._finishing = True
        self._wake.set()

    async def run(self) -> None:
        """Lease until told to finish."""
        attempt = 0
        while not self._finishing:
            try:
                requests = self._requests()
                async for reply in exchange(self._experience.Lease, requests, timeout_s=_STREAM_S):
                    attempt = 0
                    self._receive(
                        [wire.assignment_from(message) for message in reply.assignments],
                        [Key(m.job_id, m.group_id, m.index, m.attempt) for m in reply.abort],
                    )
            except PacelineError as error:
                log.warning("lease stream lost", error=error)
            finally:
                # Ends the old stream's request iterator, which nobody else does.
                self._stream += 1
                self._wake.set()
            if not self._finishing:
                await asyncio.sleep(backoff_s(attempt, most_s=_MOST_PAUSE_S))
                attempt += 1

    async def _requests(self) -> AsyncIterator[pb.LeaseRequest]:
        stream, wake = self._stream, asyncio.Event()
        self._wake = wake
        stale, self._outbox = self._outbox, self._hello()
        self._outbox.give_back.extend(stale.give_back)
        self._outbox.progress.extend(stale.progress)
        for message in self._messages(**self._first):
            yield message
        while not self._finishing:
            await wake.wait()
            await asyncio.sleep(_WINDOW_S)
            wake.clear()
            if stream != self._stream:
                return
            for message in self._messages():
                yield message

    def _messages(self, **first: object) -> list[pb.LeaseRequest]:
        said, self._outbox = self._outbox, Outbox()
        return messages(said, **first)


def messages(said: Outbox, **first: object) -> list[pb.LeaseRequest]:
    """What there is to say, in messages that fit; `first` are more fields of the first one.

    Progress comes first: what is given back is not leased any more.
    """
    made = [pb.LeaseRequest(**first)]  # pyright: ignore[reportArgumentType]
    for number, part in enumerate(portions(said.progress, size=_tokens, most=_MOST_TOKENS)):
        if number:
            made.append(pb.LeaseRequest())
        made[-1].progress.extend(wire.progress_to(progress) for progress in part)
    last = made[-1]
    last.credits, last.eval_credits = said.credits, said.eval_credits
    last.renew.extend(_key(key) for key in said.renew)
    last.holds_no_more = said.holds_no_more
    last.give_back.extend(_key(*each) for each in said.give_back)
    return made


def _tokens(progress: Progress) -> int:
    return sum(len(transcript.tokens) for transcript in progress.transcripts)


def _key(key: Key, reason: str = "", detail: str = "") -> pb.EpisodeKey:
    return pb.EpisodeKey(
        job_id=key.job_id,
        group_id=key.group_id,
        index=key.sibling,
        attempt=key.attempt,
        reason=reason,
        detail=detail,
    )
