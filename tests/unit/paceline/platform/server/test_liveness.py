"""Progress tracking, on random histories of work."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.service import ProbeSettings
from paceline.platform.server.health import Health, Probes
from paceline.platform.server.liveness import MAX_PASSED_S, ProcessProgress, WorkProgress
from paceline.platform.telemetry.metrics import Metrics

SETTINGS = ProbeSettings(silent_s=10, dead_s=30, first_s=100, slack=4)


class Bench:
    """Some work and a clock, checked every second."""

    def __init__(self, **how: Any) -> None:
        self.now = 1000.0
        self.pending = 0
        self.done = 0
        self.progress = ProcessProgress(SETTINGS, clock=lambda: self.now)
        self.progress.watch("work", lambda: WorkProgress(self.pending, self.done), **how)
        self.progress.check()

    def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.progress.check()

    @property
    def verdict(self) -> tuple[bool, bool]:
        """Whether the process is ready, and whether it is alive."""
        return not self.progress.why_unready(), not self.progress.why_dead()


def test_lack_of_progress_is_unready_then_dead_until_progress() -> None:
    bench = Bench()
    bench.pending = 3
    bench.passes(11)
    assert bench.verdict == (True, True)
    bench.passes(1)
    told = "work: 3 pending, no progress for 11 s; limit 10 s"
    assert (bench.progress.why_unready(), bench.progress.why_dead()) == (told, "")
    bench.passes(20)
    assert bench.verdict == (False, False)
    bench.done += 1
    bench.passes(1)
    assert bench.verdict == (True, True)


def test_work_that_a_restart_cannot_help_is_not_fatal() -> None:
    bench = Bench(fatal=False)
    bench.pending = 1
    bench.passes(1000)
    assert bench.verdict == (False, True)


def test_uneven_work_gets_a_long_first_limit_then_a_multiple_of_its_longest_time() -> None:
    bench = Bench(uneven=True)
    bench.pending = 1
    bench.passes(90)
    assert bench.verdict == (True, True)
    bench.done += 1
    bench.passes(300)
    assert bench.verdict == (True, True)
    bench.passes(80)
    assert bench.verdict == (False, False)


def test_the_deadline_of_the_work_takes_precedence() -> None:
    now = [0.0]
    progress = ProcessProgress(SETTINGS, clock=lambda: now[0])
    progress.watch("work", lambda: WorkProgress(1, 0), min_limit_s=lambda: 40.0)
    for _ in range(80):
        now[0] += 1
        progress.check()
    assert progress.why_unready() == ""
    for _ in range(5):
        now[0] += 1
        progress.check()
    assert progress.why_unready() != ""


def test_a_suspended_process_is_not_unhealthy() -> None:
    bench = Bench()
    bench.pending = 1
    bench.passes(3)
    bench.now += 3600
    bench.progress.check()
    assert bench.verdict == (True, True)
    assert bench.progress.status()["work"]["work"]["silent_s"] == 2 + MAX_PASSED_S


def test_unreadable_work_does_not_hide_other_work(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Any:
        raise KeyError("gone")

    bench = Bench()
    progress = ProcessProgress(SETTINGS, clock=lambda: bench.now)
    progress.watch("broken", fails)
    progress.watch("work", lambda: WorkProgress(1, 0))
    progress.add_status(fails)
    progress.add_status(lambda: {"version": 3})
    for _ in range(12):
        bench.now += 1
        progress.check()
    assert progress.why_unready().startswith("work: 1 pending")
    assert progress.status()["version"] == 3
    assert [each.getMessage() for each in caplog.records] == ["progress cannot be read"] * 2
    bench.now += 60
    progress.check()
    assert len(caplog.records) == 4


async def test_the_beat_survives_a_failed_reading() -> None:
    now, reads = 0.0, 0

    def fails() -> WorkProgress:
        nonlocal reads
        reads += 1
        raise KeyError("gone")

    settings = ProbeSettings(stuck_s=0.04)
    health = Health(settings=settings, clock=lambda: now)
    health.progress.watch("broken", fails)
    health.serve()
    beat = asyncio.create_task(health.beat())
    while reads < 3:
        assert not beat.done()
        await asyncio.sleep(0.01)
    now += 1.0
    assert health.why_dead() != ""
    before = reads
    while reads == before:
        await asyncio.sleep(0.01)
    assert health.why_dead() == ""
    beat.cancel()


# One entry per second: how much is pending, and whether there is progress.
HISTORY = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=120)


@given(HISTORY)
def test_the_verdict_reflects_the_latest_check(history: list[tuple[int, bool]]) -> None:
    """By definition: seconds for which work was pending continuously without progress."""
    bench, silent, before = Bench(), 0, 0
    for pending, came in history:
        bench.pending, bench.done = pending, bench.done + came
        bench.passes(1)
        silent = silent + 1 if before and not came and pending else 0
        before = pending
        assert bench.verdict == (silent <= SETTINGS.silent_s, silent <= SETTINGS.dead_s)


@given(HISTORY)
def test_work_waiting_for_others_is_never_unhealthy(history: list[tuple[int, bool]]) -> None:
    bench = Bench()
    for _, came in history:
        bench.done += came
        bench.passes(1)
        assert bench.verdict == (True, True)


@given(HISTORY, st.integers(1, 400))
def test_a_dead_process_is_not_ready(history: list[tuple[int, bool]], more: int) -> None:
    for uneven in (False, True):
        bench = Bench(uneven=uneven)
        for pending, came in history:
            bench.pending, bench.done = pending, bench.done + came
            bench.passes(1)
        bench.passes(more)
        ready, alive = bench.verdict
        assert alive or not ready


@pytest.mark.parametrize("stuck", [False, True])
def test_the_probes_and_statusz_report_progress(stuck: bool) -> None:
    now = [0.0]
    health = Health(settings=SETTINGS, clock=lambda: now[0], about={"kind": "rollout"})
    health.serve()
    health.progress.watch("tokens", lambda: WorkProgress(2 * stuck, 7))
    health.progress.add_status(lambda: {"version": 4, "version_lag": 1})
    for _ in range(40):
        now[0] += 1
        health.progress.check()
        health.tick()
    probes = Probes(host="127.0.0.1", port=0, health=health, metrics=Metrics())
    url = f"http://127.0.0.1:{probes.port}"
    codes = [httpx.get(f"{url}/{path}").status_code for path in ("readyz", "livez", "statusz")]
    said = httpx.get(f"{url}/statusz").json()
    probes.close()
    assert codes == ([503, 503, 200] if stuck else [200, 200, 200])
    assert (said["kind"], said["version"], said["version_lag"]) == ("rollout", 4, 1)
    assert said["ready"] is not stuck
    assert ("tokens: 2 pending" in said["why_unready"]) is stuck
    assert said["work"]["tokens"]["last_s"] is None
