"""Kinds of sums in a mixture, by how hard they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import InvalidError

MAX_DIGITS = 9
_NAME = re.compile(r"([1-9])(?:-(plain|carry))?")
_ALLOWED = f"a number of digits, 1 to {MAX_DIGITS}, alone or with -plain or -carry (2-carry)"


@dataclass(frozen=True, slots=True)
class SumLevel:
    """Sums whose larger operand has exactly `digits` digits; `carries`: None if it may or not."""

    name: str
    digits: int
    carries: bool | None

    def takes(self, a: int, b: int, operation: str) -> bool:
        """Whether a sum or difference is of this level."""
        if self.digits > 1 and max(a, b) < 10 ** (self.digits - 1):
            return False
        return self.carries is None or self.carries == carries(a, b, operation)


def carries(a: int, b: int, operation: str) -> bool:
    """Whether a sum needs a carry, or a difference has to borrow."""
    while a or b:
        (a, x), (b, y) = divmod(a, 10), divmod(b, 10)
        if (x < y) if operation == "-" else (x + y > 9):
            return True
    return False


def levels_of(
    mixture: Mapping[str | int, float], operations: tuple[str, ...]
) -> tuple[list[SumLevel], list[float]]:
    """The levels of a mixture and their shares.

    Raises:
        InvalidError: a level or share is not allowed.
    """
    levels = [_level(str(name), operations) for name in mixture]
    shares = [*mixture.values()]
    total = math.fsum(shares)
    if not levels or not all(share > 0 for share in shares) or abs(total - 1) > 1e-6:
        raise InvalidError(
            f"tasks.options.mixture: shares {shares[:9]}; allowed: above 0, together 1"
        )
    return levels, shares


def _level(name: str, operations: tuple[str, ...]) -> SumLevel:
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidError(f"tasks.options.mixture: {name[:40]!r}; allowed: {_ALLOWED}")
    digits, kind = match.groups()
    if kind and "*" in operations:
        raise InvalidError(
            f"tasks.options.mixture: {name!r} with products; allowed with *: digits alone"
        )
    return SumLevel(name, int(digits), None if kind is None else kind == "carry")
