"""Contract tests for samplers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.plugins import Sampler
from paceline.testing.common import expect, resolved, through_json

SIZE, EPOCHS = 17, 3
MAX_STATE_BYTES = 1024  # the state is written with every admission


def fulfils_the_contract(plugin: Any, options: Mapping[str, Any] | None = None) -> None:
    """Check for valid positions, an end after the epochs, and the same order after any restore.

    `plugin` is called as `make(size, seed=..., epochs=..., **options)`.
    """
    make = resolved("samplers", plugin)
    given = dict(options or {})

    def made(epochs: int | None = EPOCHS) -> Sampler:
        return make(SIZE, seed=5, epochs=epochs, **given)

    order, states = _drawn(made())
    expect(order == _drawn(made())[0], "the same seed yields another order")
    for place in {0, 1, len(order) // 2, len(order)}:
        resumed = made()
        resumed.load(states[place])
        rest, _ = _drawn(resumed)
        expect(
            rest == order[place:],
            f"restored from its state after {place} tasks, it continues with other tasks",
        )
        resumed.load(states[0])
        expect(_drawn(resumed)[0] == order, "rewound to its first state, it yields another order")
    endless = made(None)
    for _ in range(len(order) + SIZE):
        _check(endless.next(), "without epochs there is always a task")


def _drawn(sampler: Sampler) -> tuple[list[int], list[dict[str, Any]]]:
    order: list[int] = []
    states = [_state(sampler)]
    while (position := sampler.next()) is not None:
        _check(position, "None only after the last epoch")
        order.append(position)
        states.append(_state(sampler))
        expect(len(order) <= SIZE * EPOCHS, f"more than {SIZE * EPOCHS} tasks in {EPOCHS} epochs")
    expect(sampler.next() is None, "it yields a task after the end")
    return order, states


def _state(sampler: Sampler) -> dict[str, Any]:
    state = through_json(sampler.state())
    num_bytes = len(json.dumps(state))
    expect(
        num_bytes <= MAX_STATE_BYTES,
        f"the state has {num_bytes} bytes; at most {MAX_STATE_BYTES} are allowed",
    )
    return state


def _check(position: Any, rule: str) -> None:
    within = isinstance(position, int) and 0 <= position < SIZE
    expect(within, f"position {position!r} of {SIZE} tasks; {rule}")
