"""Episodes that continue a finished sibling: what they begin with, and what of it is trained."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.platform import wire
from paceline.types import EpisodeProgress
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.generation.allocation import starts_of
from paceline_experience.ledger.state import GroupRecord, payload_name
from paceline_experience.store.payloads import PayloadStore, unpack

_POLICY = pb.TOKEN_SOURCE_POLICY


async def prefixes(
    group: GroupRecord, indices: Sequence[int], payloads: PayloadStore
) -> list[EpisodeProgress]:
    """What those of these episodes that continue a sibling begin with."""
    if not group.starts:
        return []
    starts = starts_of(group)
    found: list[EpisodeProgress] = []
    for index in indices:
        parent, tokens = starts[index].parent or (-1, 0)
        sibling = group.results[parent] if parent >= 0 else None
        if sibling is None:
            continue
        (payload,) = await payloads.get([payload_name(group.group_id, parent, sibling.attempt)])
        begun = prefix_of(
            payload,
            tokens,
            parent=parent,
            group_id=group.group_id,
            index=index,
            attempt=group.attempts[index],
        )
        found += [begun] if begun else []
    return found


def prefix_of(
    payload: bytes, tokens: int, *, parent: int, group_id: str, index: int, attempt: int
) -> EpisodeProgress | None:
    """The first `tokens` tokens of a sibling as the progress of episode `index`.

    A cut within what the world has shown moves back to the end of the turn before, since the world
    says it again. None: nothing is left to continue, or the sibling has several transcripts.
    """
    trajectory = pb.Trajectory.FromString(unpack(payload))
    if len(trajectory.transcripts) != 1:
        return None
    whole = trajectory.transcripts[0]
    end, num_policy, complete = _cut(whole, tokens)
    if not num_policy:
        return None
    found = pb.EpisodeProgress(group_id=group_id, index=index, attempt=attempt)
    kept = found.transcripts.add(tokens=whole.tokens[:end], parent=parent, branch_token=end)
    for span in whole.spans:
        if span.start < end:
            kept.spans.add(start=span.start, end=min(span.end, end), source=span.source)
    kept.logprobs.extend(whole.logprobs[:num_policy])
    kept.versions.extend(first_runs(whole, num_policy))
    kept.steps.extend(step for step in whole.steps if step.end < end)  # replay marks the last
    found.actions.extend([""] * complete)  # the worker reads them from the tokens
    return wire.from_proto(found, EpisodeProgress)


def _cut(transcript: pb.Transcript, tokens: int) -> tuple[int, int, int]:
    """Tokens to keep, policy tokens among them, and complete turns."""
    end = num_policy = complete = 0
    for span in transcript.spans:
        if span.source != _POLICY or span.start >= tokens:
            continue
        end = min(span.end, tokens)
        num_policy += end - span.start
        complete += span.end <= tokens
    return end, num_policy, complete


def first_runs(transcript: pb.Transcript, num_policy: int) -> list[pb.VersionRun]:
    """Versions of the first policy tokens."""
    found: list[pb.VersionRun] = []
    for run in transcript.versions:
        if num_policy <= 0:
            break
        count = min(run.count, num_policy)
        found.append(pb.VersionRun(version=run.version, count=count, worker=run.worker))
        num_policy -= run.count
    return found


def inherited(transcript: pb.Transcript) -> int:
    """Policy tokens that a transcript has from its parent, which are trained there."""
    branch = transcript.branch_token
    spans = (span for span in transcript.spans if span.source == _POLICY) if branch else ()
    return sum(max(0, min(span.end, branch) - span.start) for span in spans)


def as_context(transcript: pb.Transcript) -> pb.Transcript:
    """A copy in which inherited tokens are context: no policy tokens, so they are not trained."""
    skip, branch = inherited(transcript), transcript.branch_token
    made = pb.Transcript(tokens=transcript.tokens, logprobs=transcript.logprobs[skip:])
    for span in transcript.spans:
        if span.source != _POLICY or span.start >= branch:
            made.spans.add().CopyFrom(span)
            continue
        middle = min(span.end, branch)
        made.spans.add(start=span.start, end=middle, source=pb.TOKEN_SOURCE_ENVIRONMENT)
        if middle < span.end:
            made.spans.add(start=middle, end=span.end, source=_POLICY)
    left = skip
    for run in transcript.versions:
        taken = min(run.count, left)
        left -= taken
        if run.count > taken:
            made.versions.add(version=run.version, count=run.count - taken, worker=run.worker)
    return made
