"""Which task is admitted next: the sampler, and tasks that have to come again."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.interfaces import Sampler
from paceline.logs import Log
from paceline.text import clipped

_MOST_BYTES = 4000  # of what a sampler says
log = Log("feed")


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
    """Draws tasks in the sampler's order; its state travels with the trainer's step.

    A sampler that fails gives nothing any more; `problem` says why, and the job ends with it.
    """

    def __init__(self, sampler: Sampler, *, kind: str = "") -> None:
        self._sampler = sampler
        self._kind = kind
        self._seq = 0
        self._redo: list[Draw] = []
        self._over = False
        self._place = dict(sampler.state())  # of the sampler
        self.problem = ""
        self._initial = self.state()

    @property
    def over(self) -> bool:
        """Nothing is to be drawn."""
        return self._over or bool(self.problem)

    def draw(self) -> Draw | None:
        """The next group; None when all epochs are over."""
        if self.over:
            return None
        if self._redo:
            return self._redo.pop(0)
        with self._failing():
            position = self._sampler.next()
            if position is not None:
                self._seq += 1
                return Draw(self._seq - 1, operator.index(position))
        self._over = True
        return None

    def redo(self, seq: int, position: int, again: int) -> None:
        """What came of this task could not be used, through no fault of its own: once more."""
        self._redo = sorted([*self._redo, Draw(seq, position, again)], key=lambda draw: draw.seq)
        self._over = False

    def state(self) -> str:
        """JSON; `load` brings it back."""
        with self._failing():
            place = dict(self._sampler.state())
            json.dumps(place)
            self._place = place
        redo = [(draw.seq, draw.position, draw.again) for draw in self._redo]
        return json.dumps({"sampler": self._place, "seq": self._seq, "redo": redo})

    def load(self, text: str) -> None:
        """Continue from a state; an empty one is the beginning."""
        fields: dict[str, Any] = json.loads(text or self._initial)
        self._seq = fields["seq"]
        self._redo = [Draw(*each) for each in fields["redo"]]
        self._over = False
        with self._failing():
            self._sampler.load(fields["sampler"])

    def rewind(self, text: str) -> None:
        """Go back to an older state, then draw again what was admitted since.

        The groups admitted since then are still in the ledger and must not come twice; what a
        curriculum learned since then is forgotten.
        """
        seq, redo = self._seq, self._redo
        self.load(text)
        with self._failing():
            for _ in range(self._seq, seq):
                self._sampler.next()
        self._seq, self._redo = seq, redo

    @contextmanager
    def _failing(self) -> Generator[None]:
        """A sampler may raise anything; its job ends, and others go on."""
        try:
            yield
        except (Exception, SystemExit) as error:  # the boundary of a plug-in
            log.exception("a sampler has failed", sampler=self._kind)
            text = f"experience.sampler: {self._kind}: {type(error).__name__}: {error}"
            self.problem = self.problem or clipped(text, _MOST_BYTES)


def stable_seed(*parts: object) -> int:
    """63 bits that depend on the parts only."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
