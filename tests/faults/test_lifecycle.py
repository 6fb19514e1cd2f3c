"""Pause, resume and delete while each service is killed: an end state always, and nothing left."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import pytest

from paceline.errors import DeadlineError, NotFoundError, StateError, UnavailableError

ROUNDS = (("gateway", "environment"), ("experience",), ("controller", "rollout"), ("trainer",))
AWAY = (UnavailableError, DeadlineError)  # while the gateway or experience restarts
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_job_is_paused_resumed_and_deleted_whatever_is_killed(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    with platform.client() as client:
        job_id = client.submit(tiny_job(name="lives", stop={"steps": 10_000})).status.job_id

        def kill(kind: str) -> None:
            own = job_id if kind in {"rollout", "trainer"} else ""
            for pid in platform.pids(kind, own).values():
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()

        def asks(call: Callable[..., Any], *allowed: type[Exception]) -> None:
            """Ask until somebody has heard it."""

            def heard() -> bool:
                try:
                    call(job_id)
                except AWAY:
                    return False
                except allowed:
                    return True
                return True

            until(heard, "nobody answers")

        def is_in(*states: str) -> bool:
            with suppress(*AWAY):
                return client.get(job_id).status.state in states
            return False

        before = 0
        for kinds in ROUNDS:
            until(lambda: is_in("running"), f"does not run before the end of {kinds}", 300)
            asks(client.pause, StateError)
            for kind in kinds:
                kill(kind)
            until(lambda: is_in("paused"), f"is not paused: {kinds}", 300)
            assert not [name for name in platform.names() if job_id in name], kinds
            step = client.get(job_id).status.step
            assert step >= before
            before = step
            asks(client.resume)
            kill("controller" if "experience" in kinds else "experience")
        until(lambda: is_in("running"), "does not run again", 300)
        report = client.verify(job_id)
        assert report.ok, report.problems

        asks(partial(client.delete, force=True), NotFoundError)
        for kind in ("experience", "controller", "experience"):
            kill(kind)

        def gone() -> bool:
            try:
                client.get(job_id)
            except NotFoundError:
                return True
            except AWAY:
                return False
            return False

        until(gone, "is not deleted", 300)

        def left() -> list[str]:
            files = [p for p in platform.run_dir.rglob("*") if job_id in str(p) and p.is_file()]
            return [str(path.relative_to(platform.run_dir)) for path in files]

        with suppress(AssertionError):
            until(lambda: not left(), "files are left", 60)
        assert not left()
        assert job_id not in (platform.run_dir / "ports.json").read_text()
