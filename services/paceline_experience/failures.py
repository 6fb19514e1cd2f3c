"""Lives of a trainer that ended badly, kept with the job: no restart of anybody forgets them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

MAX_REASON_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Failures:
    """Those since the job last got further than before."""

    count: int = 0
    incarnation: int = 0  # the newest of them
    best_step: int = -1  # that the job had come to when it ended
    reason: str = ""

    def after(self, incarnation: int, *, newest: int, step: int, reason: str) -> Failures:
        """One more is told of, when the job is at `step`.

        A life that is told of again counts once, and keeps the first reason: what ends other ranks
        after the first one is a consequence. Of lives before the newest nobody asks any more.
        """
        reason = reason[:MAX_REASON_CHARS]
        if incarnation != newest or incarnation < 1:
            return self
        if incarnation == self.incarnation:
            return replace(self, reason=self.reason or reason)
        count = 1 if step > self.best_step else self.count + 1
        return Failures(count, incarnation, max(step, self.best_step), reason)

    def encode(self) -> str:
        """As it stands in the job's state."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Failures:
        """From the job's state; empty: there were none."""
        return cls(**json.loads(text)) if text else cls()
