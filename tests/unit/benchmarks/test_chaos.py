"""The accounting of benchmarks/faults.py finds each breach, and nothing where there is none."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from chaos.accounting import COLUMNS, OTHERS, Books, Breach, check, fingerprint
from chaos.faults import Injected
from chaos.journal import Reader
from chaos.naming import KINDS, Named
from chaos.records import from_files, from_journals, from_log
from chaos.runner import Told
from chaos.table import table, table_of_names
from chaos.world import truth

ROOT = Path(__file__).resolve().parents[3]
JOB, GROUPS, SIZE, STEPS = "job-1", 2, 2, 3
Line = dict[str, Any]


@dataclass
class Records:
    """Those of a job in which nothing went wrong; a test spoils them before they are written."""

    lines: list[Line] = field(default_factory=list[Line])
    rows: list[Line] = field(default_factory=list[Line])
    versions: list[Line] = field(default_factory=list[Line])
    log: list[str] = field(default_factory=list[str])
    journal: list[Line] = field(default_factory=list[Line])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    state: str = "succeeded"
    ended: bool = True

    def batch(self, step: int, incarnation: int = 1, pid: int = 100) -> Line:
        """What a trainer was given at a step."""
        lines = self.lines[step * GROUPS * SIZE : (step + 1) * GROUPS * SIZE]
        prints = [fingerprint(line["transcripts"][0]["logprobs"]) for line in lines]
        known = {"event": "batch", "at": float(step), "job": JOB, "step": step, "pid": pid}
        return {**known, "incarnation": incarnation, "prints": prints}

    def read(self, folder: Path) -> Books:
        """Through the files that a campaign reads."""
        for name in ("job/trajectories", "logs", "notes"):
            (folder / name).mkdir(parents=True)
        write_lines(folder / "job/trajectories/final.jsonl", self.lines)
        write_lines(folder / "job/metrics.jsonl", self.rows)
        write_lines(folder / "notes/trainer-1.jsonl", self.journal)
        (folder / "job/versions.json").write_text(json.dumps(self.versions))
        (folder / f"logs/trainer-{JOB}.log").write_text("\n".join(self.log))
        books = Books(JOB, self.state, self.ended, STEPS, GROUPS, SIZE, counts=self.counts)
        from_files(books, folder / "job")
        from_log(books, folder / "logs")
        from_journals(books, Reader(folder / "notes").news(), since=0.0)
        return books


def write_lines(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def clean() -> Records:
    made = Records(counts={"admitted": 13, "durable": 12, "dropped": 1, "trained": 0})
    for number in range(STEPS * GROUPS * SIZE):
        group, index = divmod(number, SIZE)
        task, words = f"task-{group}", f"words-{number}"
        made.lines.append(
            {
                "group_id": f"{JOB}.{group}",
                "index": index,
                "attempt": 1,
                "task_id": task,
                "response_text": words,
                "score": {"reward": truth(task, words)},
                "transcripts": [{"logprobs": [-0.5, -0.25 * (number + 1)]}],
            }
        )
        made.journal.append({"event": "answered", "at": 1.0, "task": task, "words": words})
        name = f"{JOB}.{group}/{index}"
        made.journal.append({"event": "scored", "at": 1.0, "name": name, "task": task})
    made.journal += [made.batch(step) for step in range(STEPS)]
    made.log.append("2026-11-22T21:00:00.000Z INFO trainer training starts step=0 rank=0 parent=-1")
    dropped = {"event": "scored", "at": 1.0, "name": f"{JOB}.99/0", "task": "task-99"}
    made.journal.append(dropped)
    for step in range(1, STEPS + 1):
        made.rows.append({"index": step, "step": step, "kind": "train"})
        version = {"version": step, "step": step, "digest": f"{step}" * 8}
        made.versions.append(version)
        head = f"2026-11-22T21:00:0{step}.000Z INFO"
        made.log.append(f"{head} trainer step committed step={step} loss=0.1 stop=''")
        made.log.append(
            f"{head} publish published version={step} step={step} bytes=1 digest={f'{step}' * 8}"
        )
    made.rows.append({"index": 9, "step": STEPS, "kind": "eval", "reward": 0.5})
    return made


def lose_a_line(records: Records) -> None:
    del records.lines[5]
    records.counts["dropped"] += 1


def lose_a_batch(records: Records) -> None:
    records.journal.remove(records.batch(1))


def train_another(records: Records) -> None:
    found = next(each for each in records.journal if each.get("step") == 1)
    found["prints"] = [*found["prints"][1:], "other"]


def train_twice(records: Records) -> None:
    first, last = (
        next(each for each in records.journal if each.get("step") == step) for step in (0, 2)
    )
    last["prints"] = [first["prints"][0], *last["prints"]]


def train_a_task_twice(records: Records) -> None:
    for line in records.lines[:SIZE]:
        line["task_id"] = "task-3"
        line["score"]["reward"] = truth("task-3", line["response_text"])
        records.journal.append(
            {"event": "answered", "at": 1.0, "task": "task-3", "words": line["response_text"]}
        )


def lose_a_score(records: Records) -> None:
    score = {"event": "scored", "at": 1.0, "name": f"{JOB}.98/1", "task": "task-98"}
    records.journal.append(score)


def leave_one_open(records: Records) -> None:
    records.counts["admitted"] += 1


def false_zero(records: Records) -> None:
    records.lines[3]["score"]["reward"] = 0.0


def false_words(records: Records) -> None:
    line = records.lines[3]
    line["response_text"] = "nobody said so"
    line["score"]["reward"] = truth(line["task_id"], line["response_text"])


def false_mean(records: Records) -> None:
    records.rows[-1]["reward"] = 0.0


def never_end(records: Records) -> None:
    records.state, records.ended = "cancelling", False


def fail(records: Records) -> None:
    records.state = "failed"


def reuse_a_version(records: Records) -> None:
    records.log.append(
        "2026-11-22T21:00:09.000Z INFO publish published version=2 step=3 bytes=1 digest=beef"
    )


def reuse_an_incarnation(records: Records) -> None:
    records.journal.append({**records.batch(2), "pid": 101})


def lose_a_row(records: Records) -> None:
    del records.rows[1]


def lose_a_repeated_row(records: Records) -> None:
    records.log.append(
        "2026-11-22T21:00:09.000Z INFO trainer step committed step=2 loss=0.1 stop=''"
    )


def lose_an_eval_row(records: Records) -> None:
    del records.rows[-1]


def repeat_a_line(records: Records) -> None:
    records.lines.append(records.lines[-1])


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert check(clean().read(tmp_path)) == []


def test_a_rewind_that_repeats_its_batches_is_no_breach(tmp_path: Path) -> None:
    records = clean()
    records.journal += [records.batch(step, incarnation=2, pid=101) for step in (1, 2)]
    records.rows += [dict(records.rows[1])]
    records.log.append(
        "2026-11-22T21:00:09.000Z INFO trainer step committed step=2 loss=0.1 stop=''"
    )
    assert check(records.read(tmp_path)) == []


@pytest.mark.parametrize(
    ("spoil", "column"),
    [
        (lose_a_line, "lost"),
        (lose_a_batch, "lost"),
        (train_another, "lost"),
        (lose_a_score, "lost"),
        (leave_one_open, "lost"),
        (train_twice, "trained_twice"),
        (train_a_task_twice, "trained_twice"),
        (false_zero, "false_zeros"),
        (false_words, "false_zeros"),
        (false_mean, "false_zeros"),
        (never_end, "stuck_jobs"),
        (reuse_a_version, "reused_versions"),
        (reuse_an_incarnation, "reused_versions"),
        (lose_a_row, "missing_rows"),
        (lose_a_repeated_row, "missing_rows"),
        (lose_an_eval_row, "missing_rows"),
        (fail, "failed_jobs"),
        (repeat_a_line, "repeated_lines"),
    ],
)
def test_a_breach_is_found(spoil: Callable[[Records], None], column: str, tmp_path: Path) -> None:
    records = clean()
    spoil(records)
    assert {breach.column for breach in check(records.read(tmp_path))} == {column}


def test_what_the_store_forgot_and_made_again_is_not_lost(tmp_path: Path) -> None:
    records = clean()
    forgotten = {"event": "scored", "at": 1.0, "name": f"{JOB}.3.1/0", "task": "task-3"}
    records.journal.append(forgotten)
    books = records.read(tmp_path)
    assert [breach.column for breach in check(books)] == ["lost"]
    assert check(replace(books, forgetful=True)) == []


def test_the_audit_decides(tmp_path: Path) -> None:
    books = replace(clean().read(tmp_path), problems=("group 7 is in no batch",))
    assert [breach.column for breach in check(books)] == ["audit_problems"]


def test_a_breach_is_counted_for_its_kind_and_in_total() -> None:
    told = Told(
        injected=[Injected("kill store", "", 0.0, 0.0), Injected("network cut", "", 0.0, 0.0)],
        breaches=[("kill store", Breach(column, 2, "text")) for column in (*COLUMNS, *OTHERS)],
    )
    result = table(told)
    for column in (*COLUMNS, *OTHERS):
        assert result["total"][column] == result["kinds"]["kill store"][column] == 2
        assert result["kinds"]["network cut"][column] == 0


SAID = {
    "start fails: rollout, a missing module": (
        "rollout-a1-0 failed once without progress: ModuleNotFoundError: No module named "
        "'chaos_kernels'"
    ),
    "step fails: trainer": (
        "trainer-a1 failed 2 times without progress: ZeroDivisionError: a hook with a bug (rank 0)"
    ),
    "hangs: trainer": (
        "no progress since 15:18:16 UTC: trainer: it does not finish step 9; trainer-a1 is "
        "training step 9, 1 micro-batches done"
    ),
    "hangs: rollout": (
        "no progress since 15:18:16 UTC: rollout: episodes wait for tokens; rollout-a1-0 has 40 "
        "requests"
    ),
    "hangs: environment": (
        "no progress since 15:20:01 UTC: environment: episodes are in a step of their world"
    ),
    "hangs: trainer, rank 1 of 2": (
        "no progress since 15:18:16 UTC: trainer: it does not finish step 9; trainer-a1, rank 1 of "
        "2, is training step 9, 1 micro-batches done"
    ),
    "hangs: evaluation": (
        "no progress of the evaluation of version 10 (8 of 8 tasks are open) since 15:18:16 UTC: "
        "rollout: episodes wait for tokens; rollout-a1-0 has 8 requests"
    ),
    "wrong: rollout": (
        "rollout: rollout-a1-1 (since version 9): the trainer computes other log-probs from the "
        "same weights; it agrees with 1 other workers"
    ),
    "frozen: trainer": "no progress since 15:20:51 UTC: trainer: none is in the roster",
    "frozen: rollout": "no progress since 15:21:23 UTC: rollout: no worker is in the roster",
    "frozen: environment": (
        "no progress since 15:21:52 UTC: environment: no worker is in the roster"
    ),
}


@pytest.mark.parametrize("kind", SAID)
def test_only_the_culprit_counts_as_named(kind: str) -> None:
    assert re.search(KINDS[kind].names, SAID[kind])
    others = [name for name in SAID if name != kind]
    assert not [name for name in others if re.search(KINDS[kind].names, SAID[name])]


def test_what_was_not_named_is_counted_beside_the_seconds() -> None:
    named = [Named("a", 1.0, "words"), Named("b", 3.0, "words"), Named("c", None, "")]
    result = table_of_names(named)
    assert (result["named_s"]["median"], result["named_s"]["max"]) == (2.0, 3.0)
    assert (result["named_s"]["measured"], result["not_named"]) == (2, ["c"])
