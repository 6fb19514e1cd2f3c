"""Why episodes did not end, as `paceline try` reads it from logs that services have written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.enums import JobState
from paceline.front.cli.terminal.failures import failure_lines, failures, unfinished
from paceline.platform.telemetry.logs import EventFormatter, Log
from paceline.types import JobStatus

Logs = Callable[[str], Log]


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    """Logs of processes of a run directory, written as these do."""
    (tmp_path / "logs").mkdir()
    handlers = list[tuple[logging.Logger, logging.Handler]]()

    def made(name: str) -> Log:
        logger, handler = logging.getLogger(name), logging.FileHandler(tmp_path / "logs" / name)
        handler.setFormatter(EventFormatter())
        logger.addHandler(handler)
        handlers.append((logger, handler))
        return Log(name)

    yield made
    for logger, handler in handlers:
        logger.removeHandler(handler)
        handler.close()


def test_each_failed_episode_has_its_reasons(tmp_path: Path, logs: Logs) -> None:
    log = logs("environment-0.log")

    def given_back(group: str, index: int, detail: str) -> None:
        pairs = {"group": group, "index": index, "reason": "infra_error", "detail": detail}
        log.warning("lease given back", job="try-1", **pairs)

    score = "scoring:f: KeyError: 'it is \"a\"' (scoring.py:3)"
    given_back("try-1.e0.0", 0, score)
    given_back("try-1.e0.1", 0, "environment: ValueError: no answer (world.py:6)")
    given_back("try-1.e0.0", 0, score)
    given_back("try-1.e0.0", 0, "no rollout worker is available")
    given_back("try-1.7", 0, "of training, which is not shown")
    given_back("try-2.e0.0", 0, "of another job")
    given_back("try-1.e1.0", 0, "of the evaluation after the first")
    assert [*failure_lines(failures(tmp_path, "try-1"))] == [
        f"failed episode 1: infra_error: {score} (2 attempts)",
        "failed episode 1: infra_error: no rollout worker is available",
        "failed episode 2: infra_error: environment: ValueError: no answer (world.py:6)",
    ]


def test_a_job_that_is_late_says_what_it_waits_for(tmp_path: Path, logs: Logs) -> None:
    logs("trainer-try-1.log").error("cannot load the model", error="no space left")
    logs("reward-0.log").info("ready")
    logs("environment-0.log").warning("lease given back", job="try-1", detail="said elsewhere")
    status = JobStatus("try-1", "try", "default", JobState.STARTING, reason="no free GPU")
    assert [*unfinished(tmp_path, "try-1", status, {"rollout": 0.4, "trainer": 61.2})] == [
        "the job was starting: no free GPU; it waited for trainer 61 s",
        "trainer-try-1: trainer-try-1.log cannot load the model error='no space left'",
        "rollout: no worker was started",
    ]
