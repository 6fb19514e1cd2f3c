"""Checks the guarantees of a job against records that are independent of the ledger.

It compares the journals of the job's plug-ins (answers, scores, batches that the trainer received),
Paceline's output for its users (exported trajectories, metric rows, versions), and the job's state.
Of the ledger itself only the sum of its counts is checked.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from chaos.world import truth

COLUMNS: tuple[str, ...] = (
    "lost",
    "trained_twice",
    "false_zeros",
    "stuck_jobs",
    "reused_versions",
    "missing_rows",
)
OTHERS: tuple[str, ...] = ("failed_jobs", "audit_problems", "repeated_lines", "damaged_loads")
LEAST_WORTH = 0.25
_CLOSE = 1e-6
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Breach:
    """A guarantee that was broken `count` times, at wall-clock time `at` (0: unknown)."""

    column: str
    count: int
    text: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Published:
    """A published version, as recorded in a log or a file."""

    at: float
    version: int
    step: int
    digest: str


@dataclass(slots=True)
class Books:
    """All records of one job."""

    job_id: str
    state: str  # of the job, at its end or when the campaign stopped waiting
    ended: bool
    step: int
    batch_groups: int
    group_size: int
    wanted: tuple[str, ...] = ("succeeded",)
    forgetful: bool = False  # its store has lost acknowledged writes
    evaluates: bool = True
    exported: list[Event] = field(default_factory=list[Event])  # lines of all files
    measured: list[Event] = field(default_factory=list[Event])  # held-out trajectories
    rows: list[Event] = field(default_factory=list[Event])
    published: list[Published] = field(default_factory=list[Published])
    acknowledged: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    answers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # by task
    scored: dict[str, str] = field(default_factory=dict[str, str])  # task by training episode
    batches: list[Event] = field(default_factory=list[Event])
    counts: dict[str, int] = field(default_factory=dict[str, int])  # from the verification
    problems: tuple[str, ...] = ()

    @property
    def per_step(self) -> int:
        """Number of episodes in a batch."""
        return self.batch_groups * self.group_size


def check(books: Books) -> list[Breach]:
    """All broken guarantees."""
    if not books.ended:
        return [Breach("stuck_jobs", 1, f"{books.job_id} is {books.state} at step {books.step}")]
    rules = (_state, _export, _trained, _accounted, _twice, _rewards, _evals, _rows, _versions)
    found = _once([breach for rule in rules for breach in rule(books)])
    found += [Breach("audit_problems", 1, f"{books.job_id}: {text}") for text in books.problems]
    return found


def _once(found: list[Breach]) -> list[Breach]:
    """Merge losses: several rules may miss the same episodes, so the largest count is used."""
    lost = [breach for breach in found if breach.column == "lost"]
    others = [breach for breach in found if breach.column != "lost"]
    if not lost:
        return others
    text = "; ".join(dict.fromkeys(breach.text for breach in lost))
    at = max(breach.at for breach in lost)
    return [Breach("lost", max(breach.count for breach in lost), text, at), *others]


def fingerprint(logprobs: Sequence[float]) -> str:
    """Digest of a trajectory's log-probs, equal to that of `chaos.objective` for a tensor."""
    return blake2b(struct.pack(f"<{len(logprobs)}f", *logprobs), digest_size=8).hexdigest()


def lineage(books: Books) -> dict[int, Event]:
    """Batch of each step, as received by the trainer whose weights were kept."""
    last: dict[int, Event] = {}
    for batch in sorted(books.batches, key=lambda each: (each["incarnation"], each["at"])):
        last[int(batch["step"])] = batch
    return {step: last[step] for step in sorted(last) if step < books.step}


def distinct(lines: Iterable[Event]) -> dict[tuple[str, int], Event]:
    """Trajectories by group and index."""
    return {(line["group_id"], int(line["index"])): line for line in lines}


def _state(books: Books) -> Iterator[Breach]:
    if books.state not in books.wanted:
        yield Breach("failed_jobs", 1, f"{books.job_id} has {books.state}")


def _export(books: Books) -> Iterator[Breach]:
    """Every committed step is exported exactly once."""
    lines = Counter((line["group_id"], line["index"], line["attempt"]) for line in books.exported)
    repeated = len(books.exported) - len(lines)
    if repeated:
        yield Breach("repeated_lines", repeated, f"{books.job_id}: exported more than once")
    missing = books.step * books.per_step - len(distinct(books.exported))
    if missing > 0:
        yield Breach("lost", missing, f"{books.job_id}: committed, but not exported")


def _trained(books: Books) -> Iterator[Breach]:
    """The trainer received exactly what the export lists as trained."""
    if books.state != "succeeded":
        return  # the ledger was rewound, so later batches do not count
    trained = lineage(books)
    if absent := [step for step in range(books.step) if step not in trained]:
        count = len(absent) * books.per_step
        yield Breach("lost", count, f"{books.job_id}: no trainer received steps {absent}")
    steps = {name: step for step, batch in trained.items() for name in batch["prints"]}
    given = Counter(name for batch in trained.values() for name in batch["prints"])
    lines = distinct(books.exported).values()
    exported = Counter(fingerprint(logprobs_of(line)) for line in lines)
    more = given - exported
    for column, known in (("lost", False), ("trained_twice", True)):
        names = {name: count for name, count in more.items() if bool(exported[name]) is known}
        where = sorted({steps[name] for name in names})
        if where:
            text = f"{books.job_id}: batches of steps {where} have more than is exported"
            at = max(float(trained[step]["at"]) for step in where)
            yield Breach(column, sum(names.values()), text, at)
    if never := sum((exported - given).values()):
        yield Breach("lost", never, f"{books.job_id}: exported as trained, but in no batch")


def _accounted(books: Books) -> Iterator[Breach]:
    """Scored episodes are trained or dropped, and none is in flight after the end."""
    exported = distinct(books.exported)
    kept = {f"{group}/{index}" for group, index in exported}
    if books.forgetful:  # a group whose admission was lost gets another name
        tasks = {line["task_id"] for line in exported.values()}
        kept |= {name for name, task in books.scored.items() if task in tasks}
    unknown = len(books.scored.keys() - kept) - books.counts.get("dropped", 0)
    if unknown > 0:
        yield Breach("lost", unknown, f"{books.job_id}: scored, but neither trained nor dropped")
    over = ("durable", "trained", "dropped")
    left = books.counts.get("admitted", 0) - sum(books.counts.get(name, 0) for name in over)
    if left:
        yield Breach("lost", abs(left), f"{books.job_id}: admitted, but in no final state")


def _twice(books: Books) -> Iterator[Breach]:
    """Within an epoch each task is trained on as one group."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for line in books.exported:
        groups[line["task_id"]].add(line["group_id"])
    for task, names in groups.items():
        if len(names) > 1:
            count = (len(names) - 1) * books.group_size
            yield Breach("trained_twice", count, f"{books.job_id}: task {task} in {sorted(names)}")


def _rewards(books: Books) -> Iterator[Breach]:
    """Every reward is the true one, for an answer that the environment received."""
    trained = distinct(books.exported).values()
    for line in [*trained, *distinct(books.measured).values()]:
        task, words, reward = line["task_id"], line["response_text"], line["score"]["reward"]
        name = f"{line['group_id']}/{line['index']}"
        if abs(reward - truth(task, words)) > _CLOSE:
            text = f"{name}: reward {reward}, the true one is {truth(task, words)}"
            yield Breach("false_zeros", 1, text)
        elif words not in books.answers.get(task, ()):
            yield Breach("false_zeros", 1, f"{name}: no environment received {words!r}")


def _evals(books: Books) -> Iterator[Breach]:
    """No mean is 0, since no true reward is; the last version is evaluated."""
    rows = [row for row in books.rows if row["kind"] == "eval"]
    for row in rows:
        if row["reward"] is not None and row["reward"] < LEAST_WORTH - _CLOSE:
            text = f"{books.job_id}: eval at step {row['step']} says {row['reward']}"
            yield Breach("false_zeros", 1, text)
    last = any(row["step"] >= books.step for row in rows)
    if books.evaluates and books.state == "succeeded" and not last:
        yield Breach("missing_rows", 1, f"{books.job_id}: no eval row of the last version")


def _rows(books: Books) -> Iterator[Breach]:
    """Each committed step has a row, and each acknowledged commit has one."""
    there = Counter(int(row["step"]) for row in books.rows if row["kind"] == "train")
    told, at = Counter[int](), dict[int, float]()
    for time_s, step in books.acknowledged:
        told[step] += 1
        at[step] = time_s
    for step in range(1, books.step + 1):
        wanted = 1 if books.forgetful else max(1, told[step])
        if there[step] < wanted:
            text = f"{books.job_id}: step {step} has {there[step]} rows of {wanted}"
            yield Breach("missing_rows", wanted - there[step], text, at.get(step, 0.0))


def _versions(books: Books) -> Iterator[Breach]:
    """A version number stands for one publication, an incarnation for one process."""
    seen: defaultdict[int, dict[tuple[int, str], float]] = defaultdict(dict)
    for each in books.published:
        if each.digest:
            seen[each.version].setdefault((each.step, each.digest), each.at)
    for version, meanings in seen.items():
        if len(meanings) > 1:
            said = ", ".join(f"step {step} {digest[:8]}" for step, digest in meanings)
            text = f"{books.job_id}: version {version} is {said}"
            yield Breach("reused_versions", len(meanings) - 1, text, max(meanings.values()))
    owners: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for batch in books.batches:
        owners[int(batch["incarnation"])].setdefault(int(batch["pid"]), float(batch["at"]))
    for number, pids in owners.items():
        if len(pids) > 1:
            text = f"{books.job_id}: incarnation {number} is {len(pids)} processes"
            yield Breach("reused_versions", len(pids) - 1, text, max(pids.values()))


def logprobs_of(line: Event) -> list[float]:
    """Log-probs of all policy tokens of a trajectory."""
    return [value for transcript in line["transcripts"] for value in transcript["logprobs"]]
