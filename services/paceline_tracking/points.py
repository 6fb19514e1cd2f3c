"""Converts history rows, trajectories and worker loads to tracker points. No side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from paceline.platform.progress import LedgerProgress
from paceline.plugins import TrackedPoint, TrackedSample
from paceline.types import Trajectory, Worker
from paceline_tracking.history import TrackedRow

MOST_CHARS = 4000
Counters = Mapping[str, float]
# Counters of the ledger, which are reported as rates.
_TOTALS = {
    "tokens_generated": "tokens_per_s",
    "trained_tokens": "trained_tokens_per_s",
    "trainer_wait_total_s": "trainer_wait_share",
}
_LEVELS = ("ready_groups", "open_groups", "headroom_groups", "payload_bytes")
# Counters of workers other than seconds.
_GROWING = frozenset({"tokens_generated", "prompt_tokens", "tokens", "scored"})


def flat(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """All finite numbers by path (`train/loss`); other values are omitted."""
    return {
        name: float(value)
        for name, value in _leaves(values, prefix)
        if isinstance(value, (bool, int, float)) and math.isfinite(value)
    }


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in cast(Mapping[str, Any], value).items():
        yield from _leaves(inner, f"{path}/{key}")


def point_of(
    row: TrackedRow, *, version: int, samples: Sequence[TrackedSample] = ()
) -> TrackedPoint:
    """The point of a history row; `version` is used if the row has none.

    The values of an eval with a name are at `eval/NAME/...`. The mean of one that measured too few
    of its tasks is named `partial_reward`, so that trackers do not plot and rank it with complete
    ones.
    """
    told = row.values.get("version", version)
    name = row.values.get("set", "")
    prefix = f"{row.kind}/{name}" if name else str(row.kind)
    values = flat(row.values, prefix)
    if row.values.get("complete") is False and f"{prefix}/reward" in values:
        values[f"{prefix}/partial_reward"] = values.pop(f"{prefix}/reward")
    return TrackedPoint(row.kind, row.index, row.step, int(told), values, tuple(samples))


def prompt_of(trajectory: Trajectory) -> Sequence[int]:
    """The tokens before the first sampled one."""
    if not trajectory.transcripts:
        return ()
    first = trajectory.transcripts[0]
    return first.tokens[: first.num_prompt_tokens]


def sample_of(trajectory: Trajectory, *, prompt: str, staleness: int) -> TrackedSample:
    """A trajectory as text: the prompt before its first sampled token, and the response."""
    score = trajectory.score
    return TrackedSample(
        prompt=prompt[:MOST_CHARS],
        response=(trajectory.completion_text or trajectory.response_text)[:MOST_CHARS],
        reward=score.reward,
        parts=dict(score.parts),
        version=trajectory.oldest_version,
        staleness=staleness,
        truncated=trajectory.truncated,
        episode=trajectory.episode_id,
    )


class Rates:
    """Increases of counters per second, between two calls."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._looked_s: float | None = None

    def system(
        self, live: LedgerProgress, workers: Iterable[Worker], *, now_s: float
    ) -> dict[str, float]:
        """Values of a system point; the first one has no rates."""
        workers = list(workers)
        grown: dict[str, float] = {}
        elapsed = None if self._looked_s is None else now_s - self._looked_s
        counters = _counters(live, workers)
        if elapsed:
            grown = _rates(self._last, counters, elapsed)
        self._last, self._looked_s = counters, now_s
        levels = {f"system/{name}": float(getattr(live, name)) for name in _LEVELS}
        return levels | _states(workers) | grown


def _counters(live: LedgerProgress, workers: Sequence[Worker]) -> dict[str, float]:
    """All counters, as `ledger//<name>` and `<kind>/<worker>:<pid>/<name>`."""
    found = {f"ledger//{name}": float(getattr(live, name)) for name in _TOTALS}
    for worker in workers:
        for name, value in worker.load.items():
            if name.endswith("_s") or name in _GROWING:
                found[f"{worker.kind}/{worker.worker_id}:{worker.pid}/{name}"] = value
    return found


def _rates(before: Counters, after: Counters, elapsed: float) -> dict[str, float]:
    """Rates by kind: sums over its workers; seconds per second (except CPU) are means."""
    sums: dict[tuple[str, str], list[float]] = {}
    for path in before.keys() & after.keys():
        kind, _, name = path.split("/")
        sums.setdefault((kind, name), []).append(max(after[path] - before[path], 0.0) / elapsed)
    rates: dict[str, float] = {}
    for (kind, name), values in sums.items():
        if kind == "ledger":
            rates[f"system/{_TOTALS[name]}"] = sum(values)
        elif name == "cpu_s":
            rates[f"system/{kind}/cpu_cores"] = sum(values)
        elif name.endswith("_s"):
            rates[f"system/{kind}/{name.removesuffix('_s')}_share"] = sum(values) / len(values)
        else:
            rates[f"system/{kind}/{name}_per_s"] = sum(values)
    return rates


def _states(workers: Sequence[Worker]) -> dict[str, float]:
    """Number of workers of each kind, and sums of their gauges."""
    found: dict[str, float] = {}
    for worker in workers:
        _add(found, f"system/{worker.kind}/workers", 1.0)
        for name, value in worker.load.items():
            if not name.endswith("_s") and name not in _GROWING:
                _add(found, f"system/{worker.kind}/{name}", value)
    return found


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value
