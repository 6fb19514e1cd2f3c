"""Resumes an episode of a dead worker from the progress that was saved with its lease.

The environment is rebuilt by replaying the actions so far. All sampled tokens are kept, including
those of a turn that was cut off. The experience service notices the death (`dispatch/presence.py`)
and leases the episode again with its progress (`ledger/leases.py`); `episode.py` calls this.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.tokens.transcript import TranscriptBuilder
from paceline.types import EpisodeProgress


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The point from which an episode resumes."""

    builder: TranscriptBuilder
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    """Actions to replay, each with the tokens of its turn."""
    cut_off: bool
    """Whether the last turn is unfinished, so that it has no action yet."""
    num_policy_tokens: int


def has_begun(progress: EpisodeProgress) -> bool:
    """Whether there is anything to resume, or to lose."""
    return any(transcript.tokens or transcript.replies for transcript in progress.transcripts[:1])


def num_policy_tokens(progress: EpisodeProgress) -> int:
    """Tokens that the policy has sampled, as far as they are known."""
    first = progress.transcripts[0]
    counted = sum(max(reply.completion_tokens, 0) for reply in first.replies)
    return first.num_policy_tokens + counted


def unread_turns(progress: EpisodeProgress) -> dict[int, tuple[int, ...]]:
    """Tokens of turns whose action is not known, by place: those of a sibling that it continues."""
    if not has_begun(progress) or not progress.transcripts[0].branch_token:
        return {}
    transcript = progress.transcripts[0]
    tokens, turns = transcript.tokens, TranscriptBuilder.resume(transcript).turns
    known = zip(progress.actions, turns, strict=False)
    return {
        place: tokens[span.start : span.end]
        for place, (action, span) in enumerate(known)
        if not action
    }


def resume_plan(progress: EpisodeProgress, *, replayable: bool) -> ResumePlan | None:
    """How to resume; None: the episode has to restart.

    An environment that is not `replayable` cannot be rebuilt, and neither can an episode whose
    turns and actions do not match.
    """
    if not has_begun(progress) or not replayable:
        return None
    transcript = progress.transcripts[0]
    builder = TranscriptBuilder.resume(transcript)
    cut_off = len(builder.turns) == len(progress.actions) + 1
    if not cut_off and len(builder.turns) != len(progress.actions):
        return None
    said = [tuple(builder.tokens[span.start : span.end]) for span in builder.turns]
    steps = tuple(zip(progress.actions, said, strict=False))
    return ResumePlan(builder, steps, cut_off, transcript.num_policy_tokens)
