"""Random numbers that are functions of a token, so that no split of a batch changes them."""

from __future__ import annotations

import torch
from torch import Tensor

_MANTISSA = 53


def uniform(keys: Tensor, step: int, count: int) -> Tensor:
    """`count` numbers in [0, 1) for each of the keys, float64 [N, count].

    Counter-based: SplitMix64 (Steele, Lea, Flood 2014) of key, step and number.
    """
    numbers = torch.arange(count, device=keys.device)
    of_step = _mix(torch.tensor(step, device=keys.device))
    mixed = _mix(_mix(keys ^ of_step)[:, None] + numbers)
    return _shift_right(mixed, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def _mix(values: Tensor) -> Tensor:
    mixed = values * _signed(0x9E3779B97F4A7C15) + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shifted right as unsigned numbers of 64 bits."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64)
