"""What a job was promised, checked against records that are not the ledger's own.

Three records are compared: the journals of the job's plug-ins (answers, scores, batches that the
trainer was given), what Paceline wrote for its users (exported trajectories, metric rows,
versions), and the job's state. The ledger's own books are only added up.
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
    """A promise that was not kept, `count` times; `at` is when, as far as is known (0: unknown)."""

    column: str
    count: int
    text: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Published:
    """A version as somebody has told of it."""

    at: float
    version: int
    step: int
    digest: str


@dataclass(slots=True)
class Books:
    """All that is known of one job."""

    job_id: str
    state: str  # of the job, at the end or when nobody waited any longer
    ended: bool
    step: int
    batch_groups: int
    group_size: int
    wanted: tuple[str, ...] = ("succeeded",)
    forgetful: bool = False  # its store has lost what was acknowledged
    evaluates: bool = True
    exported: list[Event] = field(default_factory=list[Event])  # lines of all files
    measured: list[Event] = field(default_factory=list[Event])  # held-out trajectories
    rows: list[Event] = field(default_factory=list[Event])
    published: list[Published] = field(default_factory=list[Published])
    acknowledged: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    answers: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # by task
    scored: dict[str, str] = field(default_factory=dict[str, str])  # task by training episode
    batches: list[Event] = field(default_factory=list[Event])
    counts: dict[str, int] = field(default_factory=dict[str, int])  # as the audit says
    problems: tuple[str, ...] = ()

    @property
    def per_step(self) -> int:
        """Episodes of a batch."""
        return self.batch_groups * self.group_size


def check(books: Books) -> list[Breach]:
    """Every promise that was not kept."""
    if not books.ended:
        return [Breach("stuck_jobs", 1, f"{books.job_id} is {books.state} at step {books.step}")]
    rules = (_state, _export, _trained, _accounted, _twice, _rewards, _evals, _rows, _versions)
    found = _once([breach for rule in rules for breach in rule(books)])
    found += [Breach("audit_problems", 1, f"{books.job_id}: {text}") for text in books.problems]
    return found


def _once(found: list[Breach]) -> list[Breach]:
    """Several rules may miss the same episode: what the worst of them misses is lost."""
    lost = [breach for breach in found if breach.column == "lost"]
    others = [breach for breach in found if breach.column != "lost"]
    if not lost:
        return others
    text = "; ".join(dict.fromkeys(breach.text for breach in lost))
    at = max(breach.at for breach in lost)
    return [Breach("lost", max(breach.count for breach in lost), text, at), *others]


def fingerprint(logprobs: Sequence[float]) -> str:
    """Of a trajectory's log-probs, as `chaos.objective` makes it of tensors."""
    return blake2b(struct.pack(f"<{len(logprobs)}f", *logprobs), digest_size=8).hexdigest()


def lineage(books: Books) -> dict[int, Event]:
    """The batch of each step as the trainer whose weights went on was given it."""
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
    """Every committed step is in the export, once."""
    lines = Counter((line["group_id"], line["index"], line["attempt"]) for line in books.exported)
    repeated = len(books.exported) - len(lines)
    if repeated:
        yield Breach("repeated_lines", repeated, f"{books.job_id}: exported more than once")
    missing = books.step * books.per_step - len(distinct(books.exported))
    if missing > 0:
        yield Breach("lost", missing, f"{books.job_id}: committed, and not exported")


def _trained(books: Books) -> Iterator[Breach]:
    """What the trainer was given is what the export says was trained."""
    if books.state != "succeeded":
        return  # the ledger has gone back, and what was trained since counts for nothing
    trained = lineage(books)
    if absent := [step for step in range(books.step) if step not in trained]:
        count = len(absent) * books.per_step
        yield Breach("lost", count, f"{books.job_id}: no trainer had steps {absent}")
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
        yield Breach("lost", never, f"{books.job_id}: exported as trained, and in no batch")


def _accounted(books: Books) -> Iterator[Breach]:
    """What was scored is trained or dropped, and nothing is under way after the end."""
    exported = distinct(books.exported)
    kept = {f"{group}/{index}" for group, index in exported}
    if books.forgetful:  # a group whose admission was lost comes again under another name
        tasks = {line["task_id"] for line in exported.values()}
        kept |= {name for name, task in books.scored.items() if task in tasks}
    unknown = len(books.scored.keys() - kept) - books.counts.get("dropped", 0)
    if unknown > 0:
        yield Breach("lost", unknown, f"{books.job_id}: scored, and neither trained nor dropped")
    over = ("durable", "trained", "dropped")
    left = books.counts.get("admitted", 0) - sum(books.counts.get(name, 0) for name in over)
    if left:
        yield Breach("lost", abs(left), f"{books.job_id}: admitted, and in no final state")


def _twice(books: Books) -> Iterator[Breach]:
    """One epoch: a task is trained on as one group."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for line in books.exported:
        groups[line["task_id"]].add(line["group_id"])
    for task, names in groups.items():
        if len(names) > 1:
            count = (len(names) - 1) * books.group_size
            yield Breach("trained_twice", count, f"{books.job_id}: task {task} in {sorted(names)}")


def _rewards(books: Books) -> Iterator[Breach]:
    """Every reward is the truth about words that the environment has heard."""
    trained = distinct(books.exported).values()
    for line in [*trained, *distinct(books.measured).values()]:
        task, words, reward = line["task_id"], line["response_text"], line["score"]["reward"]
        name = f"{line['group_id']}/{line['index']}"
        if abs(reward - truth(task, words)) > _CLOSE:
            text = f"{name}: reward {reward}, the truth is {truth(task, words)}"
            yield Breach("false_zeros", 1, text)
        elif words not in books.answers.get(task, ()):
            yield Breach("false_zeros", 1, f"{name}: nobody has answered {words!r}")


def _evals(books: Books) -> Iterator[Breach]:
    """No true reward is 0, so no mean is; the last version is measured."""
    rows = [row for row in books.rows if row["kind"] == "eval"]
    for row in rows:
        if row["reward"] is not None and row["reward"] < LEAST_WORTH - _CLOSE:
            text = f"{books.job_id}: eval at step {row['step']} says {row['reward']}"
            yield Breach("false_zeros", 1, text)
    last = any(row["step"] >= books.step for row in rows)
    if books.evaluates and books.state == "succeeded" and not last:
        yield Breach("missing_rows", 1, f"{books.job_id}: no eval row of the last version")


def _rows(books: Books) -> Iterator[Breach]:
    """A row for each committed step, and for each time that a commit was acknowledged."""
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
    """A number means one publication, an incarnation one process."""
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
    """Of all policy tokens of a trajectory."""
    return [value for transcript in line["transcripts"] for value in transcript["logprobs"]]
