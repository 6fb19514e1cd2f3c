"""The ledger's counters: episodes by state and by reason, and whether they add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from paceline.enums import EpisodeState

FILTER = "filter:"
_MAX_REASONS = 32
_TRAINING = [str(s) for s in EpisodeState if s is not EpisodeState.MEASURED]


def by_state(numbers: Counter[str]) -> dict[str, int]:
    """Training episodes by state, and `admitted`."""
    return {"admitted": numbers["admitted"], **{name: numbers[name] for name in _TRAINING}}


def by_reason(numbers: Counter[str]) -> dict[str, int]:
    """Dropped training episodes by reason."""
    return {k.removeprefix("drop:"): n for k, n in numbers.items() if k.startswith("drop:") and n}


def replayed(numbers: Counter[str]) -> dict[str, int]:
    """Guests that were trained, if there were any; they are no admitted episodes."""
    return {"replayed": numbers["replayed"]} if numbers["replayed"] else {}


def by_filter(numbers: Counter[str]) -> dict[str, int]:
    """Groups that filters have dropped, by their reason."""
    return {k.removeprefix(FILTER): n for k, n in numbers.items() if k.startswith(FILTER)}


def filter_reason(numbers: Counter[str], reason: str) -> str:
    """The name under which a reason is counted: there are at most 32, and `other`."""
    known = by_filter(numbers)
    return reason if reason in known or len(known) < _MAX_REASONS else "other"


def by_age(numbers: Counter[str]) -> dict[str, int]:
    """Trained episodes by staleness in versions."""
    return {k.removeprefix("stale:"): n for k, n in numbers.items() if k.startswith("stale:")}


def totals(numbers: Counter[str]) -> dict[str, Any]:
    """What only grows, as status and history show it."""
    return {
        "counts": by_state(numbers),
        "dropped": by_reason(numbers),
        "filtered": by_filter(numbers),
        "tokens_generated": numbers["tokens"],
        "eval_tokens": numbers["eval:tokens"],
        "trained_tokens": numbers["trained_tokens"],
        "staleness_histogram": by_age(numbers),
    }


def identity(numbers: Counter[str]) -> Iterable[str]:
    """Violations of the ledger's identity: every admitted episode is in exactly one state."""
    total = sum(numbers[name] for name in _TRAINING)
    if numbers["admitted"] != total:
        yield f"admitted {numbers['admitted']} but {total} are in some state"
    reasons = sum(by_reason(numbers).values())
    if numbers["dropped"] != reasons:
        yield f"dropped {numbers['dropped']} but {reasons} have a reason"
    for name in (n for n, count in numbers.items() if count < 0):
        yield f"counter {name} is {numbers[name]}"
