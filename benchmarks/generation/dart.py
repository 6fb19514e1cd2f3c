"""DART's three ratios (arXiv 2509.23866): decoupled modes beside a coupled one, slow environments.

    .venv/bin/python benchmarks/modes.py --dart --json benchmarks/results/dart.json

* environment use: time in which environments have an open episode / (environments * time)
* rollout use: busy share of the rollout workers; one is busy while any request runs
* actions per minute: turns of the episodes that optimiser steps have trained

Coupled means batches of rollouts and weights for all workers at once (`mode: coupled`), decoupled
`rollout_wise` or `asynchronous` within a staleness of 8. 64 environments run episodes of up to 30
turns, a lognormal number with median 3, of which 0.4 s are the call of the environment and 0.2 s an
answer of 20 tokens. A batch is 8 tasks times 8 episodes; a training step takes three quarters of a
mean episode. Engines and trainer are simulated, everything else is real (`generation/`).

`most` is the bound of each ratio in this setting: a use can become 1, and the actions of an
environment that is always used, by the measured time of an action; training takes less than that.
"""

from __future__ import annotations

import json
import os
from typing import Any

from generation.measure import Measured, Setting, measure

ENVIRONMENTS, WORKERS = 64, 2
BATCH_GROUPS, GROUP = 8, 8
TURNS, CALL_S = 30, 0.4
TOKENS, RATE = 20, 100.0  # of an answer; per second of a slot
TRAIN_S = 2.1
GOALS = {"environment_use": 5.5, "rollout_use": 1.6, "actions_per_minute": 1.9}
MODES: dict[str, dict[str, Any]] = {
    "coupled": {"mode": "coupled", "max_staleness": 0},
    "rollout_wise": {"mode": "rollout_wise", "max_staleness": 8},
    "asynchronous": {"mode": "asynchronous", "max_staleness": 8},
}


def setting(mode: str, *, steps: int, first: int) -> Setting:
    """The job of a row."""
    job: dict[str, Any] = {
        "name": "dart",
        "model": {"path": "none", "dtype": "float32"},
        "tasks": {
            "environment": "desk",
            "options": {"turns": TURNS, "median": 3.0, "spread": 1.0, "call_s": CALL_S},
        },
        "eval": None,
        "sampling": {"max_tokens": 2 * TOKENS, "max_context": 2048, "on_truncation": "score"},
        "reward": [{"kind": "environment"}],
        "experience": {
            "batch_groups": BATCH_GROUPS,
            "group_size": GROUP,
            "filters": [],
            **MODES[mode],
        },
        "rollout": {
            "engine": {
                "kind": "simulated",
                "decode_tokens_per_s": RATE,
                "length": {"kind": "fixed", "mean": TOKENS},
            },
            "replicas": WORKERS,
            "max_concurrent": ENVIRONMENTS,
        },
        "trainer": {"checkpoint": {"every": 1000}},
        "stop": {"steps": 1000},
    }
    return Setting(
        job=job,
        workers=WORKERS,
        environments=ENVIRONMENTS,
        train_s=TRAIN_S,
        steps=steps,
        first=first,
    )


def row(mode: str, *, steps: int, first: int) -> dict[str, Any]:
    """Run one mode."""
    before = os.getloadavg()[0]
    measured = measure(setting(mode, steps=steps, first=first))
    return {
        "mode": mode,
        "steps": len(measured.steps),
        "seconds": round(measured.seconds, 1),
        "environment_use": round(measured.open_share, 4),
        "rollout_use": round(min(measured.busy_s / (WORKERS * measured.seconds), 1.0), 4),
        "actions_per_minute": round(60 * _actions(measured) / measured.seconds, 1),
        "turns_mean": round(_actions(measured) / sum(e.episodes for e in measured.steps), 2),
        "trainer_busy": round(len(measured.steps) * TRAIN_S / measured.seconds, 3),
        "cpu_cores": round(measured.cpu_s / measured.seconds, 3),
        "dropped": measured.report["dropped"],
        "load": [before, os.getloadavg()[0]],
    }


def _actions(measured: Measured) -> int:
    return sum(each.turns for each in measured.steps)


def ratios(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Ratios of a decoupled mode to the coupled one, and their bounds."""
    action_s = CALL_S + TOKENS / RATE
    most = {
        "environment_use": 1 / base["environment_use"],
        "rollout_use": 1 / base["rollout_use"],
        "actions_per_minute": 60 * ENVIRONMENTS / action_s / base["actions_per_minute"],
    }
    return {
        key: {
            "ratio": round(other[key] / base[key], 2),
            "most": round(most[key], 2),
            "published": goal,
        }
        for key, goal in GOALS.items()
    }


def run(*, coupled_steps: int = 5, steps: int = 18) -> dict[str, Any]:
    """Rows of all modes, and the ratios."""
    base = row("coupled", steps=coupled_steps, first=1)
    print(json.dumps(base), flush=True)
    rows = [base]
    for mode in ("rollout_wise", "asynchronous"):
        rows.append(row(mode, steps=steps, first=4))
        print(json.dumps(rows[-1]), flush=True)
    return {"rows": rows, "ratios": {each["mode"]: ratios(base, each) for each in rows[1:]}}
