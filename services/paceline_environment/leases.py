"""The lease stream: assignments in, credits and renewals out. Reconnects without losing any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.enums import GiveBackReason
from paceline.errors import PacelineError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.linger import Linger, at_once
from paceline.platform.transport.rpc import backoff_s, exchange
from paceline.types import Assignment, EpisodeProgress
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2
from paceline_environment.coalesce import portions

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub

_REASONS = wire.numbers_of(GiveBackReason, pb.GiveBackReason.DESCRIPTOR)
_DRAIN = _REASONS[GiveBackReason.DRAIN]
log = Log("leases")
_STREAM_S = 24 * 3600.0
_MAX_BACKOFF_S = 1.0
_MAX_TOKENS = 500_000  # per message, well below the limit of gRPC


class Key(NamedTuple):
    """An attempt at an episode."""

    job_id: str
    group_id: str
    sibling: int
    attempt: int


GivenBack = tuple[Key, GiveBackReason, str]  # the last is a detail for humans


@dataclass(slots=True)
class LeaseOutbox:
    """Content of the next message."""

    credits: int = 0
    eval_credits: int = 0
    progress: list[EpisodeProgress] = field(default_factory=list[EpisodeProgress])
    renew: list[Key] = field(default_factory=list[Key])
    give_back: list[GivenBack] = field(default_factory=list[GivenBack])
    renew_is_complete: bool = False  # `renew` names every open episode


class LeaseClient:
    """Client of `Experience.Lease`.

    `receive` gets what to start, to abort, and to give back with its progress. `hello` returns the
    first message of a stream: all free slots, and all open episodes to renew.
    """

    def __init__(
        self,
        *,
        experience: ExperienceAsyncStub,
        worker_id: str,
        environments: Sequence[str],
        hello: Callable[[], LeaseOutbox],
        receive: Callable[[list[Assignment], list[Key], list[Key]], None],
        linger: Linger = at_once,
    ) -> None:
        self._experience = experience
        self._first = {"worker_id": worker_id, "environments": environments}
        self._hello = hello
        self._receive = receive
        self._linger = linger
        self._outbox = LeaseOutbox()
        self._wake = asyncio.Event()
        self._finishing = False
        self._stream = 0

    def add_credits(self, train: int, evals: int) -> None:
        """Offer slots that have become free."""
        self._outbox.credits += train
        self._outbox.eval_credits += evals
        self._wake.set()

    def renew(self, keys: Sequence[Key], progress: Sequence[EpisodeProgress]) -> None:
        """Renew leases; `progress` also renews those of its episodes."""
        self._outbox.renew.extend(keys)
        self._outbox.progress.extend(progress)
        self._wake.set()

    def give_back(self, key: Key, reason: GiveBackReason, detail: str) -> None:
        """Give a lease back, so that another worker can take the episode."""
        self._outbox.give_back.append((key, reason, detail))
        self._wake.set()

    def finish(self) -> None:
        """Send what is queued and close the stream; `run` then returns."""
        self._finishing = True
        self._wake.set()

    async def run(self) -> None:
        """Keep a stream open until `finish` is called."""
        attempt = 0
        while not self._finishing:
            try:
                requests = self._requests()
                async for reply in exchange(self._experience.Lease, requests, timeout_s=_STREAM_S):
                    attempt = 0
                    self._receive(
                        [wire.from_proto(message, Assignment) for message in reply.assignments],
                        [_key_of(m) for m in reply.abort if m.reason != _DRAIN],
                        [_key_of(m) for m in reply.abort if m.reason == _DRAIN],
                    )
            except PacelineError as error:
                log.warning("lease stream lost", error=error)
            finally:
                # Nothing else ends the request iterator of the old stream.
                self._stream += 1
                self._wake.set()
            if not self._finishing:
                await asyncio.sleep(backoff_s(attempt, max_s=_MAX_BACKOFF_S))
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
            await asyncio.sleep(self._linger())
            wake.clear()
            if stream != self._stream:
                return
            for message in self._messages():
                yield message

    def _messages(self, **first: object) -> list[pb.LeaseRequest]:
        outbox, self._outbox = self._outbox, LeaseOutbox()
        return messages(outbox, **first)


def messages(outbox: LeaseOutbox, **first: object) -> list[pb.LeaseRequest]:
    """Split an outbox into messages that fit; `first` are further fields of the first message.

    Progress comes first: it is only accepted for episodes that are still leased.
    """
    requests = [pb.LeaseRequest(**first)]  # pyright: ignore[reportArgumentType]
    for number, part in enumerate(
        portions(outbox.progress, size=_num_tokens, max_size=_MAX_TOKENS)
    ):
        if number:
            requests.append(pb.LeaseRequest())
        requests[-1].progress.extend(
            wire.to_proto(progress, types_pb2.EpisodeProgress) for progress in part
        )
    last = requests[-1]
    last.credits, last.eval_credits = outbox.credits, outbox.eval_credits
    last.renew.extend(_key(key) for key in outbox.renew)
    last.renew_is_complete = outbox.renew_is_complete
    last.give_back.extend(_key(*key) for key in outbox.give_back)
    return requests


def _num_tokens(progress: EpisodeProgress) -> int:
    return sum(len(transcript.tokens) for transcript in progress.transcripts)


def _key_of(message: pb.EpisodeKey) -> Key:
    return Key(message.job_id, message.group_id, message.index, message.attempt)


def _key(key: Key, reason: GiveBackReason | None = None, detail: str = "") -> pb.EpisodeKey:
    return pb.EpisodeKey(
        job_id=key.job_id,
        group_id=key.group_id,
        index=key.sibling,
        attempt=key.attempt,
        reason=_REASONS[reason] if reason else pb.GIVE_BACK_REASON_UNSPECIFIED,
        detail=detail,
    )
