"""Times a tenant's job next to another tenant with malformed or valid jobs.

The neighbour may run one job at a time. In hostile rounds its jobs are mutants that were accepted
(see hostile_jobs.py), in honest rounds valid jobs. In each round the victim's job trains the same
number of steps; its time from submission to end is compared.

    .venv/bin/python benchmarks/neighbours.py --json benchmarks/results/neighbours.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
from hostile_jobs import jobs, mutant
from rig.installation import ROOT, installed, url_of
from rig.smoke import OneJob
from rig.smoke import arguments as arguments_of

from paceline.config.quota import Quota
from paceline.errors import (
    InvalidError,
    PacelineError,
    PermissionDeniedError,
    QuotaError,
    StateError,
)
from paceline.front.api.documents import JobView
from paceline.front.client.client import Client
from paceline.front.local.processes import records_in
from paceline.platform.files import token_of

SHARED = ("store", "experience", "gateway", "controller", "environment", "reward", "tracking")
LOOK_S = 0.25
END_S = 120.0
# Most jobs are cancelled while they start; every fifth has time to train.
MOST_S = (2.0, 2.0, 2.0, 2.0, 25.0)
HONEST_EVERY = 5  # rounds
# One job runs while another waits.
QUOTA = Quota(jobs=1, submitted=2, rollout_workers=2)
SECTIONS: dict[str, Any] = {
    "sampling": {"max_tokens": 4, "max_context": 16, "on_truncation": "score"},
    "experience": {"batch_groups": 8, "group_size": 8, "max_staleness": 4},
    "eval": {"every": 1000, "tasks": 8, "options": {"split": "heldout"}, "temperature": 0},
}
Specs = Iterator[dict[str, Any]]


@dataclass
class Round:
    """One job of the victim, and the neighbour's jobs meanwhile."""

    neighbour: str
    seconds: float = 0.0
    refused: int = 0
    faults: list[str] = field(default_factory=list[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    reasons: Counter[str] = field(default_factory=Counter[str])
    stuck: list[str] = field(default_factory=list[str])


class Neighbour:
    """Keeps two jobs submitted, and cancels each some time after its start."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._most_s = cycle(MOST_S)
        self._left_s: dict[str, float] = {}
        self._begun: dict[str, float] = {}  # live jobs: start time, 0 while queued

    def run(self, specs: Specs, into: Round, until: Callable[[], bool]) -> None:
        """Submit jobs until told to stop, then wait for all to end."""
        while not until():
            self._look(into)
            if len(self._begun) < 2:
                self._submit(next(specs), into)
            else:
                time.sleep(LOOK_S)
        for job_id in self._begun:
            self._cancel(job_id)
        deadline = time.monotonic() + END_S
        while self._begun and time.monotonic() < deadline:
            self._look(into)
            time.sleep(LOOK_S)
        into.stuck += self._begun
        self._begun.clear()

    def _submit(self, spec: dict[str, Any], into: Round) -> None:
        try:
            job_id = self._client.submit(spec).status.job_id
            self._begun[job_id], self._left_s[job_id] = 0.0, next(self._most_s)
        except QuotaError:
            time.sleep(LOOK_S)  # the last job has ended, but the quota still counts it
        except (InvalidError, PermissionDeniedError):
            into.refused += 1
        except PacelineError as error:
            into.faults.append(f"{type(error).__name__}: {error}"[:300])

    def _look(self, into: Round) -> None:
        for job_id in list(self._begun):
            job = self._client.get(job_id)
            self._note(job, into)

    def _note(self, job: JobView, into: Round) -> None:
        status = job.status
        began, now = self._begun[status.job_id], time.monotonic()
        if status.state.terminal:
            del self._begun[status.job_id]
            if began or status.state != "cancelled":
                into.ends[status.state] += 1
                into.reasons[status.reason[:120]] += 1
        elif status.state != "queued" and not began:
            self._begun[status.job_id] = now
        elif began and now - began > self._left_s[status.job_id] and status.state != "cancelling":
            self._cancel(status.job_id)

    def _cancel(self, job_id: str) -> None:
        with suppress(StateError):  # it has ended
            self._client.cancel(job_id)


class Processes:
    """Process ids of the shared services seen so far."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "processes"
        self._seen: dict[str, set[int]] = {}

    def look(self) -> None:
        """Record the running processes."""
        for record in records_in(self._folder):
            if record.pid and psutil.pid_exists(record.pid):
                self._seen.setdefault(record.name, set()).add(record.pid)

    def restarts(self) -> dict[str, int]:
        """Number of restarts of each."""
        found = {n: len(p) - 1 for n, p in self._seen.items() if n.startswith(SHARED)}
        return {name: count for name, count in found.items() if count}


def mutants(chance: random.Random, valid: list[dict[str, Any]]) -> Specs:
    """Endless mutants, reproducible by seed; skips those that JSON cannot represent."""
    while True:
        _, made = mutant(chance, valid)
        try:
            json.dumps(made, allow_nan=False).encode()
        except ValueError:
            continue
        yield made


def honest(valid: list[dict[str, Any]]) -> Specs:
    """Cycle through the valid job files."""
    while True:
        yield from valid


def clients_of(run_dir: Path, smoke: Path | None) -> list[Client]:
    """Clients of the victim and of its neighbour; those of a smoke have one tenant and one job."""
    url, token = url_of(run_dir), token_of(run_dir)
    if smoke:
        return [OneJob(url, token=token, model=smoke.resolve() / "model") for _ in range(2)]
    with Client(url, token=token, timeout_s=60.0) as admin:
        admin.set_quota("neighbour", quota=QUOTA)
        return [
            Client(url, token=admin.create_token(name, tenant=name).secret, timeout_s=60.0)
            for name in ("victim", "neighbour")
        ]


def compare(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Run rounds until enough mutants have run."""
    clients = clients_of(run_dir, arguments.smoke)
    victim, neighbour = clients[0], Neighbour(clients[1])
    own, *_ = jobs(arguments.model, stop={"steps": arguments.steps}, **SECTIONS)
    valid = jobs(arguments.model, stop={"steps": 5}, **SECTIONS)
    kinds = {"hostile": mutants(random.Random(arguments.seed), valid), "honest": honest(valid)}
    processes, rounds = Processes(run_dir), list[Round]()
    while _count(rounds, "hostile") < arguments.mutants or len(rounds) % HONEST_EVERY != 1:
        kind = "honest" if len(rounds) % HONEST_EVERY == 0 else "hostile"
        rounds.append(one_round(kind, kinds[kind], victim, neighbour, own, processes))
        print(rounds[-1], file=sys.stderr, flush=True)
    for client in clients:
        client.close()
    return summary(rounds) | {"restarts": processes.restarts()}


def one_round(
    kind: str,
    specs: Specs,
    victim: Client,
    neighbour: Neighbour,
    own: dict[str, Any],
    processes: Processes,
) -> Round:
    """Run a job of the victim next to jobs of the neighbour."""
    made, over = Round(kind), threading.Event()

    def is_over() -> bool:
        processes.look()
        return over.is_set()

    beside = threading.Thread(target=neighbour.run, args=(specs, made, is_over))
    beside.start()
    try:
        began = time.monotonic()
        job_id = victim.submit(own).status.job_id
        status = victim.wait(job_id, timeout_s=1800).status
        made.seconds = round(time.monotonic() - began, 2)
    finally:
        over.set()
        beside.join()
    if status.state != "succeeded":
        raise SystemExit(f"the victim's job {job_id} ended as {status.state}: {status.reason}")
    return made


def _count(rounds: list[Round], kind: str) -> int:
    return sum(each.ends.total() for each in rounds if each.neighbour == kind)


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Statistics by kind of neighbour, and the ratio of the victim's times."""
    rows = {
        kind: _row([r for r in rounds if r.neighbour == kind]) for kind in ("honest", "hostile")
    }
    ratio = rows["hostile"]["victim_s"]["median"] / rows["honest"]["victim_s"]["median"]
    return {"ratio": round(ratio, 3), **rows}


def _row(rounds: list[Round]) -> dict[str, Any]:
    times = [each.seconds for each in rounds]
    reasons = sum((each.reasons for each in rounds), Counter[str]())
    return {
        "victim_s": {
            "median": round(statistics.median(times), 2),
            "least": min(times),
            "most": max(times),
            "all": times,
        },
        "jobs_run": sum(each.ends.total() for each in rounds),
        "ends": dict(sum((each.ends for each in rounds), Counter[str]())),
        "reasons": dict(reasons.most_common(20)),
        "refused": sum(each.refused for each in rounds),
        "faults": [fault for each in rounds for fault in each.faults],
        "stuck": [job for each in rounds for job in each.stuck],
    }


def main() -> int:
    """Measure and write the result; returns 1 after a server error, a restart or a stuck job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "arithmetic")
    parser.add_argument(
        "--mutants", type=int, default=200, help="number of accepted mutants to run"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of the victim's job")
    parser.add_argument("--seed", type=int, default=0)
    arguments = arguments_of(parser, mutants=1, steps=1)
    if arguments.smoke:
        arguments.model = arguments.smoke / "model"
    load = [os.getloadavg()[0]]
    began = time.monotonic()
    with installed(smoke=arguments.smoke) as run_dir:
        result = compare(arguments, run_dir)
    load.append(os.getloadavg()[0])
    result |= {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": load},
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began, 1),
        "jobs_may_take_s": MOST_S,
        "quota": QUOTA.model_dump(include={"jobs", "submitted", "rollout_workers"}),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    bad = [row[key] for row in (result["honest"], result["hostile"]) for key in ("faults", "stuck")]
    return 1 if any(bad) or result["restarts"] else 0


if __name__ == "__main__":
    sys.exit(main())
