"""`paceline run` is interrupted, and the same command trains the rest of the job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 200


@pytest.fixture
def words(tiny_job: Callable[..., dict[str, Any]], tmp_path: Path) -> list[str]:
    """The command. Its checkpoints are rare, so that only a pause writes one before the end."""
    job = tiny_job(name="interrupted", eval=None, stop={"steps": STEPS})
    job["trainer"]["checkpoint"] = {"every": 1000}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "paceline.front.cli", "run", "job.yaml", "--run-dir", "run"]
    return [*command, "--port", "0"]


@contextmanager
def running(words: list[str], folder: Path) -> Generator[subprocess.Popen[str]]:
    # Where the tests themselves run in the background, they have inherited that SIGINT is ignored.
    command = ["env", "--default-signal=INT", *words]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(lines: Iterable[str] | None, text: str) -> str:
    """The line with a text, once it is printed."""
    assert lines is not None
    read: list[str] = []
    for line in lines:
        read.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} is not in {read}")


def left_over(folder: Path) -> list[str]:
    """Commands of processes that still work in a folder."""
    found = psutil.process_iter(["cmdline"])
    lines = [" ".join(process.info["cmdline"] or ()) for process in found]
    return [line for line in lines if str(folder) in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_paused_and_nothing_is_lost(
    words: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    with running(words, tmp_path) as first:
        until(first.stdout, "state running")
        first.send_signal(number)
        _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, said
    assert "interrupt again (Ctrl-C) to stop without waiting" in said
    last = said.splitlines()[-1]
    assert "is paused at step" in last
    assert last.endswith("the same command resumes it")
    step = int(last.partition("at step ")[2].partition(":")[0])
    assert not left_over(tmp_path / "run")
    said = ends_well(words, tmp_path)
    assert f"at step {step}" in until(iter(said.splitlines()), "resuming")


def test_a_second_interrupt_does_not_wait(words: list[str], tmp_path: Path) -> None:
    with running(words, tmp_path) as first:
        until(first.stdout, "state running")
        first.send_signal(signal.SIGINT)
        until(first.stderr, "pausing")
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130, said
    assert said.splitlines()[-1].endswith("the same command resumes it")
    assert not left_over(tmp_path / "run")
    assert "resuming" in ends_well(words, tmp_path)


def ends_well(words: list[str], folder: Path) -> str:
    """The rest of the job is trained, each step once; returns what the command said about it."""
    with running(words, folder) as again:
        out, said = again.communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, out + said
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if row["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    return said
