"""Collects the records of a job from the run directory, the journals and the API."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.accounting import Books, Event, Published

from paceline.errors import PacelineError
from paceline.front.client.client import Client

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3})Z \w+ (.*)")
_PUBLISHED = re.compile(r"publish published version=(\d+) step=(\d+) .*digest=(\w+)")
_STEP = re.compile(r"trainer step committed step=(\d+) ")
# How log lines begin that tell of a restart.
TRAINING_STARTS = "trainer training starts "
VERSION_ACTIVE = "rollout version active "


def log_lines(folder: Path, name: str) -> Iterator[tuple[float, str]]:
    """Log lines of a process, oldest first: wall-clock time and text."""
    for path in sorted(folder.glob(f"{name}.log*"), reverse=True):
        for line in path.read_text(errors="replace").splitlines():
            if found := _LINE.match(line):
                at = time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S"))
                yield at + int(found[2]) / 1000, found[3]


def training_since(folder: Path, job_id: str) -> float:
    """Wall-clock time of a job's first publication, from which `stop.wall_s` counts."""
    lines = log_lines(folder, f"trainer-{job_id}")
    return next(at for at, text in lines if _PUBLISHED.match(text))


def from_log(books: Books, folder: Path) -> None:
    """Add publications and commits from the log of the trainer."""
    starts = 0
    for at, text in log_lines(folder, f"trainer-{books.job_id}"):
        starts += text.startswith(TRAINING_STARTS)
        if found := _PUBLISHED.match(text):
            books.published.append(Published(at, int(found[1]), int(found[2]), found[3]))
        elif found := _STEP.match(text):
            books.acknowledged.append((at, int(found[1])))
    if books.rows and not (starts and books.acknowledged and books.published):
        raise RuntimeError(
            f"{books.job_id} has trained, but its log in {folder} has no starts, commits or "
            "publications: have their messages changed?"
        )


def from_files(books: Books, folder: Path) -> None:
    """Add what Paceline wrote for the user of the job."""
    for path in sorted((folder / "trajectories").glob("*.jsonl")):
        books.exported += json_lines(path)
    books.rows += json_lines(folder / "metrics.jsonl")
    with suppress(FileNotFoundError):
        for each in json.loads((folder / "versions.json").read_text()):
            said = Published(0.0, int(each["version"]), int(each["step"]), each["digest"])
            books.published.append(said)


def from_journals(books: Books, events: Sequence[Event], *, since: float) -> None:
    """Add journal entries of the job's plug-ins; all jobs of an installation share the folder."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for event in events:
        kind = event["event"]
        if kind == "answered":
            answers[event["task"]].add(event["words"])
        elif kind == "batch" and event["job"] == books.job_id:
            books.batches.append(event)
        elif kind == "scored" and event["at"] >= since and _is_training(event["name"], books):
            books.scored[event["name"]] = event["task"]
    books.answers = dict(answers)


def _is_training(name: str, books: Books) -> bool:
    job, _, group = name.partition(".")
    return job == books.job_id and not group.startswith("e")


def from_api(books: Books, client: Client) -> None:
    """Add the verification of the ledger, and its eval trajectories."""
    audit = client.verify(books.job_id)
    books.counts, books.problems = dict(audit.counts), tuple(audit.problems)
    token, more = "", True
    while more:
        with suppress(PacelineError):
            page = client.list_trajectories(
                books.job_id, purpose="eval", page_size=100, page_token=token
            )
            books.measured += [asdict(each) for each in page.trajectories]
            token = page.next_page_token
        more = bool(token)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file; none if it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
