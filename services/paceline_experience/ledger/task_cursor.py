"""Which task is admitted next: requeued tasks first, then the sampler's order."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.plugins import Sampler
from paceline.telemetry.logs import Log
from paceline.text import clipped

_MAX_PROBLEM_BYTES = 4000
log = Log("cursor")


@dataclass(frozen=True, slots=True)
class Draw:
    """A group to admit: the `seq`-th task, at a position of its source.

    Seeds follow from `seq`, so a requeued task gets the same ones.
    """

    seq: int
    position: int
    num_requeues: int = 0  # how often it was admitted before

    @property
    def name(self) -> str:
        """Name of the group within its job."""
        return f"{self.seq}.{self.num_requeues}" if self.num_requeues else str(self.seq)


class TaskCursor:
    """Draws tasks in the sampler's order; its state is saved with every trainer step.

    After a sampler has failed nothing is drawn: `problem` says why, and the job fails with it.
    """

    def __init__(self, sampler: Sampler, *, kind: str = "") -> None:
        self._sampler = sampler
        self._kind = kind
        self._seq = 0
        self._requeued: list[Draw] = []
        self._exhausted = False
        self._sampler_state = dict(sampler.state())
        self.problem = ""
        self._initial = self.state()

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to draw."""
        return self._exhausted or bool(self.problem)

    def draw(self) -> Draw | None:
        """The next group; None after all epochs."""
        if self.exhausted:
            return None
        if self._requeued:
            return self._requeued.pop(0)
        with self._failing():
            position = self._sampler.next()
            if position is not None:
                self._seq += 1
                return Draw(self._seq - 1, operator.index(position))
        self._exhausted = True
        return None

    def requeue(self, seq: int, position: int, *, num_requeues: int) -> None:
        """Draw this task once more: its last group was lost through no fault of its own."""
        draws = [*self._requeued, Draw(seq, position, num_requeues)]
        self._requeued = sorted(draws, key=lambda draw: draw.seq)
        self._exhausted = False

    def state(self) -> str:
        """The state as JSON for `load`."""
        with self._failing():
            sampler_state = dict(self._sampler.state())
            json.dumps(sampler_state)
            self._sampler_state = sampler_state
        redo = [
            {"seq": d.seq, "position": d.position, "again": d.num_requeues} for d in self._requeued
        ]
        return json.dumps({"sampler": self._sampler_state, "seq": self._seq, "redo": redo})

    def load(self, text: str) -> None:
        """Continue from a state; an empty one starts from the beginning."""
        fields: dict[str, Any] = json.loads(text or self._initial)
        self._seq = fields["seq"]
        self._requeued = [Draw(d["seq"], d["position"], d["again"]) for d in fields["redo"]]
        self._exhausted = False
        with self._failing():
            self._sampler.load(fields["sampler"])

    def rewind(self, text: str) -> None:
        """Go back to an older state, then advance the sampler to the present position.

        The groups admitted since that state are still in the ledger and must not be admitted
        twice; what a curriculum has learned since is lost.
        """
        seq, requeued = self._seq, self._requeued
        self.load(text)
        with self._failing():
            for _ in range(self._seq, seq):
                self._sampler.next()
        self._seq, self._requeued = seq, requeued

    @contextmanager
    def _failing(self) -> Generator[None]:
        """A sampler may raise anything; only its own job fails."""
        try:
            yield
        except (Exception, SystemExit) as error:  # the boundary of a plug-in
            log.exception("a sampler has failed", sampler=self._kind)
            text = f"experience.sampler: {self._kind}: {type(error).__name__}: {error}"
            self.problem = self.problem or clipped(text, _MAX_PROBLEM_BYTES)


def stable_seed(*parts: object) -> int:
    """A 63-bit hash of the parts."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
