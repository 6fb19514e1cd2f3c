"""Which task is admitted next: the sampler, and tasks that infrastructure failed on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from paceline.interfaces import Sampler


@dataclass(frozen=True, slots=True)
class Draw:
    """A group to admit."""

    seq: int
    position: int
    again: bool


class Feed:
    """Draws tasks in the sampler's order; its state travels with the trainer's step."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seq = 0
        self._draws = 0
        self._redo: list[int] = []
        self.over = False
        self._initial = self.state()

    def draw(self) -> Draw | None:
        """The next group; None when all epochs are over."""
        again = bool(self._redo)
        position = self._redo.pop(0) if again else self._sampler.next()
        if position is None:
            self.over = True
            return None
        self._draws += not again
        self._seq += 1
        return Draw(self._seq - 1, position, again)

    def redo(self, position: int) -> None:
        """Infrastructure failed on this task: it is not consumed."""
        self._redo.append(position)
        self.over = False

    def state(self) -> str:
        """JSON; `load` brings it back."""
        fields = {"sampler": dict(self._sampler.state()), "draws": self._draws}
        return json.dumps({**fields, "seq": self._seq, "redo": self._redo})

    def load(self, text: str) -> None:
        """Continue from a state; an empty one is the beginning."""
        fields: dict[str, Any] = json.loads(text or self._initial)
        self._sampler.load(fields["sampler"])
        self._draws, self._seq, self._redo = fields["draws"], fields["seq"], fields["redo"]
        self.over = False

    def rewind(self, text: str) -> None:
        """Go back to an older state, then draw again what was admitted since.

        The groups admitted since then are still in the ledger and must not come twice; what a
        curriculum learned since then is forgotten.
        """
        draws, seq, redo = self._draws, self._seq, self._redo
        self.load(text)
        while self._draws < draws and self._sampler.next() is not None:
            self._draws += 1
        self._seq, self._redo = seq, redo


def stable_seed(*parts: object) -> int:
    """63 bits that depend on the parts only."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
