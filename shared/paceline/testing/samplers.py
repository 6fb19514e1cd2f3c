"""Contract tests for samplers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from paceline.plugins import (
    MAX_CURSOR_BYTES,
    MAX_PICK_BYTES,
    Context,
    GroupOutcome,
    Learns,
    Pick,
    Sampler,
)
from paceline.testing.common import expect, resolved, through_json

SIZE, EPOCHS = 17, 3
BATCH, GROUP = 5, 4


def fulfils_the_contract(plugin: Any, options: Mapping[str, Any] | None = None) -> None:
    """Check for valid positions, an end after the epochs, and the same order after any restore.

    One that learns is also told of outcomes, and must draw the same tasks after a restart.

    `plugin` is called as `make(size, seed=..., epochs=..., **options)`.
    """
    make = resolved("samplers", plugin)
    given = dict(options or {})

    def made(epochs: int | None = EPOCHS) -> Sampler:
        sampler: Sampler = make(SIZE, seed=5, epochs=epochs, **given)
        if isinstance(sampler, Learns):
            sampler.remember({})
        return sampler

    if isinstance(made(), Learns):
        _learns(made)
        return

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
        _position(endless.next(), "without epochs there is always a task")


def _learns(made: Callable[[], Sampler]) -> None:
    """Batches of a job, each drawn twice: by the sampler, and by one that is new at every draw."""
    sampler, memory = made(), dict[str, Any]()
    for step in range(EPOCHS * SIZE // BATCH):
        outcomes: list[GroupOutcome] = []
        for _ in range(BATCH):
            resumed, state = made(), _state(sampler)
            _taught(resumed, memory).load(state)
            found = sampler.next()
            expect(found == resumed.next(), f"restored in step {step}, it draws another task")
            if found is not None:
                outcomes.append(_outcome(found, step))
        state = sampler.state()
        context = Context(step, EPOCHS, 5, memory=memory, outcomes=outcomes)
        changed = _json(_learner(sampler).observe(outcomes, context))
        same = _json(_learner(made()).observe(outcomes, context))
        expect(changed == same, "what it learns depends on more than outcomes and context")
        memory = {**memory, **changed}
        memory = {key: value for key, value in memory.items() if value is not None}
        _taught(sampler, memory)
        expect(sampler.state() == state, "`remember` or `observe` changes the cursor")


def _json(changed: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(changed), allow_nan=False))


def _taught(sampler: Sampler, memory: Mapping[str, Any]) -> Sampler:
    _learner(sampler).remember(memory)
    return sampler


def _learner(sampler: Sampler) -> Learns:
    assert isinstance(sampler, Learns)
    return sampler


def _outcome(found: Pick | int, step: int) -> GroupOutcome:
    """Task t succeeds in t % (`GROUP` + 1) of `GROUP` episodes; every seventh one fails."""
    task = _position(found, "None only after the last epoch")
    picked = found if isinstance(found, Pick) else Pick(task)
    same: dict[str, Any] = {"variant": picked.variant, "meta": picked.meta}
    if (task + step) % 7 == 0:
        return GroupOutcome(task, (), (), failed="group_failed", **same)
    solved = task % (GROUP + 1)
    return GroupOutcome(
        task,
        tuple(float(index < solved) for index in range(GROUP)),
        tuple(str(index) for index in range(GROUP)),
        filtered=solved in (0, GROUP),
        lengths=tuple(range(1, GROUP + 1)),
        truncated=(False,) * GROUP,
        kept=(solved not in (0, GROUP),) * GROUP,
        **same,
    )


def _drawn(sampler: Sampler) -> tuple[list[int], list[dict[str, Any]]]:
    order: list[int] = []
    states = [_state(sampler)]
    while (found := sampler.next()) is not None:
        order.append(_position(found, "None only after the last epoch"))
        states.append(_state(sampler))
        expect(len(order) <= SIZE * EPOCHS, f"more than {SIZE * EPOCHS} tasks in {EPOCHS} epochs")
    expect(sampler.next() is None, "it yields a task after the end")
    return order, states


def _state(sampler: Sampler) -> dict[str, Any]:
    state = through_json(sampler.state())
    num_bytes = len(json.dumps(state))
    expect(
        num_bytes <= MAX_CURSOR_BYTES,
        f"the state has {num_bytes} bytes; at most {MAX_CURSOR_BYTES} are allowed",
    )
    return state


def _position(found: Any, rule: str) -> int:
    position = found
    if isinstance(found, Pick):
        position = found.task
        told = json.dumps({"variant": found.variant, "meta": dict(found.meta)}, allow_nan=False)
        expect(
            len(told) <= MAX_PICK_BYTES,
            f"a pick has {len(told)} bytes; at most {MAX_PICK_BYTES} are allowed",
        )
    within = isinstance(position, int) and 0 <= position < SIZE
    expect(within, f"position {position!r} of {SIZE} tasks; {rule}")
    return position
