"""`paceline trajectories`, `top` and `plot` on a running installation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from paceline.enums import JobState
from paceline.front.cli.entry import main
from paceline.isolation.sandbox import landlock
from paceline.platform.files import token_of
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# Every answer clears the screen and sets the title, if it gets to.
REWARD = """
from paceline.plugins import RewardInput
from paceline.types import Score

WICKED = "\\x1b[2J\\x1b]0;pwned\\x07\\x9b2J\\u202e"


def wicked(item: RewardInput) -> Score:
    return Score(float(len(item.response) % 2), {}, normalised_answer=WICKED)
"""
INTERVAL_S = 4.0


def paceline(platform: Any, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, as its imports take a second."""
    command = [*words, "--run-dir", str(platform.run_dir)]
    out, errors, before = StringIO(), StringIO(), signal.getsignal(signal.SIGTERM)
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            code = main(command)
        except SystemExit as error:  # of the parser
            code = int(error.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(command, code, out.getvalue(), errors.getvalue())


def episodes(platform: Any, job_id: str, *words: str) -> list[dict[str, Any]]:
    done = paceline(platform, "trajectories", job_id, "--json", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def finished(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A job of 12 steps, of which some steps are kept only in samples."""
    job = tiny_job(stop={"steps": 12}, eval={"every": 6, "tasks": 8})
    job["experience"] |= {"keep_trajectories": 32, "filters": [{"kind": "zero_variance"}]}
    if landlock.abi() >= 6:
        folder = tmp_path_factory.mktemp("code")
        (folder / "scoring.py").write_text(REWARD)
        job |= {"code": {"path": str(folder)}, "reward": [{"kind": "scoring:wicked"}]}
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        done = client.wait(job_id, timeout_s=PATIENCE_S)
    assert done.status.state is JobState.SUCCEEDED, (done.status.reason, platform.logs())
    return job_id


def test_filters_show_only_what_they_say(platform: Any, finished: str) -> None:
    every = episodes(platform, finished, "-n", "500")
    assert len(every) >= 32
    # Each step is still there, with few or all of its episodes, and with its advantages.
    assert {each["step"] for each in every} == set(range(1, 13))
    assert all(each["advantage"] is not None for each in every)
    low = episodes(platform, finished, "-n", "500", "--reward", "<0.5")
    assert 0 < len(low) < len(every)
    assert {each["reward"] for each in low} == {0.0}
    assert {each["step"] for each in episodes(platform, finished, "--step", ">10")} == {11, 12}
    assert {each["purpose"] for each in episodes(platform, finished, "--eval")} == {"eval"}
    dropped = episodes(platform, finished, "--dropped")
    assert {each["dropped"] for each in dropped} <= {"filtered", "stale", "surplus"}
    group = every[0]["group_id"]
    siblings = episodes(platform, finished, "--group", group)
    assert {(each["group_id"], each["index"]) for each in siblings} == {
        (group, n) for n in range(4)
    }
    (one,) = episodes(platform, finished, "--episode", f"{group}/2")
    sampled = sum(len(each["logprobs"]) for each in one["trajectory"]["transcripts"])
    assert sampled == one["policy_tokens"]
    assert one["prompt_text"].endswith("=")  # the question as it was shown
    gone = paceline(platform, "trajectories", finished, "--episode", f"{group}/77")
    assert (gone.returncode, "is not stored" in gone.stderr) == (2, True)
    assert paceline(platform, "trajectories", finished, "--reward", "much").returncode == 2


def test_nothing_that_was_generated_acts_on_the_terminal(platform: Any, finished: str) -> None:
    for words in (
        (),
        ("--show", "--color", "logprob"),
        ("--show", "--color", "version"),
        ("--json",),
    ):
        done = paceline(platform, "trajectories", finished, "-n", "5", *words)
        assert done.returncode == 0, done.stderr
        acts = {c for c in done.stdout if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}
        assert not acts
    if landlock.abi() >= 6:
        assert "␛]0;pwned" in paceline(platform, "trajectories", finished, "--show").stdout


def test_follow_shows_each_once_and_ends_with_the_job(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    job = tiny_job(stop={"steps": 6})
    del job["eval"]
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
    found = episodes(platform, job_id, "--follow", "-n", "500")  # what came before it, too
    places = [(each["group_id"], each["index"]) for each in found]
    assert len(places) == len(set(places)) == 6 * 16
    assert [each["step"] for each in found] == sorted(each["step"] for each in found)


def test_plots_and_frames(platform: Any, finished: str, tmp_path: Path) -> None:
    for name in ("curves.png", "curves.svg"):
        path = tmp_path / name
        words = ("--metric", "reward", "--metric", "loss", "-o", str(path))
        done = paceline(platform, "plot", finished, *words)
        assert (done.returncode, done.stdout.strip()) == (0, str(path))
        assert path.stat().st_size > 1000
    assert paceline(platform, "plot", finished, "--metric", "nothing").returncode == 2
    with platform.client() as client:
        frame = client.history(finished).to_pandas()
        assert list(frame[frame.kind == "train"].step) == list(range(1, 13))
        page = client.list_episodes(finished, reward=">0.5")
        assert set(page.to_pandas().reward) == {1.0}


def measured(platform: Any, *words: str) -> dict[str, Any]:
    done = paceline(platform, "eval", *words, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_finished_job_is_measured_again_and_on_a_second_set(platform: Any, finished: str) -> None:
    with platform.client() as client:
        rows = [row for row in client.list_metrics(finished).rows if row.kind == "eval"]
    again = measured(platform, finished)
    assert again["checkpoint"]["job"] == finished
    assert again["checkpoint"]["step"] == rows[-1].step == 12
    assert again["results"]["eval"]["reward"] == rows[-1].values["reward"]
    words = ("--option", "split=train", "--tasks", "6", "--samples", "4", "--pass-at", "1,2")
    second = measured(platform, f"{finished}@10", *words, "--set", "sampling.max_tokens=3")
    found = second["results"]["eval"]
    assert {"reward_stderr", "reward_ci95", "pass@1", "pass@2", "maj@4"} <= found.keys()
    assert second["n-samples"]["eval"] == {"original": 6, "effective": 6}
    assert (second["checkpoint"]["step"], found["version"]) == (10, 0)
    gone = paceline(platform, "eval", f"{finished}@3")
    assert (gone.returncode, "kept are: 10, 12" in gone.stderr) == (2, True), gone.stderr


def test_what_is_generated_is_in_a_file_once(
    platform: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """The same model, tasks and seed give the same rows in both formats."""
    words = ("--env", "arithmetic", "--option", "digits=1", "--reward", "exact", "--quiet")
    sizes = ("--tasks", "9", "--samples", "3", "--set", "sampling={max_tokens: 4, max_context: 32}")
    paths = [tmp_path / name for name in ("rows.jsonl", "rows.parquet")]
    for path in paths:
        done = paceline(platform, "generate", str(tiny_model), *words, *sizes, "--out", str(path))
        assert done.returncode == 0, done.stderr
    lines, table = rows_in(paths[0]), pyarrow.parquet.read_table(paths[1]).to_pylist()
    assert [row["completion_ids"] for row in lines] == [row["completion_ids"] for row in table]
    assert [(row["task"], row["sample"]) for row in lines] == [divmod(n, 3) for n in range(27)]
    for row in lines:
        assert row["prompt"].endswith("=")
        assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["versions"])
        assert row["parts"] == {"exact": row["reward"]}
    assert len({row["seed"] for row in lines}) == 27
    again = paceline(platform, "generate", str(tiny_model), *words, "--out", str(paths[0]))
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tenant_sees_shared_services_without_their_load(platform: Any, finished: str) -> None:
    with platform.client() as client:
        made = client.create_token("other", tenant="other", role="read")
        mine = client.get_activity()
    assert {"gateway", "experience", "environment", "reward"} <= {p.kind for p in mine.processes}
    assert any(each.load for each in mine.processes)
    with type(client)(platform.http, token=made.secret) as other:
        found = other.get_activity()
        assert not found.jobs
        assert found.processes
        assert not any(each.load or each.job_id for each in found.processes)


@contextmanager
def frozen(pid: int) -> Generator[None]:
    """Suspend a process nine tenths of the time."""
    done = threading.Event()

    def freeze() -> None:
        while not done.is_set():
            for number, share in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                done.wait(share)

    thread = threading.Thread(target=freeze, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.extended
def test_top_names_the_bottleneck(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    job = tiny_job(stop={"steps": 100_000})
    del job["eval"]
    job["experience"] |= {"max_staleness": 1, "lease_s": 30.0}
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        until(lambda: client.get(job_id).status.step > 3, "no steps", PATIENCE_S)
        told: list[str] = []
        found: dict[str, Any] = {}
        with frozen(platform.pid_of("rollout")):
            time.sleep(INTERVAL_S)
            deadline = time.monotonic() + PATIENCE_S
            while "rollout" not in told[-1:] and time.monotonic() < deadline:
                words = ("--once", "--json", "--interval", str(INTERVAL_S))
                found = json.loads(paceline(platform, "top", *words).stdout)
                told.append(found["bottleneck"])
        assert told[-1] == "rollout", (told, found["scores"])
        assert found["job_waits"][job_id]
        # With a token instead of the run directory, as for an installation elsewhere.
        command = [
            sys.executable,
            "-m",
            "paceline.front.cli",
            "top",
            "--once",
            "--url",
            platform.http,
        ]
        token = {**os.environ, "PACELINE_TOKEN": token_of(platform.run_dir), "COLUMNS": "200"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=token
        )
        assert done.returncode == 0, done.stderr
        assert job_id in done.stdout
        assert "rollout" in done.stdout
        client.cancel(job_id)


def test_a_sweep_compares_settings_over_seeds(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    job = tiny_job(name="swept", stop={"steps": 2})
    del job["eval"]
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    words = (
        "sweep",
        str(path),
        "--quiet",
        "--seeds",
        "2",
        "--set",
        "trainer.optimizer.lr=1e-3,1e-4",
    )
    done = paceline(platform, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 of 2") == 2
    # The same again has the same jobs, and trains nothing.
    again = paceline(platform, *words, "--json")
    found = [json.loads(line) for line in again.stdout.splitlines()]
    assert [each["name"] for each in found] == ["swept-lr-1e-3", "swept-lr-1e-4"]
    with platform.client() as client:
        named = {each.status.job_id for each in client.list().jobs if "swept" in each.status.name}
    assert {job_id for each in found for job_id in each["jobs"]} == named
    assert len(named) == 4


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_stored_is_read_where_nothing_runs_any_more(
    platform: Any,
    finished: str,
    tiny_job: Callable[..., dict[str, Any]],
    until: Callable[..., None],
    tmp_path: Path,
) -> None:
    job = tiny_job(name="unfinished", stop={"steps": 100_000})
    del job["eval"]
    with platform.client() as client:
        going = client.submit(job).status.job_id
        until(lambda: client.get(going).status.step > 3, "no steps")
    wanted = episodes(platform, finished, "-n", "500")
    platform.stop()
    before = files_of(platform.run_dir)
    # Two commands at once.
    command = [sys.executable, "-m", "paceline.front.cli", "verify", going]
    place = {**os.environ, "PACELINE_RUN_DIR": str(platform.run_dir)}
    with subprocess.Popen(command, env=place, stdout=subprocess.PIPE, text=True) as other:
        assert episodes(platform, finished, "-n", "500") == wanted
        told, _ = other.communicate(timeout=PATIENCE_S)
    assert (other.returncode, told.splitlines()[-1]) == (0, "ok")
    listed = paceline(platform, "list", "--all").stdout
    assert all(job_id in listed for job_id in (finished, going))
    assert paceline(platform, "watch", finished).returncode == 0
    over = paceline(platform, "watch", going)
    assert (over.returncode, "nothing runs in" in over.stderr) == (3, True)
    chart = tmp_path / "curves.png"
    words = (finished, going, "--group", "tiny", "-o", str(chart))
    assert paceline(platform, "plot", *words).returncode == 0
    refused = paceline(platform, "cancel", going)
    assert (refused.returncode, "no gateway runs there" in refused.stderr) == (3, True)
    assert files_of(platform.run_dir) == before
