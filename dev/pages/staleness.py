"""Generates the table and the picture of `benchmarks/staleness.py` in docs/methods.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "methods.md"
PICTURE = ROOT / "docs" / "staleness.svg"
RESULTS = ROOT / "benchmarks" / "results" / "staleness.json"
BEGIN = "<!-- table: written by dev/pages/staleness.py -->\n"
END = "<!-- end of staleness -->\n"
LR, DELAY = 2e-5, 64
EARLY = 2  # eighths of the steps
WIDTH, HEIGHT, LEFT, TOP = 640, 320, 48, 16
COLOURS = [
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#e45756",
    "#72b7b2",
    "#b279a2",
    "#9d755d",
    "#bab0ac",
    "#333333",
    "#eeca3b",
]
Run = dict[str, Any]


def files() -> dict[Path, str]:
    """Path and content of the files."""
    runs: list[Run] = [
        run for run in json.loads(RESULTS.read_text())["runs"] if abs(run["lr"] - LR) < LR / 10
    ]
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    return {DOCUMENT: head + BEGIN + table(runs) + END + tail, PICTURE: picture(runs)}


def table(runs: list[Run]) -> str:
    """Shares of the gain that PPO has without delay, as Markdown."""
    base = {run["seed"]: run for run in runs if (run["method"], run["delay"]) == ("ppo", 0)}
    rows = [
        "| recipe | seeds | of the gain at step 48 | at step 192 | held-out reward at the end |",
        "|---|--:|--:|--:|--:|",
    ]
    for method, own in sorted(_stale(runs).items(), key=lambda item: -_kept(item[1], base, EARLY)):
        early, late = (f"{_kept(own, base, at):.0%}" for at in (EARLY, -1))
        reward = statistics.mean(run["after"] for run in own)
        rows.append(f"| `{method}` | {len(own)} | {early} | {late} | {reward:.3f} |")
    return "\n".join(rows) + "\n"


def _stale(runs: list[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run["delay"] == DELAY:
            found.setdefault(run["method"], []).append(run)
    return found


def _kept(own: list[Run], base: dict[int, Run], at: int) -> float:
    """The mean over seeds of the gain, by that of PPO without delay; `at` -1: the last two."""
    return statistics.mean(
        _gain(run, at) / _gain(base[run["seed"]], at) for run in own if run["seed"] in base
    )


def _gain(run: Run, at: int) -> float:
    return (run["after"] if at < 0 else run["curve"][at]) - run["before"]


def picture(runs: list[Run]) -> str:
    """Held-out reward by step at the largest delay, as SVG; of several seeds the mean."""
    lines = {"ppo, no delay": [r for r in runs if (r["method"], r["delay"]) == ("ppo", 0)]}
    lines |= _stale(runs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 140} {HEIGHT + 48}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH + 140}" height="{HEIGHT + 48}" fill="white"/>',
    ]
    for tick in range(2, 11, 2):
        y = _y(tick / 10)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 28}" y="{y + 4}">{tick / 10:.1f}</text>')
    for eighth in range(0, 9, 2):
        parts.append(f'<text x="{_x(eighth) - 8}" y="{HEIGHT + 20}">{eighth * 24}</text>')
    parts.append(f'<text x="{WIDTH // 2 - 60}" y="{HEIGHT + 40}">optimiser steps</text>')
    for index, (name, own) in enumerate(lines.items()):
        curve = [statistics.mean(values) for values in zip(*(r["curve"] for r in own), strict=True)]
        points = " ".join(f"{_x(place)},{_y(value)}" for place, value in enumerate(curve))
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        y = TOP + 20 + 18 * index
        parts.append(f'<text x="{WIDTH + 16}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(eighth: int) -> int:
    return LEFT + round(eighth / 8 * (WIDTH - LEFT - 8))


def _y(reward: float) -> int:
    return round(TOP + (1.0 - reward) * (HEIGHT - TOP))
