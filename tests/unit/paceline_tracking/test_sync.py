"""A tracker that hangs, dies or refuses gets every row once when it works again."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_harness.patience import PATIENCE_S
from paceline_tracking.child import TrackerError, TrackerProcess
from paceline_tracking.host import Host
from paceline_tracking.sync import TrackerSync


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not done():
            await asyncio.sleep(0.01)


async def test_a_job_is_handed_over_to_its_end(bench: Any) -> None:
    feed: TrackerSync = await bench.feed()
    bench.history.total = 3
    running = asyncio.create_task(feed.run())
    await until(lambda: feed.status.rows == 3)
    bench.history.total = 11
    bench.history.over = True
    await running
    assert bench.rows() == list(range(11))
    assert (feed.status.state, feed.status.url) == ("done", str(bench.folder / "run/points.jsonl"))
    assert bench.history.told[-1] == feed.status
    summary = json.loads((bench.folder / "run" / "summary.json").read_text())
    assert summary == {"state": "succeeded", "steps": 11}
    assert 'paceline_tracking_rows_total{tracker="lines"' in bench.exposed()


@pytest.mark.parametrize(
    ("ailment", "reason"),
    [
        ("hang", "hung: no answer to open"),
        ("crash", "crashed: ended with exit code 9, out of luck"),
        ("refuse", "refused: ConnectionError: no server, key ***"),
    ],
)
async def test_an_outage_is_reported_and_loses_nothing(
    bench: Any, ailment: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES_API_KEY", "correct-horse")
    bench.timeout_s = 10.0 if ailment == "hang" else 60.0
    bench.trouble.write_text(ailment)
    bench.history.total = 5
    bench.history.over = True  # the job has ended and waits for nobody
    feed: TrackerSync = await bench.feed()
    running = asyncio.create_task(feed.run())
    await until(lambda: feed.status.state == "retrying")
    assert feed.status.detail.startswith(reason)
    assert "correct-horse" not in feed.status.detail
    assert f'reason="{reason.split(":")[0]}"' in bench.exposed()
    # One that hangs by accident of a busy machine is tried again as well.
    bench.trouble.write_text("")
    async with asyncio.timeout(PATIENCE_S):
        await running
    assert bench.rows() == list(range(5))
    assert (feed.status.state, feed.status.detail) == ("done", "")


async def test_one_warning_for_an_outage(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    bench.trouble.write_text("refuse")
    feed: TrackerSync = await bench.feed()
    running = asyncio.create_task(feed.run())
    await until(lambda: bench.exposed().count("tracking_errors") and _errors(bench) >= 2.0)
    bench.trouble.write_text("")
    bench.history.over = True
    await running
    assert sum("tracker failed" in record.getMessage() for record in caplog.records) == 1


def _errors(bench: Any) -> float:
    lines = bench.exposed().splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("paceline_tracking_errors"))


@pytest.mark.parametrize("ailment", ["half", "lose"])
async def test_a_death_in_the_middle_of_a_call_repeats_nothing(bench: Any, ailment: str) -> None:
    bench.trouble.write_text(ailment)
    bench.history.total = 6
    feed: TrackerSync = await bench.feed()
    running = asyncio.create_task(feed.run())
    await until(lambda: bool(bench.rows()))
    bench.trouble.write_text("")
    bench.history.over = True
    async with asyncio.timeout(PATIENCE_S):
        await running
    assert bench.rows() == list(range(6))


async def test_what_a_library_prints_is_no_answer(bench: Any) -> None:
    bench.trouble.write_text("noise")
    bench.history.total, bench.history.over = 2, True
    feed: TrackerSync = await bench.feed()
    await feed.run()
    assert bench.rows() == [0, 1]


async def test_a_stopped_feed_flushes_and_resumes_later(bench: Any) -> None:
    bench.history.total = 3
    feed: TrackerSync = await bench.feed()
    feed.stop()
    running = asyncio.create_task(feed.run())
    await asyncio.wait_for(running, PATIENCE_S)
    assert bench.rows() == []  # it was not begun
    feed = await bench.feed()
    running = asyncio.create_task(feed.run())
    await until(lambda: feed.status.rows == 3)
    feed.stop()
    await asyncio.wait_for(running, PATIENCE_S)
    assert feed.status.state == "following"
    bench.history.total, bench.history.over = 5, True
    await (await bench.feed()).run()
    assert bench.rows() == list(range(5))


async def test_an_unreachable_ledger_stops_no_tracker(bench: Any) -> None:
    bench.history.total = 2
    feed: TrackerSync = await bench.feed()
    running = asyncio.create_task(feed.run())
    await until(lambda: feed.status.rows == 2)
    bench.history.away = True
    await until(lambda: bench.history.refused >= 3)
    bench.history.total = 4
    bench.history.away, bench.history.over = False, True
    await running
    assert bench.rows() == list(range(4))
    assert "tracking_errors" not in bench.exposed()


async def test_a_child_ends_with_its_parent(bench: Any) -> None:
    child = await TrackerProcess.start()
    os.kill(child.pid, 0)
    await child.kill()
    await until(lambda: not psutil.pid_exists(child.pid))


async def test_one_that_left_the_family_with_a_pipe_holds_up_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    leaves = f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 600' & cat"
    before = psutil.Process().num_fds()
    child = await TrackerProcess.start(["sh", "-c", leaves])
    await until(lambda: pid_file.exists() and bool(pid_file.read_text().strip()))
    try:
        await asyncio.wait_for(child.kill(), PATIENCE_S)
        await until(lambda: psutil.Process().num_fds() <= before)  # our ends are closed
    finally:
        os.kill(int(pid_file.read_text()), 9)


class Scripted:
    """A child without a process, which fails by a script: before, in or after a call."""

    def __init__(self, script: list[str]) -> None:
        self._script = script
        self._host = Host()

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        await asyncio.sleep(0)
        failure = self._script.pop() if self._script and "write" in request else ""
        if failure == "before":
            raise TrackerError("hung", "before")
        if failure == "middle":
            points = request["write"]
            self._host.do("write", points[: len(points) // 2])
            raise TrackerError("crashed", "in the middle")
        ((verb, asked),) = request.items()
        answer = self._host.do(verb, asked)
        if failure == "after":
            raise TrackerError("crashed", "after")
        return answer

    async def kill(self) -> None:
        """Nothing to end."""


@settings(max_examples=30, deadline=None)
@given(
    script=st.lists(st.sampled_from(["", "before", "middle", "after"]), max_size=8),
    total=st.integers(min_value=0, max_value=14),
    tells=st.booleans(),
)
def test_every_row_is_delivered_once_whatever_fails(
    make_bench: Callable[..., Any], script: list[str], total: int, tells: bool
) -> None:
    async def scenario(folder: Path) -> list[int]:
        bench = make_bench(folder, tells=tells)
        bench.history.total, bench.history.over = total, True

        async def start() -> Any:
            return Scripted(script)

        await (await bench.feed(start)).run()
        return bench.rows()

    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(scenario(Path(folder)))
    if tells:
        assert found == list(range(total))
    else:  # at least once, and never a gap
        assert sorted(set(found)) == list(range(total))
