"""Runs jobs in sequence, injects faults on a seeded schedule, and checks each finished job."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from chaos import signs
from chaos.accounting import Books, Breach, check
from chaos.faults import PAUSE_S, Injected, Scene, kill, kinds
from chaos.records import (
    TRAINING_STARTS,
    VERSION_ACTIVE,
    from_api,
    from_files,
    from_journals,
    from_log,
    log_lines,
    training_since,
)
from chaos.site import Site, wait_for
from chaos.view import View, wait_for_sign

from paceline.errors import PacelineError
from paceline.types import JobStatus

BATCH_GROUPS, GROUP_SIZE = 4, 4
CHECKPOINT, RARE_CHECKPOINT = 5, 20  # steps between two
MANY, KEPT = 1_000_000, 65_536
CANCELLED, TIME_OVER = "cancel while a trainer rewinds", "time over while a trainer rewinds"
ENDINGS = ("steps", CANCELLED, TIME_OVER)
HURRY = 0.1
"""Share of faults that are followed by the next one without waiting for recovery."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Size and time limits of a campaign."""

    rounds: int
    faults_per_job: int
    steps: int  # of jobs that end after a number of steps
    wall_s: float  # of jobs that end by time
    budget_s: float  # time after which no fault is injected
    patience_s: float  # timeout for a sign of recovery
    end_s: float  # timeout for the end of a job
    freezes_s: tuple[float, ...]
    named: str = ""  # kinds of `chaos.naming`, as a regular expression


@dataclass(slots=True)
class Told:
    """Results of a campaign."""

    injected: list[Injected] = field(default_factory=list[Injected])
    breaches: list[tuple[str, Breach]] = field(default_factory=list[tuple[str, Breach]])
    jobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: list[str] = field(default_factory=list[str])
    without_target: list[str] = field(default_factory=list[str])


class Runner:
    """One campaign with the kinds of fault that match a pattern; `close` stops the site."""

    def __init__(
        self, *, model: Path, profile: Profile, seed: int, wanted: str = "", workers: int = 2
    ) -> None:
        self._model, self._profile, self._workers = model, profile, workers
        self._chance = random.Random(seed)
        self._began = self._running_since = time.monotonic()
        self._jobs = 0
        self._kept: list[Path] = []
        self.told = Told()
        self.site = Site(workers)
        self._view = View(self.site.notes)
        self._tracks = any("tracking" in name for name in kinds() if re.search(wanted, name))
        self._kinds = {name: how for name, how in kinds().items() if re.search(wanted, name)}

    def run(self, *, after_job: Callable[[], object]) -> Told:
        """Run jobs until the schedule is exhausted or time is up."""
        schedule = list(self._schedule())
        endings = cycle(ENDINGS)
        while schedule and self._left_s() > 0:
            self._job(schedule, next(endings))
            self.told.left_out = schedule
            after_job()
        return self.told

    def close(self) -> None:
        """Stop everything."""
        self.site.close()
        self.site.remove(all_of_it=not self._kept)

    def _schedule(self) -> Iterator[str]:
        """Each round has every kind once, in random order."""
        for _ in range(self._profile.rounds):
            names = list(self._kinds)
            self._chance.shuffle(names)
            yield from names

    def _left_s(self) -> float:
        return self._profile.budget_s - (time.monotonic() - self._began)

    def _job(self, schedule: list[str], ending: str) -> None:
        spec = self._spec(ending)
        since = time.time()
        job_id = self._submit(spec)
        scene = Scene(
            self.site, self._view, self._chance, job_id, freezes_s=self._profile.freezes_s
        )
        mine: list[Injected] = []
        if self._until(job_id, lambda status: status.step >= 1 or status.state.terminal):
            # Not `runtime_s`, which depends on the store's clock, which jumps.
            passed_s = time.time() - training_since(self.site.run_dir / "logs", job_id)
            self._running_since = time.monotonic() - passed_s
            self._throw(scene, schedule, ending, mine)
            self._end(scene, ending, mine)
        status = self._last(job_id)
        _say(f"{job_id} {status.state} at step {status.step}: {status.reason[:100]}")
        self._account(scene, spec, status, ending, mine, since)
        if not status.state.terminal:
            self._replace_site(job_id)

    def _throw(self, scene: Scene, schedule: list[str], ending: str, mine: list[Injected]) -> None:
        waits = True
        for _ in range(self._profile.faults_per_job):
            status = self._look(scene.job_id)
            over = status is not None and (status.state.terminal or self._is_late(ending))
            if not schedule or over or self._left_s() <= 0:
                return
            name = schedule.pop(0)
            waited, waits = waits, self._chance.random() >= HURRY
            self._inject(scene, name, mine, measures=waited and waits)
            time.sleep(self._chance.uniform(0.0, 1.0))

    def _is_late(self, ending: str) -> bool:
        """The end of the job is near, and must not be missed."""
        return ending == TIME_OVER and self._running_s() > self._profile.wall_s - 12.0

    def _running_s(self) -> float:
        return time.monotonic() - self._running_since

    def _inject(self, scene: Scene, name: str, mine: list[Injected], *, measures: bool) -> None:
        try:
            done = self._kinds[name](scene)
        except (OSError, PacelineError, RuntimeError) as error:
            _say(f"{name}: not injected: {error}")
            return
        if done is None:
            _say(f"{name}: no target")
            self.told.without_target.append(name)
            return
        done.job_id = scene.job_id
        mine.append(done)
        if measures and done.sign is not None:
            at = wait_for_sign(self._view, self._or_over(scene, done), self._profile.patience_s)
            if at is None:
                done.late = True
            elif at > 0:
                done.recovered_s = max(0.0, at - done.counts_from)
        took = "" if done.recovered_s is None else f", {done.recovered_s:.1f} s"
        _say(f"  {done.kind}: {done.about}{took}{', NO SIGN' if done.late else ''}")

    def _or_over(self, scene: Scene, done: Injected) -> signs.Sign:
        """The sign, or -1 once the job has ended and can give none."""
        asked = 0.0

        def sign() -> float | None:
            nonlocal asked
            if done.sign is not None and (at := done.sign()) is not None:
                return at
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                status = self._look(scene.job_id)
                if status is not None and (status.state.terminal or status.state == "cancelling"):
                    return -1.0
            return None

        return sign

    def _end(self, scene: Scene, ending: str, mine: list[Injected]) -> None:
        """Bring the job to its end, in the middle of a rewind if its ending requires that."""
        if ending == CANCELLED:
            self._cancel_in_rewind(scene, mine)
        elif ending == TIME_OVER:
            self._time_over_in_rewind(scene, mine)
        self._until(scene.job_id, lambda status: status.state.terminal)

    def _cancel_in_rewind(self, scene: Scene, mine: list[Injected]) -> None:
        def between(status: JobStatus) -> bool:
            far = RARE_CHECKPOINT // 2 <= status.step % RARE_CHECKPOINT < RARE_CHECKPOINT - 2
            return far or status.state.terminal

        self._until(scene.job_id, between, every_s=0.05)
        before = self._last(scene.job_id)
        killed = kill(scene, "trainer")
        if killed is None or before.state.terminal:
            return
        logs = self.site.run_dir / "logs"

        def is_back() -> bool:
            lines = log_lines(logs, scene.trainer())
            return any(at > killed.began and TRAINING_STARTS in text for at, text in lines)

        back = wait_for(is_back, self._profile.patience_s, every_s=0.03)
        began = time.time()
        for _ in range(50):
            with suppress(PacelineError):
                self.site.client.cancel(scene.job_id, reason="injected fault")
                break
            time.sleep(0.2)
        after = self._last(scene.job_id).step
        about = f"killed after step {before.step}, cancelled at {after}"
        about += "" if back else ", the trainer was not back"
        self._note_end(scene, Injected(CANCELLED, about, began, began), mine)

    def _time_over_in_rewind(self, scene: Scene, mine: list[Injected]) -> None:
        due_s = self._profile.wall_s - 4.0
        self._until(
            scene.job_id, lambda status: self._running_s() >= due_s or status.state.terminal
        )
        self._view.look()
        killed = kill(scene, "trainer")
        if killed is not None:
            about = f"trainer killed at second {due_s:g} of {self._profile.wall_s:g}"
            done = Injected(TIME_OVER, about, killed.began, killed.began + 4.0)
            self._note_end(scene, done, mine)

    def _note_end(self, scene: Scene, done: Injected, mine: list[Injected]) -> None:
        done.job_id = scene.job_id
        mine.append(done)
        if self._until(scene.job_id, lambda status: status.state.terminal):
            done.recovered_s = max(0.0, time.time() - done.counts_from)
        else:
            done.late = True
        _say(f"  {done.kind}: {done.about}")

    def _account(
        self,
        scene: Scene,
        spec: dict[str, Any],
        status: JobStatus,
        ending: str,
        mine: list[Injected],
        since: float,
    ) -> None:
        self._view.look()
        books = Books(
            job_id=scene.job_id,
            state=str(status.state),
            ended=status.state.terminal,
            step=status.step,
            batch_groups=BATCH_GROUPS,
            group_size=GROUP_SIZE,
            wanted=("cancelled",) if ending == CANCELLED else ("succeeded",),
            forgetful=scene.forgets,
        )
        folder = self.site.run_dir
        from_files(books, folder / "jobs" / scene.job_id)
        from_log(books, folder / "logs")
        from_journals(books, self._view.events, since=since)
        if books.ended:
            from_api(books, self.site.client)
        found = [*check(books), *self._damage(scene, mine)]
        for breach in found:
            before = [each for each in mine if each.began <= (breach.at or time.time())]
            self.told.breaches.append((before[-1].kind if before else "none", breach))
            _say(f"  BREACH {breach.column} {breach.count}: {breach.text}")
        if found or any(each.late for each in mine):
            self._kept.append(self.site.keep(scene.job_id))
            _say(f"  logs kept in {self._kept[-1]}")
        for each in mine:
            each.restart_s = self._restart_s(each)
        self.told.injected += mine
        job = {"job": scene.job_id, "ending": ending, "state": books.state, "steps": books.step}
        reason = "" if books.state in books.wanted else status.reason
        self.told.jobs.append({**job, "faults": len(mine), "reason": reason[-500:]})

    def _damage(self, scene: Scene, mine: list[Injected]) -> Iterator[Breach]:
        """Find damaged checkpoints that were loaded."""
        starts = [
            (at, text)
            for at, text in log_lines(self.site.run_dir / "logs", scene.trainer())
            if text.startswith(TRAINING_STARTS)
        ]
        for each in mine:
            after = [text for at, text in starts if at > each.began]
            step = int(each.damaged.partition("-")[2].partition(".")[0]) if each.damaged else 0
            if each.damaged and after and f" step={step} " in after[0]:
                text = f"{scene.job_id}: {each.damaged} was damaged ({each.kind}) and loaded"
                yield Breach("damaged_loads", 1, text, each.began)

    def _restart_s(self, each: Injected) -> float | None:
        """Seconds until the replacement process has weights or has loaded its checkpoint."""
        if not each.restarts:
            return None
        word = VERSION_ACTIVE if each.restarts.startswith("rollout") else TRAINING_STARTS
        lines = log_lines(self.site.run_dir / "logs", each.restarts)
        engines = [at for at, text in lines if at > each.began and text.startswith(word)]
        return engines[0] - each.began if engines else None

    def _replace_site(self, job_id: str) -> None:
        """Start a new site: a job that does not end would block the next ones."""
        _say(f"{job_id} is stuck; a new site")
        self.site.close()
        self.site.remove(all_of_it=False)
        self.site = Site(self._workers)
        self._view = View(self.site.notes)

    def _submit(self, spec: dict[str, Any]) -> str:
        request_id = f"faults-{self._jobs}"
        deadline = time.monotonic() + self._profile.end_s
        while True:
            try:
                return self.site.client.submit(spec, request_id=request_id).status.job_id
            except PacelineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _look(self, job_id: str) -> JobStatus | None:
        with suppress(PacelineError):
            return self.site.client.get(job_id).status
        return None

    def _last(self, job_id: str) -> JobStatus:
        found: list[JobStatus] = []

        def looked() -> bool:
            found.extend(each for each in [self._look(job_id)] if each is not None)
            return bool(found)

        if not wait_for(looked, self._profile.end_s):
            raise TimeoutError(f"the gateway does not answer about {job_id}")
        return found[-1]

    def _until(
        self, job_id: str, wanted: Callable[[JobStatus], bool], *, every_s: float = 0.2
    ) -> bool:
        def reached() -> bool:
            status = self._look(job_id)
            return status is not None and wanted(status)

        return wait_for(reached, self._profile.end_s, every_s=every_s)

    def _spec(self, ending: str) -> dict[str, Any]:
        self._jobs += 1
        notes = {"notes": str(self.site.notes)}
        first = self._jobs * MANY  # no two jobs share a task
        world = {**notes, "pause_s": PAUSE_S, "size": MANY // 2, "start": first}
        held_out = {"start": first + MANY // 2, "held_out": True, "pause_s": 0.05}
        every = CHECKPOINT if ending == "steps" else RARE_CHECKPOINT  # the others repeat many steps
        stop: dict[str, Any] = {"steps": self._profile.steps if ending == "steps" else MANY}
        if ending == TIME_OVER:
            stop["wall_s"] = self._profile.wall_s
        return {
            "name": f"faults-{self._jobs}",
            "model": {"path": str(self._model)},
            "tasks": {"environment": "chaos", "options": world, "epochs": 1, "step_timeout_s": 2.0},
            "eval": {"every": 50, "tasks": 16, "options": held_out, "timeout_s": 40.0},
            "sampling": {"max_tokens": 6, "max_context": 40, "on_truncation": "score"},
            "reward": [{"kind": "chaos", **notes, "pause_s": 0.05, "timeout_s": 2.0}],
            "experience": {
                "batch_groups": BATCH_GROUPS,
                "group_size": GROUP_SIZE,
                "lease_s": 3.0,
                "straggler_timeout_s": 10.0,
                "max_attempts": 50,
                "keep_trajectories": KEPT,
            },
            "rollout": {"engine": {"kind": "torch"}, "replicas": self._workers},
            "trainer": {
                "hooks": [{"kind": "chaos", **notes}],
                "optimizer": {"lr": 1e-4},
                "checkpoint": {"every": every, "keep": 3},
            },
            # Its process takes as much processor time as a job, and needs no other one.
            "tracking": [{"kind": "tensorboard"}] if self._tracks else [],
            "stop": stop,
        }


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
