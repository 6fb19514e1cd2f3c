"""Picks and starts of episodes as JSON, checked; equal starts in a row take the room of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, cast

from paceline.plugins import MAX_PICK_BYTES, MAX_STARTS_BYTES, MAX_WAVE, Limits, Pick, Start

PLAIN = Start()
Runs = list[tuple[int, dict[str, Any]]]
_MAX_TEMPERATURE = 100.0  # as for `sampling.temperature`


def pick_text(variant: str, meta: Mapping[str, Any]) -> str:
    """Variant and meta as JSON; empty if there are none.

    Raises:
        TypeError: they are not JSON.
        ValueError: they are too large, or a number is not finite.
    """
    if not variant and not meta:
        return ""
    text = json.dumps({"variant": str(variant), "meta": dict(meta)}, allow_nan=False)
    if len(text) > MAX_PICK_BYTES:
        raise ValueError(f"a pick has {len(text)} bytes; at most {MAX_PICK_BYTES} are allowed")
    return text


def pick_of(task: int, text: str) -> Pick:
    """The pick of a task, from the text of its variant and meta."""
    fields: dict[str, Any] = json.loads(text) if text else {}
    return Pick(task, **fields)


def checked_starts(starts: Any, *, least: int) -> list[Start]:
    """What an allocator has returned, as far as it can be checked without its group.

    Raises:
        TypeError: one is no `Start`, or its meta is not JSON.
        ValueError: there are too many or too few, or one is too large or has a limit out of range.
    """
    found = list(islice(starts, MAX_WAVE + 1))
    if not least <= len(found) <= MAX_WAVE:
        count = f"more than {MAX_WAVE}" if len(found) > MAX_WAVE else len(found)
        raise ValueError(f"{count} episodes; {least} to {MAX_WAVE} are allowed in a wave")
    for start in found:
        if not isinstance(start, Start):
            raise TypeError(f"a start of type {type(start).__name__}; Start is needed")
        variant: Any = start.variant
        if not isinstance(variant, str):
            raise TypeError(f"variant {variant!r} of a start; a text is needed")
        pick_text(start.variant, start.meta)
        _check(start.limits)
    return found


def runs_of(starts: Sequence[Start]) -> Runs:
    """Runs of equal starts: [count, what is not a default]."""
    if all(start is PLAIN or start == PLAIN for start in starts):
        return [(len(starts), {})]
    runs: Runs = []
    for fields in map(_fields, starts):
        if runs and runs[-1][1] == fields:
            runs[-1] = (runs[-1][0] + 1, fields)
        else:
            runs.append((1, fields))
    return runs


def runs_text(starts: Sequence[Start]) -> str:
    """The runs as JSON; empty if all are defaults.

    Raises:
        ValueError: they are too large.
    """
    runs = runs_of(starts)
    if not any(fields for _, fields in runs):
        return ""
    text = json.dumps(runs, allow_nan=False)
    if len(text) > MAX_STARTS_BYTES:
        raise ValueError(
            f"the starts of the group have {len(text)} bytes; at most {MAX_STARTS_BYTES} are kept"
        )
    return text


def starts_of_runs(runs: Any, *, most: int) -> list[Start]:
    """The start of each episode, of at most so many; they are still to be checked.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: they are no runs.
    """
    found: list[Start] = []
    for count, fields in cast("Runs", runs):
        found += [start_of(fields)] * min(int(count), most - len(found))
    return found


def start_of(fields: Mapping[str, Any]) -> Start:
    """A start from what is not a default."""
    if not fields:
        return PLAIN
    parent = fields.get("parent")
    return Start(
        variant=fields.get("variant", ""),
        parent=(parent[0], parent[1]) if parent else None,
        limits=Limits(**fields.get("limits", {})),
        meta=fields.get("meta", {}),
        tasks=tuple(fields.get("tasks", ())),
    )


def _fields(start: Start) -> dict[str, Any]:
    limits = {name: value for name, value in asdict(start.limits).items() if value is not None}
    every: dict[str, Any] = {
        "variant": start.variant,
        "parent": list(start.parent) if start.parent else None,
        "limits": limits,
        "meta": dict(start.meta),
        "tasks": list(start.tasks),
    }
    return {name: value for name, value in every.items() if value}


def _check(limits: Limits) -> None:
    numbers: list[tuple[str, Any]] = [
        ("max_turns", limits.max_turns),
        ("max_tokens", limits.max_tokens),
    ]
    for name, value in numbers:
        if value is not None and (not isinstance(value, int) or not 0 < value < 1 << 31):
            raise ValueError(f"limit {name} is {value!r}; a positive integer is needed")
    heat = limits.temperature
    if heat is not None and not 0.0 < heat <= _MAX_TEMPERATURE:
        raise ValueError(f"temperature {heat!r}; more than 0 and at most {_MAX_TEMPERATURE} is due")
