"""A few trajectories of every step that outlive the others, and notes on what is stored."""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.enums import DropReason
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.records import parse_record, record_text

_SHARE = 16  # of the budget for payloads that samples may take: one in so many
_PAGE = 512
_Kind = tuple[int, str]  # step, and why dropped
_Lot = tuple[bytes, str]  # digest and name
# A job that is cancelled drops everything at once, which says nothing about its episodes.
_UNTOLD = frozenset({DropReason.CANCELLED})


@dataclass(frozen=True, slots=True)
class PayloadNote:
    """What is known of a stored trajectory besides its payload."""

    step: int = -1  # of the batch, or when it was dropped; -1: as its place in the ring says
    dropped: str = ""  # why it was not trained
    advantage: str = ""  # mean over its policy tokens, as text, which is exact; empty: unknown


class KeptSamples:
    """Which payloads stay although nothing else needs them.

    Of each step, and of each reason to drop episodes, those with the smallest digest of their name
    stay. That is a uniform sample however many candidates come, in whatever order, without counting
    them; and a replica that takes over continues it.
    """

    def __init__(self, core: LedgerContext) -> None:
        self._core = core
        self._spec = core.spec.experience.samples
        self._max_bytes = core.spec.experience.payload_bytes // _SHARE
        self._notes: dict[str, PayloadNote] = {}  # of the samples
        self._sizes: dict[str, int] = {}
        self._kinds: dict[_Kind, list[_Lot]] = {}  # drawn from each, best first

    @property
    def names(self) -> Collection[str]:
        """Payloads that are samples."""
        return self._notes.keys()

    def ordered(self, *, dropped: bool) -> list[tuple[str, PayloadNote]]:
        """Samples of what was trained, or of what was dropped, newest step first."""
        found = [(n, note) for n, note in self._notes.items() if bool(note.dropped) == dropped]
        return sorted(found, key=lambda item: (item[1].step, item[0]), reverse=True)

    async def load(self, sizes: Mapping[str, int]) -> None:
        """Inside a transaction: read which there are, of payloads of these sizes."""
        found: list[bytes] = await self._core.store.command(
            "ZRANGE", self._core.keys.samples, 0, -1
        )
        names = [name.decode() for name in found]
        notes = await self.notes(names)
        self._notes, self._sizes, self._kinds = {}, {}, {}
        for name, note in zip(names, notes, strict=True):
            self._add(name, note, sizes.get(name, 0))

    async def notes(self, names: Sequence[str]) -> list[PayloadNote]:
        """What is known of these; nothing of those without a note."""
        if not names:
            return []
        texts = await self._core.store.command("HMGET", self._core.keys.notes, *names)
        return [
            PayloadNote() if each is None else parse_record(PayloadNote, each) for each in texts
        ]

    async def note(self, notes: Mapping[str, PayloadNote]) -> None:
        """Write what is known of these; `forget` deletes it with their payloads."""
        flat = [text for name, note in notes.items() for text in (name, record_text(note))]
        for start in range(0, len(flat), 2 * _PAGE):
            part = flat[start : start + 2 * _PAGE]
            await self._core.store.command("HSET", self._core.keys.notes, *part)

    async def keep(
        self,
        names: Mapping[str, int],
        sizes: Mapping[str, int],
        *,
        dropped: DropReason | None = None,
    ) -> list[str]:
        """Inside a transaction: make samples of some of these, by step, that are no longer needed.

        Returns the samples that had to make room for them.
        """
        if dropped in _UNTOLD or self._core.state.closed:
            return []
        drawn = [
            name
            for name, step in names.items()
            # One that was replaced before its group was dropped is gone already.
            if name in sizes
            and name not in self._notes
            and self._draws(name, (step, dropped or ""))
        ]
        if not drawn:
            return []
        known = await self.notes(drawn) if dropped is None else [PayloadNote()] * len(drawn)
        notes = {
            name: PayloadNote(names[name], dropped or "", before.advantage)
            for name, before in zip(drawn, known, strict=True)
        }
        for name, note in notes.items():
            self._add(name, note, sizes.get(name, 0))
        gone = self._make_room()
        await self._write(notes, gone)
        return gone

    async def _write(self, notes: Mapping[str, PayloadNote], gone: Sequence[str]) -> None:
        """Write which samples there are now; those of `notes` are new."""
        keys = self._core.keys
        texts = [x for name, note in notes.items() for x in (name, record_text(note))]
        places = [x for name, note in notes.items() for x in (note.step, name)]
        commands: list[tuple[str | int, ...]] = [
            ("HSET", keys.notes, *texts),
            ("ZADD", keys.samples, *places),
        ]
        if gone:
            commands += [("ZREM", keys.samples, *gone), ("HDEL", keys.notes, *gone)]
        await self._core.store.transaction(*commands)

    async def forget(self, names: Sequence[str]) -> None:
        """Inside a transaction: these payloads are gone."""
        for start in range(0, len(names), _PAGE):
            part = names[start : start + _PAGE]
            await self._core.store.command("HDEL", self._core.keys.notes, *part)

    def _draws(self, name: str, kind: _Kind) -> bool:
        """Whether one belongs to the sample of its step and reason, as far as they are known."""
        most, drawn = self._most(kind), self._kinds.get(kind, [])
        return len(drawn) < most or (most > 0 and _lot(name) < drawn[most - 1])

    def _most(self, kind: _Kind) -> int:
        return self._spec.dropped if kind[1] else self._spec.trained

    def _add(self, name: str, note: PayloadNote, num_bytes: int) -> None:
        self._notes[name], self._sizes[name] = note, num_bytes
        insort(self._kinds.setdefault((note.step, note.dropped), []), _lot(name))

    def _make_room(self) -> list[str]:
        """Take back those beyond the sample of their step, then the oldest beyond the bounds."""
        gone: list[str] = []
        for kind in sorted(self._kinds):
            while len(self._kinds[kind]) > self._most(kind):
                gone.append(self._take_back(kind))
        num_bytes = sum(self._sizes.values())
        for kind in sorted(self._kinds):
            while kind in self._kinds and (
                len(self._notes) > self._spec.total or num_bytes > self._max_bytes
            ):
                name = self._kinds[kind][-1][1]
                num_bytes -= self._sizes[name]
                gone.append(self._take_back(kind))
        return gone

    def _take_back(self, kind: _Kind) -> str:
        """The one that was drawn last of a kind, which is no sample any more."""
        _, name = self._kinds[kind].pop()
        if not self._kinds[kind]:
            del self._kinds[kind]
        del self._notes[name], self._sizes[name]
        return name


def _lot(name: str) -> _Lot:
    return hashlib.sha256(name.encode()).digest(), name
