"""Statistics over all tokens of an update, whatever ranks and micro-batches they are on.

Every answer is the same, to the last bit, for every split of the tokens: sums are of fixed-point
numbers, and thresholds are found by counting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.methods.parts.batch import TokenBatch

Gather = Callable[[Sequence[float]], "NDArray[Any]"]  # numbers of this rank -> [world, numbers]
EXACT_BITS = 52  # sums of integers below 2^53 are exact in float64
INT32_BITS = 31
INFINITY_BITS = 0x7F800000


def alone(values: Sequence[float]) -> NDArray[Any]:
    """Gathers over one rank."""
    return np.array([values], dtype=np.float64)


class WholeBatch:
    """The tokens of an update: this rank's, and reductions over all ranks.

    Collective: every rank has to call the same reductions in the same order.
    """

    def __init__(self, tokens: TokenBatch, gather: Gather = alone) -> None:
        """`tokens` has all of this rank's tokens of the update; nothing carries a gradient."""
        self.tokens = tokens
        self._gather = gather

    def on(self, tokens: TokenBatch) -> WholeBatch:
        """The same update with other columns."""
        return WholeBatch(tokens, self._gather)

    def total(self, number: int) -> int:
        """The sum of a number of each rank."""
        return int(self._total([float(number)])[0])

    def count(self, mask: Tensor) -> int:
        """Number of true entries of `mask` [N]."""
        return int(self._total([float(mask.sum())])[0])

    def max(self, values: Tensor, *, empty: float = 0.0) -> float:
        """The largest of `values` [N], which are not below `empty`: what ranks without any have."""
        own = float(values.max()) if values.numel() else empty
        return float(self._gather([own]).max())

    def sum(self, values: Tensor, mask: Tensor | None = None) -> float:
        """The sum of finite `values` [N], where `mask` is true.

        The error is at most 2^-52 of the largest value times the square of the number of tokens.
        """
        chosen = values if mask is None else values[mask]
        largest = self.max(chosen.abs())
        if not largest:
            return 0.0
        unit = self._unit(largest)
        fixed = (chosen.double() / unit).round()
        return float(self._total([float(fixed.sum())])[0]) * unit

    def mean(self, values: Tensor, mask: Tensor | None = None) -> float:
        """The mean of finite `values` [N], where `mask` is true; 0 without such tokens."""
        count = self.scale_tokens if mask is None else self.count(mask)
        return self.sum(values, mask) / count if count else 0.0

    @property
    def scale_tokens(self) -> int:
        """Number of tokens of the update."""
        return self.tokens.scale.tokens

    def largest(self, values: Tensor, k: int, among: Tensor | None = None) -> Tensor:
        """Mask [N] of exactly the `k` largest of `values` [N] among those where `among` is true.

        Of equal values, those with the smallest `keys` come first.
        """
        keep = torch.ones_like(values, dtype=torch.bool) if among is None else among
        return self.largest_until(values, keep, lambda count, _: count >= k)

    def largest_share(self, values: Tensor, share: float) -> Tensor:
        """Keys of this rank's tokens among the `share` of all with the largest `values` [N].

        At least one token of all ranks is chosen.
        """
        return self.keys(self.largest(values, max(1, math.ceil(share * self.scale_tokens))))

    def keys(self, mask: Tensor) -> Tensor:
        """Keys of this rank's tokens where `mask` [N] is true."""
        assert self.tokens.keys is not None
        return self.tokens.keys[mask]

    def largest_until(
        self, values: Tensor, among: Tensor, enough: Callable[[int, float], bool]
    ) -> Tensor:
        """Mask [N] of the fewest largest of `values` [N], taken in falling order, that are enough.

        Args:
            values: not negative; infinity and NaN count as larger than all others.
            among: bool [N]; only these are taken.
            enough: is asked with the number of tokens taken and with the sum of those that are
                left; once true it has to stay true. All are taken if it never is.
        """
        order = _order(values)
        finite = torch.isfinite(values) & among
        unit = self._unit(self.max(values[finite])) if self.max(values[finite]) else 1.0
        fixed = torch.where(finite, (values.double() / unit).round(), 0.0)

        def holds(taken: Tensor) -> bool:
            left = among & ~taken
            count, rest = self._total([float((among & taken).sum()), float(fixed[left].sum())])
            return enough(int(count), float(rest) * unit)

        # The largest threshold at which taking all values from it on is enough.
        low = _bisect(lambda at: holds(order >= at), 1 << INT32_BITS)
        above, ties = order > low, (order == low) & among
        if holds(above) or not self.count(ties):
            return above & among
        assert self.tokens.keys is not None, "ties are broken by key"
        keys = self.tokens.keys
        top = int(self.max(keys.double()[ties])) + 1
        # The smallest key up to which ties have to be taken.
        last = top - _bisect(lambda at: holds(above | (ties & (keys <= top - at))), top + 1)
        return (above | (ties & (keys <= last))) & among

    def _unit(self, largest: float) -> float:
        """A power of two; sums of all tokens in its multiples are exact."""
        bits = math.frexp(largest)[1] + max(self.scale_tokens, 1).bit_length()
        return 2.0 ** (bits - EXACT_BITS)

    def _total(self, values: Sequence[float]) -> NDArray[Any]:
        return self._gather(values).sum(axis=0)


def largest_where(holds: Callable[[float], bool]) -> float:
    """The largest float32, not negative, for which `holds`; it must be true up to it. Else 0."""
    return _float(_bisect(lambda bits: holds(_float(bits)), INFINITY_BITS))


def _float(bits: int) -> float:
    return float(np.array(bits, dtype=np.int32).view(np.float32))


def _order(values: Tensor) -> Tensor:
    """Integers in the order of non-negative float32 values; NaN is the largest."""
    clean = torch.nan_to_num(values.float(), nan=torch.inf, posinf=torch.inf).clamp(min=0.0)
    return clean.contiguous().view(torch.int32).long()


def _bisect(holds: Callable[[int], bool], end: int) -> int:
    """The largest number in [0, end) for which `holds`, which is true up to it; 0 if none is."""
    low = 0
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if holds(middle) else (low, middle)
    return low
