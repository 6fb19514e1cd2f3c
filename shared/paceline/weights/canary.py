"""The canary of a version: text of the policy's own, and the test that loaded weights have to pass.

Two correct implementations differ in each log-prob by rounding. How much depends on the model and
its text, so the trainer measures it: `noise` is what the engine's precision alone does to the
log-probs of these tokens. Single tokens can be far off without any fault (a router that chooses
another expert), so the largest twentieth of the differences does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.config.sections.rollout import CANARY_FLOOR, CANARY_RATIO
from paceline.errors import IntegrityError, MisfitError

NAMED = 4  # tensors, in a reason
TRIMMED = 0.05  # of the differences, the largest


@dataclass(frozen=True, slots=True)
class CanarySequence:
    """Tokens, and the log-probs of `tokens[1:]` at temperature 1, computed in float32."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Canary:
    """What engines have to compute with the weights of a version; empty: nothing is known."""

    sequences: tuple[CanarySequence, ...] = ()
    noise: float = 0.0  # nats: what the precision of engines does to these log-probs, trimmed
    recipe: str = ""  # the precision: float32, bfloat16, ...

    def check(self) -> None:
        """Raises `IntegrityError` if the parts do not fit each other."""
        if not (math.isfinite(self.noise) and self.noise >= 0.0):
            raise IntegrityError(f"weights: the canary's noise is {self.noise}; allowed: 0 or more")
        for index, each in enumerate(self.sequences):
            if len(each.tokens) < 2 or len(each.logprobs) != len(each.tokens) - 1:
                raise IntegrityError(
                    f"weights: sequence {index} of the canary has {len(each.tokens)} tokens and "
                    f"{len(each.logprobs)} log-probs; allowed: two tokens or more, and one "
                    "log-prob less than tokens"
                )


NO_CANARY = Canary()


@dataclass(frozen=True, slots=True)
class CanaryRule:
    """Which difference from the canary's log-probs is allowed."""

    ratio: float = CANARY_RATIO  # times the noise
    floor: float = CANARY_FLOOR  # nats; allowed in any case

    def verdict(self, canary: Canary, scored: Sequence[Sequence[float]]) -> CanaryVerdict:
        """The verdict on an engine's log-probs, those of `tokens[1:]` of each sequence.

        Raises:
            MisfitError: an engine returns another number of log-probs.
        """
        differences: list[float] = []
        for sequence, logprobs in zip(canary.sequences, scored, strict=True):
            if len(logprobs) != len(sequence.logprobs):
                raise MisfitError(
                    f"the engine's score has {len(logprobs)} log-probs for the last "
                    f"{len(sequence.logprobs)} of {len(sequence.tokens)} tokens"
                )
            differences += (a - b for a, b in zip(logprobs, sequence.logprobs, strict=True))
        return CanaryVerdict(trimmed_rms(differences), canary.noise, self)


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """How far an engine is from the trainer, in nats, beside the noise of the precision."""

    difference: float  # trimmed; NaN if a log-prob is not finite
    noise: float
    rule: CanaryRule
    unequal: tuple[str, ...] = ()  # tensors whose bytes in the engine are others

    @property
    def ratio(self) -> float:
        """The difference in units of the noise, which counts as `floor / rule.ratio` at least."""
        unit = max(self.noise, self.rule.floor / self.rule.ratio)
        if unit == 0.0:
            return 0.0 if self.difference == 0.0 else math.inf
        return self.difference / unit

    @property
    def accepted(self) -> bool:
        """Whether the engine computes what the trainer computes; never with a NaN."""
        close = self.difference <= max(self.rule.ratio * self.noise, self.rule.floor)
        return close and not self.unequal

    def __str__(self) -> str:
        """As in the reason of a job that fails."""
        text = (
            f"canary: trim {self.difference:.3g}, noise {self.noise:.3g}, "
            f"ratio {self.ratio:.3g}, allowed {self.rule.ratio:g}"
        )
        if not self.unequal:
            return text
        more = f" and {len(self.unequal) - NAMED} more" if len(self.unequal) > NAMED else ""
        return f"{text}; unequal tensors: {', '.join(self.unequal[:NAMED])}{more}"


def trimmed_rms(differences: Iterable[float]) -> float:
    """Root mean square without the largest 5 %; 0 of none, NaN if one is not finite."""
    squares = sorted(each * each for each in differences)
    if not squares:
        return 0.0
    if not all(map(math.isfinite, squares)):
        return math.nan
    kept = squares[: len(squares) - int(TRIMMED * len(squares))]
    return math.sqrt(math.fsum(kept) / len(kept))
