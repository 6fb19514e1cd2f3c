"""Finds stored episodes by reward, step, age, task, group or failure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from paceline.enums import Purpose, ScoreStatus, TokenSource
from paceline.errors import InvalidError
from paceline.front.api.episodes import ListedEpisode, NumberRange
from paceline.platform import wire
from paceline.types import Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.generation.submission import num_sampled, num_tokens
from paceline_experience.ledger.stored.samples import KeptSamples, PayloadNote
from paceline_experience.ledger.trajectories import step_of
from paceline_experience.store.payloads import PayloadStore, unpack

_FETCH_SIZE = 16
_MOST_NAMES = 4096  # looked at for one page
_TEXT_CHARS = 200
_RING, _SAMPLES = "r", "s"
_TOKEN = re.compile(
    r"r:[0-9]{1,19}(\.[0-9]{1,19})?(e\+[0-9]{1,3})?|s:[0-9]{1,15}/[\x20-\x7e]{1,300}"
)


@dataclass(frozen=True, slots=True)
class EpisodeQuery:
    """What an episode has to be; unset fields match all."""

    purpose: Purpose = Purpose.TRAIN
    group_id: str = ""
    task_id: str = ""  # what its task's id begins with
    reward: NumberRange = field(default_factory=NumberRange)
    step: NumberRange = field(default_factory=NumberRange)
    age: NumberRange = field(default_factory=NumberRange)
    status: ScoreStatus | None = None
    failed: bool = False
    dropped: bool = False
    trajectories: bool = False

    def matches(self, each: ListedEpisode) -> bool:
        """Whether an episode is asked for."""
        return (
            each.task_id.startswith(self.task_id)
            and self.reward.holds(each.reward)
            and self.step.holds(each.step)
            and self.age.holds(each.age)
            and self.status in (None, each.status)
            and (each.failed or not self.failed)
        )


@dataclass(frozen=True, slots=True)
class _StoredAt:
    """A stored payload, and the token of the page that begins after it."""

    name: str
    token: str
    step: int  # as its place in a list says; -1: its note or its version do


class EpisodeListing:
    """Lists what is stored of one job, in bounded pages."""

    def __init__(
        self, *, core: LedgerContext, payloads: PayloadStore, samples: KeptSamples
    ) -> None:
        self._core = core
        self._payloads = payloads
        self._samples = samples

    async def page(
        self, query: EpisodeQuery, *, page_size: int, page_token: str
    ) -> tuple[list[ListedEpisode], str]:
        """Episodes, newest first, and the token of the next page; empty: this is the last one.

        A page ends early once `limits.page_bytes` of payloads were read for it, found or not.

        Raises:
            InvalidError: the token was not issued by this service.
        """
        if page_token and not _TOKEN.fullmatch(page_token):
            raise InvalidError(f"page_token: {page_token[:80]!r} was not given by this service")
        found: list[ListedEpisode] = []
        left = self._core.limits.settings.page_bytes
        places, rest = await self._places(query, page_token)
        for start in range(0, len(places), _FETCH_SIZE):
            part = places[start : start + _FETCH_SIZE]
            names = [each.name for each in part]
            blobs = await self._payloads.find(names)
            notes = await self._samples.notes(names)
            for place, blob, note in zip(part, blobs, notes, strict=True):
                size, each = self._read(place, blob, note, query)
                found += [each] if each is not None else []
                left -= size
                if len(found) >= page_size or left <= 0:
                    is_last = place is places[-1] and not rest
                    return found, "" if is_last else place.token
        return found, rest

    async def _places(self, query: EpisodeQuery, token: str) -> tuple[list[_StoredAt], str]:
        """Payloads to look at, and the token of what comes after them."""
        part, _, at = token.partition(":")
        if query.dropped or part == _SAMPLES:
            return self._sampled(query, at)
        keys = self._core.keys
        ring = keys.eval_ring if query.purpose is Purpose.EVAL else keys.ring
        most = f"({at}" if at else "+inf"
        found = await self._core.store.scored(
            "ZREVRANGEBYSCORE", ring, most, "-inf", "LIMIT", 0, _MOST_NAMES
        )
        trained = query.purpose is not Purpose.EVAL
        places = [
            _StoredAt(name, f"{_RING}:{score!r}", step_of(score) + 1 if trained else -1)
            for name, score in found
        ]
        rest = places[-1].token if len(places) == _MOST_NAMES else ""
        if not rest and trained:
            sampled, _ = self._sampled(query, "")
            listed = {each.name for each in places}
            places += [each for each in sampled if each.name not in listed]
        return self._of_group(places, query), rest

    def _sampled(self, query: EpisodeQuery, at: str) -> tuple[list[_StoredAt], str]:
        places = [
            _StoredAt(name, f"{_SAMPLES}:{note.step}/{name}", note.step + 1)
            for name, note in self._samples.ordered(dropped=query.dropped)
        ]
        if at:
            step, _, name = at.partition("/")
            last = (int(step), name)
            places = [each for each in places if (each.step - 1, each.name) < last]
        return self._of_group(places, query), ""

    def _of_group(self, places: list[_StoredAt], query: EpisodeQuery) -> list[_StoredAt]:
        if not query.group_id:
            return places
        return [p for p in places if p.name.rsplit("/", 2)[0] == query.group_id]

    def _read(
        self, place: _StoredAt, blob: bytes | None, note: PayloadNote, query: EpisodeQuery
    ) -> tuple[int, ListedEpisode | None]:
        """Bytes read, and the episode if it is asked for; None too if it cannot be read."""
        if blob is None:
            return 0, None
        try:
            data = unpack(blob)
            message = pb.Trajectory.FromString(data)
            each = self._listed(message, place, note, query)
        except (zlib.error, DecodeError, ValueError):
            return len(blob), None
        return len(data), each if query.matches(each) else None

    def _listed(
        self, message: pb.Trajectory, place: _StoredAt, note: PayloadNote, query: EpisodeQuery
    ) -> ListedEpisode:
        versions = [run.version for t in message.transcripts for run in t.versions]
        oldest = min(versions, default=-1)
        purpose = wire.member_of(Purpose, message.purpose, "purpose")
        step, age = place.step, None
        if purpose is Purpose.EVAL:
            known = self._core.state.versions.get(oldest)
            step = known.step if known is not None else -1
        elif oldest >= 0:
            age = max(0, step - 1 - self._core.state.age(oldest))
        score = message.score
        return ListedEpisode(
            group_id=message.group_id,
            index=message.index,
            attempt=message.attempt,
            task_id=message.task_id,
            purpose=purpose,
            step=step,
            reward=score.reward,
            parts=dict(score.parts),
            status=wire.member_of(ScoreStatus, score.status, "status"),
            truncated=message.truncated,
            advantage=float(note.advantage) if note.advantage else None,
            age=age,
            tokens=sum(map(num_tokens, message.transcripts)),
            policy_tokens=sum(map(num_sampled, message.transcripts)),
            turns=_turns(message.transcripts),
            oldest_version=oldest,
            newest_version=max(versions, default=-1),
            answer=score.normalised_answer[:_TEXT_CHARS],
            text=message.response_text[:_TEXT_CHARS],
            dropped=note.dropped,
            total_s=message.timing.total_s,
            trajectory=wire.from_proto(message, Trajectory) if query.trajectories else None,
        )


def _turns(transcripts: Sequence[pb.Transcript]) -> int:
    policy = wire.number_of(TokenSource.POLICY)
    replies = sum(len(t.replies) for t in transcripts)
    return replies + sum(span.source == policy for t in transcripts for span in t.spans)
