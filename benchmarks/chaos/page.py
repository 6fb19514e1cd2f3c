"""Generates docs/faults.md from the JSON of a campaign and the template `page.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chaos.accounting import COLUMNS, OTHERS

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("page.md")
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"


def files() -> dict[Path, str]:
    """Path and content of the page for the stored results."""
    return {ROOT / "docs" / "faults.md": write_page(json.loads(RESULTS.read_text()))}


def write_page(result: dict[str, Any]) -> str:
    """Fill the template with the results of a campaign."""
    parts = {
        "profile": result["profile"],
        "run": _run(result),
        "counts": _counts(result),
        "found": _found(result),
        "recovery": _recovery(result),
        "named": _named(result),
        "not_injected": "".join(f"* Here: {text}.\n" for text in result["not_injected"]),
    }
    return TEMPLATE.read_text().format(**parts).rstrip() + "\n"


def _run(result: dict[str, Any]) -> str:
    machine = result["machine"]
    load = ", ".join(f"{value:.1f}" for value in machine["load_average"])
    later = ", ".join(f"{value:.1f}" for value in result["load_average_after"])
    left = len(result["left_out"]) + len(result.get("without_target", ()))
    return (
        f"Profile `{result['profile']}`, seed {result['seed']}, {result['seconds'] / 60:.0f} "
        f"minutes, {result['total']['injected']} faults in {len(result['jobs'])} jobs"
        f"{f', {left} more not injected' if left else ''}. "
        f"{machine['cores']} cores, shared with other work: load averages {load} before and "
        f"{later} after."
    )


def _counts(result: dict[str, Any]) -> str:
    names = [name.replace("_", " ") for name in COLUMNS]
    lines = [f"| fault | injected | {' | '.join(names)} | other |", f"|---|{'---:|' * 8}"]
    for kind, row in [*result["kinds"].items(), ("**total**", result["total"])]:
        other = sum(row[name] for name in OTHERS)
        cells = [row["injected"], *(row[name] for name in COLUMNS), other]
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _recovery(result: dict[str, Any]) -> str:
    lines = ["| fault | measured | median | p90 | max | no sign in time |", f"|---|{'---:|' * 5}"]
    for kind, row in result["kinds"].items():
        if row["recovery_s"]["measured"] or row["no_sign_in_time"]:
            lines.append(f"| {kind} | {_cells(row['recovery_s'])} | {row['no_sign_in_time']} |")
    for service, spread in result["restarts"].items():
        what = "weights" if service == "rollout" else "a checkpoint"
        lines.append(
            f"| *restart of a killed {service}: imports, then {what}* | {_cells(spread)} | |"
        )
    return "\n".join(lines)


def _named(result: dict[str, Any]) -> str:
    """Seconds until the status named the culprit, one line for each kind."""
    spread = result["named_s"]
    lines = [
        f"Median {spread['median']} s, worst {spread['max']} s; {len(result['not_named'])} of "
        f"{len(result['named'])} kinds were not named in time.",
        "",
        "| kind | seconds |",
        "|---|---:|",
    ]
    lines += [
        f"| {each['kind']} | {'not named' if each['seconds'] is None else each['seconds']} |"
        for each in result["named"]
    ]
    return "\n".join(lines)


def _cells(spread: dict[str, Any]) -> str:
    found = [spread["measured"], *(spread[name] for name in ("median", "p90", "max"))]
    return " | ".join("" if value is None else str(value) for value in found)


def _found(result: dict[str, Any]) -> str:
    """Broken guarantees and missing signs of recovery, one line each."""
    lines = [
        f"* {each['column'].replace('_', ' ')}, {each['count']}, after `{each['after']}`: "
        f"{each['text']}"
        for each in result["findings"]
    ]
    lines += [f"* no sign in time: {text}" for text in result["no_sign_in_time"]]
    found = "\n".join(["Found:", "", *lines]) if lines else "No findings."
    notes = "".join(f"\n* {text}" for text in result.get("notes", ()))
    return f"{found}\n\nNotes:\n{notes}" if notes else found
