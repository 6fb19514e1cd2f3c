"""Advantages with a memory, and with a value for each token."""

from paceline.plugins import Advantages, Context, EpisodeBatch, declares


@declares(needs=("memory",))
def stored_mean(
    batch: EpisodeBatch, context: Context, *, size: int = 0, key: str = ""
) -> Advantages:
    """Reward minus the mean of all rewards that its task got before; `size`: of a useless value."""
    seen = {int(task): tuple(found) for task, found in context.memory.items() if task.isdigit()}
    values = batch.rewards.copy()
    for index, task in enumerate(batch.tasks.tolist()):
        total, count = seen.get(task, (0.0, 0))
        values[index] -= total / count if count else 0.0
    changed: dict[str, object] = {}
    for outcome in context.outcomes:
        total, count = seen.get(outcome.task, (0.0, 0))
        seen[outcome.task] = total + sum(outcome.rewards), count + len(outcome.rewards)
        changed[str(outcome.task)] = seen[outcome.task]
    if size:
        changed[key or "useless"] = "x" * size
    return Advantages(values, memory=changed, notes={"tasks_seen": float(len(seen))})


@declares(needs=("tokens", "turns"))
def per_token(batch: EpisodeBatch, context: Context) -> Advantages:
    """The surprise of each token plus 100 times its turn; wrong episodes are not trained."""
    assert batch.logprobs is not None
    assert batch.turns is not None
    values = -batch.logprobs
    for start, end, index in zip(
        batch.turns.starts, batch.turns.ends, batch.turns.indices, strict=True
    ):
        values[start:end] += 100.0 * (index + 1)
    return Advantages(values, weights=batch.rewards, notes={"seed": float(context.seed)})


def doubled(batch: EpisodeBatch, context: Context) -> Advantages:
    """Twice what the part before gave; forgets to declare that it needs a memory if it has one."""
    assert batch.advantages is not None
    return Advantages(2 * batch.advantages, memory=dict(context.memory))
