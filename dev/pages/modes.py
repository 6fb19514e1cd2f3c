"""Generates the tables of `benchmarks/modes.py` in docs/generation.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "generation.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
DART = {
    "environment_use": "environment use",
    "rollout_use": "rollout use",
    "actions_per_minute": "actions trained per minute",
}


def files() -> dict[Path, str]:
    """Path and content of the page."""
    text = DOCUMENT.read_text()
    modes = json.loads((RESULTS / "modes.json").read_text())["rows"]
    dart = json.loads((RESULTS / "dart.json").read_text())
    text = _with(text, "modes", _modes(modes))
    return {DOCUMENT: _with(text, "dart", _dart(dart))}


def _with(text: str, name: str, table: str) -> str:
    begin = f"<!-- table: {name}, written by dev/pages/modes.py -->\n"
    end = f"<!-- end of {name} -->\n"
    head, _, rest = text.partition(begin)
    return head + begin + table + end + rest.partition(end)[2]


def _modes(rows: list[Row]) -> str:
    lines = [
        "| slots | mode | episodes/s | step, s | bound, s | of the bound | slots busy "
        "| trainer busy | resumed tokens a step | mean age | finished, discarded "
        "| mean tokens trained / drawn |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['slots']} | `{row['mode']}` | {row['episodes_per_s']:.1f} "
            f"| {row['step_s']:.2f} | {row['bound_s']:.2f} | **{row['of_bound']:.2f}** "
            f"| {row['slots_busy']:.0%} | {row['trainer_busy']:.0%} "
            f"| {row['resumed_tokens']:,.0f} | {row['age_mean']:.2f} | {row['discarded_finished']} "
            f"| {row['tokens_mean_trained']:.0f} / {row['tokens_mean_drawn']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _dart(found: dict[str, Any]) -> str:
    rows = {row["mode"]: row for row in found["rows"]}
    others = list(found["ratios"])
    head = "".join(f" `{mode}` | ratio |" for mode in others)
    lines = [
        f"| | `coupled` |{head} at most | published |",
        "|---|--:|" + "--:|" * (2 * len(others) + 2),
    ]
    for key, label in DART.items():
        cells = "".join(
            f" {_value(rows[mode], key)} | **{found['ratios'][mode][key]['ratio']:.2f}** |"
            for mode in others
        )
        first = found["ratios"][others[0]][key]
        lines.append(
            f"| {label} | {_value(rows['coupled'], key)} |{cells} "
            f"{first['most']:.2f} | {first['published']} |"
        )
    return "\n".join(lines) + "\n"


def _value(row: Row, key: str) -> str:
    return f"{row[key]:.0f}" if key == "actions_per_minute" else f"{row[key]:.1%}"
