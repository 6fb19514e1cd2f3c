"""What workers submit, as the ledger records it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.enums import ScoreStatus
from paceline.platform import wire
from paceline.platform.text import clipped
from paceline.types import Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.generation.prefix import inherited
from paceline_experience.ledger.records import EpisodeSummary, summary_text
from paceline_experience.ledger.state import payload_name
from paceline_experience.store.payloads import pack
from paceline_experience.tenancy.quotas import JobLimits

ANSWER_BYTES = 256
Submitted = Trajectory | pb.Trajectory | bytes
"""An episode's trajectory, or its message, or the bytes of that."""
MODEL_BYTES = 128
_STATUSES = wire.members_of(ScoreStatus, pb.ScoreStatus.DESCRIPTOR)
MAX_TURNS = 64  # of which the outcome is kept, for allocators


class Verdict(StrEnum):
    """The outcome of an attempt; values as `report.lua` expects them."""

    OK = "ok"
    REQUEUE = "again"  # an infrastructure failure, or an expired lease
    DRAIN = "drain"  # its worker drains: uses up no attempt
    INVALID = "invalid"
    OVERSIZED = "oversized"
    GONE = "gone"  # its pinned version is gone


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one attempt."""

    group_id: str
    index: int
    attempt: int
    verdict: Verdict
    detail: str = ""  # human-readable
    result: EpisodeSummary | None = None  # None: not finished
    is_lost: bool = False  # its worker has not said how it ended

    @property
    def attempt_key(self) -> tuple[str, int, int]:
        """Group, index and number of the attempt."""
        return self.group_id, self.index, self.attempt

    @property
    def unusable(self) -> bool:
        """Whether another attempt would end the same way, so that the group is dropped."""
        return self.verdict in {Verdict.INVALID, Verdict.OVERSIZED}

    def script_argument(self, max_bytes: int) -> dict[str, object]:
        """As `report.lua` takes it, with a detail of at most `max_bytes`."""
        fields: dict[str, object] = {
            "group": self.group_id,
            "index": self.index,
            "attempt": self.attempt,
            "verdict": self.verdict,
        }
        if self.result is not None:
            text = summary_text(self.result)
            return {**fields, "result": text, "policy_tokens": self.result.own_tokens}
        return {**fields, "detail": clipped(self.detail, max_bytes)}


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted trajectory, ready to be stored; an empty payload is not stored."""

    report: Report
    payload: bytes
    message: pb.Trajectory

    @property
    def name(self) -> str:
        """Name of its payload."""
        return payload_name(self.report.group_id, self.report.index, self.report.attempt)


def _parts(score: pb.Score) -> dict[str, float]:
    """The parts of a reward that has several."""
    if len(score.parts) < 2:
        return {}
    return {name: value for name, value in score.parts.items() if math.isfinite(value)}


def _turns(transcripts: Sequence[pb.Transcript]) -> tuple[tuple[int, float, int], ...]:
    """End, reward and flags of the first turns of an episode with one transcript."""
    if len(transcripts) != 1:
        return ()
    steps = transcripts[0].steps
    if steps:
        return tuple(
            (s.end, s.reward, s.matched_expert + 2 * s.patched + 4 * s.first_error)
            for s in steps[:MAX_TURNS]
        )
    policy = pb.TOKEN_SOURCE_POLICY
    return tuple((s.end, 0.0, 0) for s in transcripts[0].spans if s.source == policy)[:MAX_TURNS]


def num_sampled(transcript: pb.Transcript) -> int:
    """Policy tokens; those of an outside endpoint as far as it has counted them."""
    counted = sum(max(reply.completion_tokens, 0) for reply in transcript.replies)
    return len(transcript.logprobs) + counted


def num_tokens(transcript: pb.Transcript) -> int:
    """All tokens; those of an outside endpoint as it has counted them for its last reply."""
    counts = (n for r in transcript.replies[-1:] for n in (r.prompt_tokens, r.completion_tokens))
    return len(transcript.tokens) + sum(max(count, 0) for count in counts)


def _answering(transcripts: Sequence[pb.Transcript]) -> str:
    """The model that an outside endpoint says has given the last reply."""
    return next((r.model for t in transcripts for r in reversed(t.replies)), "")


def _said(message: pb.Trajectory) -> str:
    """The digest of what an evaluated episode said, if its reward has named no answer of it.

    White space and case do not count. What a reward could not parse is no answer.
    """
    score = message.score
    is_read = score.status == pb.SCORE_STATUS_OK and not score.normalised_answer
    if message.purpose != pb.PURPOSE_EVAL or not is_read:
        return ""
    text = " ".join(message.response_text.split()).casefold()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def submission(
    item: Submitted,
    *,
    limits: JobLimits,
    compress_over_bytes: int,
    waves: bool,
) -> Submission:
    """A trajectory, ready to be stored; `waves`: with what an allocator may ask about it."""
    if isinstance(item, Trajectory):
        message = wire.to_proto(item, pb.Trajectory)
    elif isinstance(item, bytes):
        message = pb.Trajectory.FromString(item)
    else:
        message = item
    key = (message.group_id, message.index, message.attempt)
    score = message.score
    if score.status == pb.SCORE_STATUS_INFRA_ERROR or not math.isfinite(score.reward):
        return Submission(Report(*key, Verdict.REQUEUE, score.detail), b"", message)
    data = item if isinstance(item, bytes) else message.SerializeToString()
    if problem := limits.excess("trajectory_bytes", len(data)):
        return Submission(Report(*key, Verdict.OVERSIZED, problem), b"", message)
    payload = pack(data, compress_over_bytes)
    transcripts = message.transcripts
    versions = [run.version for t in transcripts for run in t.versions]
    result = EpisodeSummary(
        attempt=message.attempt,
        reward=score.reward,
        truncated=message.truncated,
        policy_tokens=sum(map(num_sampled, transcripts)),
        tokens=sum(map(num_tokens, transcripts)),
        oldest_version=min(versions, default=-1),
        num_bytes=len(payload),
        answer=clipped(score.normalised_answer, ANSWER_BYTES),
        parts=_parts(score),
        turns=_turns(transcripts) if waves else (),
        inherited=sum(map(inherited, transcripts)) if waves else 0,
        status=_STATUSES.get(score.status, ScoreStatus.OK),
        said=_said(message),
        model=clipped(_answering(transcripts), MODEL_BYTES),
    )
    return Submission(Report(*key, Verdict.OK, result=result), payload, message)
