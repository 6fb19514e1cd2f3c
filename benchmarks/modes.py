"""Throughput of the modes of `experience.mode` beside what each can reach at best.

    .venv/bin/python benchmarks/modes.py --slots 64 --json benchmarks/results/modes.json
    .venv/bin/python benchmarks/modes.py --dart --json benchmarks/results/dart.json

`--dart` measures DART's three ratios instead (`generation/dart.py`).

A step trains 256 episodes, 32 groups of 8. Lengths of answers are lognormal with p99/p50 = 8 and
cut at the p99, as by `max_tokens`. Engines decode at a fixed rate in 16, 64 or 256 slots, and a
training step takes half of the time that all slots need for 256 answers (`ideal_s`). Ledger,
environment worker, reward service, weight transfers and messages are real; engines and trainer are
simulated.

Bounds. With T for the training time and I for `ideal_s`, a step takes at least

* `asynchronous`, `rollout_wise`: max(I, T), as every token needs a slot, and training overlaps
* `april`: I + T, since nothing decodes while a step is trained; all that is recalled is used later
* `synchronous`, `coupled`: T + E[makespan], the time in which the slots, taking answers in turn,
  finish all 256: with a slot for each it is the longest of 256 (E of the maximum)
* `redundancy`: T + the same where each group starts 10 and ends with its 8th: with a slot for each
  it is the longest over 32 groups of the 8th of 10 order statistic

`least_s` is the first two formulas; `bound_s` is the schedule of the mode by its rules for the very
lengths that the run draws (`generation/ideal.py`), so it has no sampling error, and includes the
start of the job and what is too old. `of_bound` is `bound_s` / `step_s`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from generation import dart
from generation.ideal import Ideal, Rules
from generation.measure import Measured, Setting, measure
from pipeline import machine
from rig.smoke import arguments as arguments_of

from paceline.platform.digest import number
from paceline_experience.ledger.task_cursor import stable_seed
from paceline_rollout.engines.simulated import Lengths

BATCH_GROUPS, GROUP = 32, 8
EPISODES = BATCH_GROUPS * GROUP
Z99 = 2.3263478740408408  # of the standard normal distribution
MEDIAN, MAX_TOKENS = 80, 640  # tokens
SIGMA = math.log(MAX_TOKENS / MEDIAN) / Z99
LENGTHS = Lengths("lognormal", mean=MEDIAN * math.exp(SIGMA**2 / 2), sigma=SIGMA)
SEED, SAMPLE = 0, 4096
WORKERS = 2
EXTRA = 2  # redundant episodes of a group


@dataclass(frozen=True, slots=True)
class Mode:
    """One row: the settings of `experience`, and the rules of its bound."""

    staleness: int
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    rules: dict[str, Any] = field(default_factory=dict[str, Any])
    barrier: bool = False


MODES = {
    "asynchronous": Mode(4),
    "rollout_wise": Mode(4, {"mode": "rollout_wise"}),
    # The longest answers take more than four steps where every episode has a slot of its own.
    "april": Mode(8, {"mode": "april"}, {"april": True}),
    "redundancy": Mode(
        0, {"allocator": {"kind": "redundancy", "extra": EXTRA}}, {"extra": EXTRA}, barrier=True
    ),
    "synchronous": Mode(0, barrier=True),
    "coupled": Mode(0, {"mode": "coupled"}, barrier=True),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How fast slots decode: so fast that a run takes half a minute, and no core is busy."""

    slots: int
    episode_s: float  # mean time of an answer
    steps: int
    barrier_steps: int

    @property
    def ideal_s(self) -> float:
        """Time in which all slots decode a batch."""
        return EPISODES * self.episode_s / self.slots

    @property
    def rate(self) -> float:
        """Tokens per second of a slot."""
        return mean_tokens() / self.episode_s


SCALES = {
    16: Scale(16, 0.4, steps=7, barrier_steps=4),
    64: Scale(64, 1.0, steps=9, barrier_steps=5),
    256: Scale(256, 6.0, steps=8, barrier_steps=3),
}
SMOKE = Scale(64, 0.1, steps=3, barrier_steps=2)


def tokens(group: int, index: int) -> int:
    """Length of the answer of an episode, as the engine draws it."""
    seed = number(stable_seed(SEED, "train", group), index) >> 1
    return min(LENGTHS.draw(seed), MAX_TOKENS)


@cache
def mean_tokens() -> float:
    """Mean length of an answer."""
    return statistics.fmean(tokens(n, i) for n in range(SAMPLE) for i in range(GROUP))


def setting(scale: Scale, mode: Mode, train_s: float) -> Setting:
    """The job of a row. More episodes than slots are open, so that no slot has to wait."""
    engine = {
        "kind": "simulated",
        "decode_tokens_per_s": scale.rate,
        "length": {"kind": "lognormal", "mean": LENGTHS.mean, "sigma": SIGMA},
    }
    job: dict[str, Any] = {
        "name": "modes",
        "model": {"path": "none", "dtype": "float32"},
        "tasks": {"environment": "arithmetic", "seed": SEED},
        "eval": None,
        "sampling": {
            "max_tokens": MAX_TOKENS,
            "max_context": MAX_TOKENS + 64,
            "on_truncation": "score",
        },
        "reward": [{"kind": "exact"}],
        "experience": {
            "batch_groups": BATCH_GROUPS,
            "group_size": GROUP,
            "max_staleness": mode.staleness,
            "filters": [],
            **mode.settings,
        },
        "rollout": {
            "engine": engine,
            "replicas": WORKERS,
            "max_concurrent": scale.slots // WORKERS,
        },
        "trainer": {"checkpoint": {"every": 1000}},
        "stop": {"steps": 1000},
    }
    return Setting(
        job=job,
        workers=WORKERS,
        environments=scale.slots * 5 // 4,
        train_s=train_s,
        steps=scale.barrier_steps if mode.barrier else scale.steps,
        first=first_step(mode),
    )


def first_step(mode: Mode) -> int:
    """Steps before the measurement: with a barrier all are alike, else the first ones wait."""
    return 1 if mode.barrier else 2


def bound(scale: Scale, mode: Mode, train_s: float, steps: int) -> float:
    """Least mean time of the measured steps."""
    rules = Rules(
        slots=scale.slots,
        batch_groups=BATCH_GROUPS,
        group_size=GROUP,
        max_staleness=mode.staleness,
        train_s=train_s,
        **mode.rules,
    )
    rate = scale.rate
    return Ideal(rules, lambda n, i: tokens(n, i) / rate).run(steps).step_s(first_step(mode) - 1)


def row(name: str, scale: Scale) -> dict[str, Any]:
    """Run one mode."""
    mode, train_s = MODES[name], scale.ideal_s / 2
    wanted = setting(scale, mode, train_s)
    before = os.getloadavg()[0]
    measured = measure(wanted)
    steps = measured.steps
    step_s = measured.seconds / len(steps)
    bound_s = bound(scale, mode, train_s, wanted.steps)
    least_s = {"asynchronous": scale.ideal_s, "april": scale.ideal_s + train_s}
    found: dict[str, Any] = {
        "mode": name,
        "slots": scale.slots,
        "max_staleness": mode.staleness,
        "steps": len(steps),
        "ideal_s": scale.ideal_s,
        "train_s": train_s,
        "step_s": step_s,
        "bound_s": bound_s,
        "least_s": least_s.get("asynchronous" if name == "rollout_wise" else name),
        "of_bound": bound_s / step_s,
        "episodes_per_s": sum(each.episodes for each in steps) / measured.seconds,
        "slots_busy": measured.tokens / (scale.slots * scale.rate * measured.seconds),
        "trainer_busy": len(steps) * train_s / measured.seconds,
        "age_mean": statistics.fmean(each.age for each in steps),
        "cpu_cores": measured.cpu_s / measured.seconds,
        "load": [before, os.getloadavg()[0]],
    }
    found |= lengths(measured, first_step(mode))
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in found.items()}


def lengths(measured: Measured, first: int) -> dict[str, Any]:
    """What was continued, discarded and trained, by the history of the measured steps."""
    rows = measured.rows[first:]
    mean: Callable[[str], float] = lambda key: statistics.fmean(each[key] for each in rows)  # noqa: E731
    finished = sum(_lost(each, "dropped") for each in rows)
    aborted = sum(_lost(each, "aborted") for each in rows)
    return {
        "resumed_share": mean("resumed_share"),
        "resumed_tokens": sum(
            each["resumed_share"] * each["batch_episodes"] * each["resumed_tokens_mean"]
            for each in rows
        )
        / len(rows),
        "discarded_finished": round(finished),
        "discarded_unfinished": round(aborted),
        "tokens_mean_trained": statistics.fmean(
            each.tokens / each.episodes for each in measured.steps
        ),
        "tokens_mean_drawn": mean_tokens(),
        "dropped": measured.report["dropped"],
    }


def _lost(values: dict[str, Any], kind: str) -> float:
    """Number of episodes beside a batch, from their share."""
    share = values[f"{kind}_share"]
    return share / (1 - share) * values["batch_episodes"]


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a file, replaced by new ones of the same mode and slots."""
    known: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {(each["slots"], each["mode"]) for each in rows}
    kept = [each for each in known if (each["slots"], each["mode"]) not in new]
    order = list(MODES)
    return sorted([*kept, *rows], key=lambda each: (each["slots"], order.index(each["mode"])))


def main() -> int:
    """Run the chosen modes, and merge their rows into the file."""
    parser = argparse.ArgumentParser(description="Throughput of the modes beside their bounds.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--slots", type=int, nargs="*", choices=list(SCALES), default=list(SCALES))
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument("--dart", action="store_true", help="DART's three ratios instead")
    arguments = arguments_of(parser, slots=[64], modes=["asynchronous"])
    if arguments.dart:
        sizes = {"coupled_steps": 2, "steps": 5} if arguments.smoke else {}
        _write(arguments.json, dart.run(**sizes))
        return 0
    rows: list[dict[str, Any]] = []
    for slots in arguments.slots:
        for name in arguments.modes:
            rows.append(row(name, SMOKE if arguments.smoke else SCALES[slots]))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        _write(arguments.json, {"rows": merged(arguments.json, rows)})
    return 0


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine()} | content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
