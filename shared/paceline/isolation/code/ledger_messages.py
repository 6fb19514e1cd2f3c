"""Groups and batches as messages to a job's own filters and advantages, and their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.plugins import (
    Advantages,
    Context,
    Drop,
    EpisodeBatch,
    FinishedGroup,
    GroupOutcome,
    Keep,
    Repair,
    Turns,
)

_COLUMNS = ("groups", "tasks", "rewards", "lengths", "truncated")
_OPTIONAL = ("advantages", "weights", "logprobs", "replayed", "parents", "inherited")
_TURNS = ("episodes", "indices", "starts", "ends", "rewards", "matched", "patched")
MOST_NOTES = 100
_PART, _TURN = "part/", "turn/"
Arrays = Mapping[str, NDArray[Any]]


def group_fields(group: FinishedGroup) -> dict[str, Any]:
    """A group as JSON."""
    return asdict(group)


def group_of(fields: Mapping[str, Any]) -> FinishedGroup:
    """A group from JSON."""
    return FinishedGroup(**_with_tuples(fields))


def decision_fields(answer: Any, num_episodes: int) -> dict[str, Any]:
    """What a filter has returned as JSON: the indices it keeps, none if it drops the group.

    Of a group that it repairs it keeps all, and `repair` has the indices.

    Raises:
        TypeError: it is something else.
        ValueError: the indices are not some of the group, in ascending order.
    """
    if isinstance(answer, Drop):
        return {"kept": []}
    if isinstance(answer, Repair):
        return {"kept": list(range(num_episodes)), "repair": answer.of(num_episodes)}
    if not isinstance(answer, Keep):
        raise TypeError(f"an answer of type {type(answer).__name__}; Keep, Drop or Repair is due")
    return {"kept": answer.of(num_episodes)}


def batch_arrays(batch: EpisodeBatch) -> dict[str, NDArray[Any]]:
    """The columns of a batch that are arrays, by name."""
    found = {name: getattr(batch, name) for name in _COLUMNS}
    for name in _OPTIONAL:
        if (column := getattr(batch, name)) is not None:
            found[name] = column
    found |= {_PART + name: column for name, column in batch.parts.items()}
    if batch.turns is not None:
        found |= {_TURN + name: getattr(batch.turns, name) for name in _TURNS}
    return found


def batch_of(answers: list[str], arrays: Arrays) -> EpisodeBatch:
    """The batch with these columns."""
    parts = {n.removeprefix(_PART): each for n, each in arrays.items() if n.startswith(_PART)}
    has_turns = _TURN + _TURNS[0] in arrays
    columns: dict[str, Any] = {name: arrays[name] for name in _COLUMNS}
    optional: dict[str, Any] = {name: arrays.get(name) for name in _OPTIONAL}
    return EpisodeBatch(
        **columns,
        **optional,
        answers=tuple(answers),
        parts=parts,
        turns=Turns(**{name: arrays[_TURN + name] for name in _TURNS}) if has_turns else None,
    )


def context_fields(context: Context, memory: Mapping[str, str]) -> dict[str, Any]:
    """A context as JSON; `memory` has the JSON text of each value."""
    return {
        "step": context.step,
        "total_steps": context.total_steps,
        "seed": context.seed,
        "memory": dict(memory),
        "outcomes": [asdict(each) for each in context.outcomes],
        "metrics": [dict(each) for each in context.metrics],
    }


def context_of(fields: Mapping[str, Any]) -> Context:
    """A context from JSON."""
    return Context(
        step=fields["step"],
        total_steps=fields["total_steps"],
        seed=fields["seed"],
        memory={key: json.loads(text) for key, text in fields["memory"].items()},
        outcomes=[GroupOutcome(**_with_tuples(each)) for each in fields["outcomes"]],
        metrics=fields["metrics"],
    )


def advantages_message(answer: Any) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What an advantage has returned: its memory and notes as JSON, and its arrays.

    Raises:
        TypeError: it is no array of numbers, or the memory is not JSON.
        ValueError: likewise.
    """
    if not isinstance(answer, Advantages):
        answer = Advantages(answer)
    arrays = {"values": _numbers(answer.values)}
    if answer.weights is not None:
        arrays["weights"] = _numbers(answer.weights)
    memory = {str(key): value for key, value in answer.memory.items()}
    json.dumps(memory, allow_nan=False)
    notes = {str(name): float(value) for name, value in answer.notes.items()}
    return {"memory": memory, "notes": notes}, arrays


def advantages_of(fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> Advantages:
    """Advantages from an answer, which are still to be checked.

    Raises:
        TypeError: it is none.
    """
    memory, notes = fields.get("memory"), fields.get("notes")
    if "values" not in arrays or not isinstance(memory, dict) or not isinstance(notes, dict):
        raise TypeError("an unreadable answer")
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise TypeError("an unreadable answer: bytes instead of numbers")
    if len(cast("dict[str, Any]", notes)) > MOST_NOTES:
        raise TypeError(f"{len(notes)} notes; at most {MOST_NOTES} are allowed")
    return Advantages(arrays["values"], arrays.get("weights"), memory, notes)


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields from JSON, whose columns are tuples."""
    parts = {name: tuple(values) for name, values in fields["parts"].items()}
    columns = {name: tuple(each) for name, each in fields.items() if isinstance(each, list)}
    return {**fields, **columns, "parts": parts}


def _numbers(values: Any) -> NDArray[Any]:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise TypeError(
            f"an answer of shape {found.shape}; one number per episode or policy token is needed"
        )
    return found
