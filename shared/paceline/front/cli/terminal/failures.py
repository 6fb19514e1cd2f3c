"""Why episodes of a job on this machine did not end, from the logs of its run directory."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from paceline.types import JobStatus

_GIVEN_BACK = " lease given back "
_PAIR = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+)")
_TROUBLE = re.compile(r"^\S+ (?:WARNING|ERROR|CRITICAL) (.*)$")
_MOST_CHARS = 1000
_LEAST_WAIT_S = 1.0
_BEFORE = ("trainer", "rollout", "reward", "environment")
"""Processes without which no episode ends."""

Episode = tuple[str, str]
"""Group and index."""


def failures(run_dir: Path, job_id: str) -> dict[Episode, Counter[str]]:
    """Failures of each episode of a job's first evaluation, with counts, oldest first."""
    by_episode, run = dict[Episode, Counter[str]](), ""
    for path in sorted((run_dir / "logs").glob("environment*.log*")):
        for line in path.read_text(errors="replace").splitlines():
            if _GIVEN_BACK not in line:
                continue
            pairs = {name: _plain(value) for name, value in _PAIR.findall(line)}
            group = pairs.get("group", "")
            of_run, _, _ = group.rpartition(".")
            if of_run.startswith(f"{job_id}.e") and of_run == (run := run or of_run):
                episode = (group, pairs.get("index", ""))
                by_episode.setdefault(episode, Counter())[_reason(pairs)] += 1
    return by_episode


def failure_lines(by_episode: Mapping[Episode, Counter[str]]) -> Iterator[str]:
    """A line for each episode and each reason."""
    for number, reasons in enumerate(by_episode.values(), 1):
        for reason, count in reasons.items():
            times = f" ({count} attempts)" if count > 1 else ""
            yield f"failed episode {number}: {reason}{times}"


def unfinished(
    run_dir: Path, job_id: str, status: JobStatus, waits_s: Mapping[str, float]
) -> Iterator[str]:
    """Why a job's episodes do not end: its state, what it waits for, what goes wrong."""
    waits = ", ".join(
        f"{name} {seconds:.0f} s"
        for name, seconds in sorted(waits_s.items(), key=lambda wait: -wait[1])
        if seconds >= _LEAST_WAIT_S
    )
    reason = f": {status.reason}" if status.reason else ""
    yield f"the job was {status.state}{reason}" + (f"; it waited for {waits}" if waits else "")
    logs = {path.stem: path for path in sorted((run_dir / "logs").glob("*.log"))}
    for kind in _BEFORE:
        names = [e for e in logs if e.startswith(f"{kind}-{job_id}") or re.match(rf"{kind}-\d", e)]
        if not names:
            yield f"{kind}: no worker was started"
        for name in names:
            lines = logs[name].read_text(errors="replace").splitlines()
            trouble = [match[1] for line in lines if (match := _TROUBLE.match(line))]
            trouble = [text for text in trouble if _GIVEN_BACK.strip() not in text]
            if trouble:
                yield f"{name}: {trouble[-1][:_MOST_CHARS]}"


def _reason(pairs: Mapping[str, str]) -> str:
    return f"{pairs.get('reason', '')}: {pairs.get('detail', '')}"[:_MOST_CHARS]


def _plain(value: str) -> str:
    return str(ast.literal_eval(value)) if value[0] in "'\"" else value
