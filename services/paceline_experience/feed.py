"""Which task is admitted next: the sampler, and tasks that have to come again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from paceline.interfaces import Sampler


@dataclass(frozen=True, slots=True)
class Draw:
    """A group to admit: the `seq`-th task, at a position of its source.

    Seeds follow from `seq`, so a task that comes again gets the same ones.
    """

    seq: int
    position: int
    again: int = 0  # how often it was admitted before

    @property
    def name(self) -> str:
        """Of the group within its job."""
        return f"{self.seq}.{self.again}" if self.again else str(self.seq)


class Feed:
    """Draws tasks in the sampler's order; its state travels with the trainer's step."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seq = 0
        self._redo: list[Draw] = []
        self.over = False
        self._initial = self.state()

    def draw(self) -> Draw | None:
        """The next group; None when all epochs are over."""
        if self._redo:
            return self._redo.pop(0)
        position = self._sampler.next()
        if position is None:
            self.over = True
            return None
        self._seq += 1
        return Draw(self._seq - 1, position)

    def redo(self, seq: int, position: int, again: int) -> None:
        """What came of this task could not be used, through no fault of its own: once more."""
        self._redo = sorted([*self._redo, Draw(seq, position, again)], key=lambda draw: draw.seq)
        self.over = False

    def state(self) -> str:
        """JSON; `load` brings it back."""
        redo = [(draw.seq, draw.position, draw.again) for draw in self._redo]
        fields = {"sampler": dict(self._sampler.state()), "seq": self._seq, "redo": redo}
        return json.dumps(fields)

    def load(self, text: str) -> None:
        """Continue from a state; an empty one is the beginning."""
        fields: dict[str, Any] = json.loads(text or self._initial)
        self._sampler.load(fields["sampler"])
        self._seq = fields["seq"]
        self._redo = [Draw(*each) for each in fields["redo"]]
        self.over = False

    def rewind(self, text: str) -> None:
        """Go back to an older state, then draw again what was admitted since.

        The groups admitted since then are still in the ledger and must not come twice; what a
        curriculum learned since then is forgotten.
        """
        seq, redo = self._seq, self._redo
        self.load(text)
        for _ in range(self._seq, seq):
            self._sampler.next()
        self._seq, self._redo = seq, redo


def stable_seed(*parts: object) -> int:
    """63 bits that depend on the parts only."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
