"""What plug-ins with a memory are told of groups."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.enums import DropReason
from paceline_experience.ledger.records import OutcomeRecord, record_text
from paceline_experience.ledger.replay.pool import StoredRecord
from paceline_experience.ledger.state import GroupRecord


def observed(
    group: GroupRecord, *, kept: Collection[int] | None, guests: Sequence[StoredRecord] = ()
) -> str:
    """What they will be told of a decided group, as JSON.

    `kept` are the indices of what is trained; None: it is filtered.
    """
    found = group.summaries()
    names = sorted({name for each in found for name in each.parts})
    outcome = OutcomeRecord(
        seq=group.seq,
        task=group.position,
        rewards=tuple(e.reward for e in found),
        answers=tuple(e.answer for e in found),
        filtered=kept is None,
        lengths=tuple(e.policy_tokens for e in found),
        truncated=tuple(e.truncated for e in found),
        parts={name: tuple(e.parts.get(name) for e in found) for name in names},
        left_out=tuple(
            place
            for place, index in enumerate(group.finished())
            if kept is not None and index not in kept
        ),
        pick=group.pick,
        replayed=tuple(each.result.reward for each in guests),
    )
    return record_text(outcome)


def given_up(group: GroupRecord, reason: DropReason) -> str:
    """The same for one that is dropped before it was decided, and does not come again."""
    return record_text(
        OutcomeRecord(seq=group.seq, task=group.position, failed=reason, pick=group.pick)
    )
