"""What becomes of a group, as the script that decides takes it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.enums import DropReason
from paceline_experience.ledger.generation.allocation import Wave
from paceline_experience.ledger.records import record_text
from paceline_experience.ledger.replay.pool import StoredRecord

MORE, CLOSE = "more", "close"  # verdicts on a group that stays open
STAYS_OPEN = frozenset({MORE, CLOSE})


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """What becomes of a complete group."""

    group_id: str
    verdict: str  # `ready`, or the reason to drop the group
    detail: str = ""  # what was wrong with it
    left_out: tuple[int, ...] = ()  # episodes that the filters leave out of a group that is kept
    outcome: str = ""  # for plug-ins with a memory
    surplus: tuple[int, ...] | None = None
    """It is closed early: what is still open is dropped, and these, which were too late."""
    filtered_for: str = ""  # the reason of the filter that drops it
    repaired: tuple[int, ...] = ()  # episodes that are dropped for others of the wave
    wave: Wave | None = None  # the verdict is `more`: these begin, and the group stays open
    guests: tuple[StoredRecord, ...] = ()  # stored episodes that are trained with it
    replaced: tuple[int, ...] = ()  # episodes that are dropped for guests
    stored: tuple[int, ...] = ()  # episodes that are stored, whatever the verdict

    @property
    def reason(self) -> DropReason:
        """Why the episodes are dropped that the group loses."""
        if self.verdict in set(DropReason):
            return DropReason(self.verdict)
        if self.repaired:
            return DropReason.REPAIRED
        return DropReason.FILTERED if self.left_out else DropReason.SURPLUS

    def script_argument(self) -> dict[str, object]:
        """As `decide.lua` takes it."""
        fields: dict[str, object] = {
            "group": self.group_id,
            "verdict": self.verdict,
            "detail": self.detail,
            "left_out": self.left_out,
            "outcome": self.outcome,
        }
        if self.surplus is not None:
            fields["surplus"] = self.surplus
        if self.filtered_for:
            fields["filtered_for"] = self.filtered_for
        if self.wave is not None:
            fields |= {"count": self.wave.count, "starts": self.wave.starts}
        if self.repaired:
            fields["repaired"] = self.repaired
        if self.guests:  # as text, which Lua passes on as it is
            texts = ",".join(record_text(each) for each in self.guests)
            fields |= {"guests": f"[{texts}]", "replaced": self.replaced}
        return fields
