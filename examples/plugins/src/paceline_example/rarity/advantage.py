"""An advantage with a memory, which follows another one in `experience.advantage_shaping`."""

from __future__ import annotations

import numpy as np

from paceline.plugins import Advantages, Context, EpisodeBatch


def rarity(batch: EpisodeBatch, context: Context, *, power: float = 0.5) -> Advantages:
    """The advantages of the part before, divided by the times that their task was seen [N] or [T].

    Memory: by task, in how many groups it was seen. `outcomes` has every group exactly once, also
    those that a filter dropped, whatever is restarted.
    """
    seen = np.array([context.memory.get(str(task), 0) for task in batch.tasks.tolist()])
    factors = 1.0 / np.maximum(seen, 1) ** power
    before = batch.rewards if batch.advantages is None else batch.advantages
    if len(before) != len(factors):  # one per token
        factors = np.repeat(factors, batch.lengths)
    counts: dict[str, int] = {}
    for outcome in context.outcomes:
        task = str(outcome.task)
        counts[task] = counts.get(task, context.memory.get(task, 0)) + 1
    return Advantages(before * factors, memory=counts, notes={"times_seen": float(seen.mean())})
