"""Which task is admitted next: requeued tasks first, then the sampler's order."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import InvalidError, plugin_boundary
from paceline.isolation.code.generation.starts import pick_text
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import clipped
from paceline.plugins import MAX_CURSOR_BYTES, Pick, Sampler

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
    pick: str = ""  # variant and meta of the sampler's pick, as JSON; empty: none
    seen: bool = False  # plug-ins with a memory have observed an earlier group of it

    @property
    def name(self) -> str:
        """Name of the group within its job."""
        return f"{self.seq}.{self.num_requeues}" if self.num_requeues else str(self.seq)


class TaskCursor:
    """Draws tasks in the sampler's order; its state is saved with every admission.

    A rewind of the trainer does not touch it: the groups that were admitted since are still in the
    ledger, and what has to be generated again is requeued with its pick. After a sampler has failed
    nothing is drawn: `problem` says why, and the job fails with it.
    """

    def __init__(
        self, sampler: Sampler, *, kind: str = "", ready: Callable[[], bool] = lambda: True
    ) -> None:
        """`ready`: whether the sampler has an answer; if not, nothing is drawn yet."""
        self._sampler = sampler
        self._ready = ready
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
        """The next group; None after all epochs, or if its task is being drawn just now."""
        if self.exhausted:
            return None
        if self._requeued:
            return self._requeued.pop(0)
        if not self._ready():
            return None
        with self._failing():
            found = self._sampler.next()
            if found is not None:
                drawn = draw_of(self._seq, found)
                self._seq += 1
                return drawn
        self._exhausted = True
        return None

    def requeue(self, drawn: Draw) -> None:
        """Draw this once more: the group was lost through no fault of its own, or is not begun."""
        self._requeued = sorted([*self._requeued, drawn], key=lambda draw: draw.seq)
        self._exhausted = False

    def state(self) -> str:
        """The state as JSON for `load`."""
        with self._failing():
            sampler_state = dict(self._sampler.state())
            num_bytes = len(json.dumps(sampler_state))
            if num_bytes > MAX_CURSOR_BYTES:
                raise ValueError(
                    f"its state has {num_bytes} bytes; at most {MAX_CURSOR_BYTES} are allowed"
                )
            self._sampler_state = sampler_state
        redo = [draw_fields(drawn) for drawn in self._requeued]
        return json.dumps({"sampler": self._sampler_state, "seq": self._seq, "redo": redo})

    def load(self, text: str) -> None:
        """Continue from a state; an empty one starts from the beginning."""
        fields: dict[str, Any] = json.loads(text or self._initial)
        self._seq = fields["seq"]
        self._requeued = [_parsed(drawn) for drawn in fields["redo"]]
        self._exhausted = False
        with self._failing():
            self._sampler.load(fields["sampler"])

    @contextmanager
    def _failing(self) -> Generator[None]:
        """A sampler may raise anything; only its own job fails."""
        report = partial(log.exception, "a sampler has failed", sampler=self._kind)
        try:
            with plugin_boundary(
                f"experience.sampler: {self._kind}", passes=(InvalidError,), report=report
            ):
                yield
        except InvalidError as error:  # of own code it says where it is from
            problem = clipped(error.full_message, _MAX_PROBLEM_BYTES)
            self.problem = self.problem or problem


def draw_of(seq: int, found: Any) -> Draw:
    """What a sampler has drawn, a `Pick` or a position; raises what this raises."""
    if not isinstance(found, Pick):
        return Draw(seq, operator.index(found))
    text = pick_text(found.variant, found.meta)
    return Draw(seq, operator.index(found.task), pick=text)


def draw_fields(drawn: Draw) -> dict[str, Any]:
    """A draw as JSON; what it lacks is left out."""
    fields: dict[str, Any] = {
        "seq": drawn.seq,
        "position": drawn.position,
        "again": drawn.num_requeues,
    }
    if drawn.pick:
        fields["pick"] = drawn.pick
    if drawn.seen:
        fields["seen"] = True
    return fields


def _parsed(fields: Mapping[str, Any]) -> Draw:
    return Draw(
        fields["seq"],
        fields["position"],
        fields["again"],
        fields.get("pick", ""),
        fields.get("seen", False),
    )


def stable_seed(*parts: object) -> int:
    """A 63-bit hash of the parts."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
