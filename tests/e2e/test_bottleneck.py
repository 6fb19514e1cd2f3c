"""The utilisation dashboard's query finds a deliberately slowed service."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.enums import WorkerKind
from paceline.front.client.client import Client
from paceline.front.local.supervisor import Local
from paceline.platform.telemetry import monitoring
from paceline_harness.monitoring.prometheus import Prometheus, Sample, local_targets
from paceline_harness.patience import PATIENCE_S

RULES = monitoring.RULES / "utilisation.yaml"
PERIOD_S = 1.0
FROZEN = 0.9  # share of the time
ANSWER_S = PATIENCE_S
WINDOW_S = 6  # of the rules
SLOWED = (
    *("reward", "rollout", "environment", "trainer", "experience"),
    *("store", "gateway", "controller"),
)
LINK_MBIT = 0.15  # the weights are 0.6 Mbit: longer than all else, on a busy machine too
pytestmark = pytest.mark.timeout(2400)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for each in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
    return found


@contextmanager
def slowed(service: str, pid: Callable[[], int]) -> Generator[None]:
    """Keep a process, or its replacement, suspended most of the time."""
    # The workers of one machine are children of its controller.
    alone = service == "controller"
    done = threading.Event()

    def tell(number: int) -> None:
        for each in [pid()] if alone else family(pid()):
            with suppress(ProcessLookupError):
                os.kill(each, number)

    def freeze() -> None:
        while not done.is_set():
            tell(signal.SIGSTOP)
            done.wait(PERIOD_S * FROZEN)
            tell(signal.SIGCONT)
            done.wait(PERIOD_S * (1 - FROZEN))

    thread = threading.Thread(target=freeze, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        tell(signal.SIGCONT)


def use(platform: Any, job_id: str, done: threading.Event) -> None:
    """Poll a job repeatedly, like a console."""
    with platform.client() as client:
        while not done.wait(0.2):
            with suppress(Exception):
                client.get(job_id)


def names(service: str) -> Callable[[list[Sample]], bool]:
    """Whether a query's result is exactly this service."""
    return lambda found: [sample.labels["service"] for sample in found] == [service]


def endless(tiny_job: Callable[..., dict[str, Any]], **experience: Any) -> dict[str, Any]:
    """A job that keeps running."""
    job = tiny_job(stop={"steps": 100_000})
    del job["eval"]
    job["experience"] |= {"max_staleness": 1, "lease_s": 30.0, **experience}
    return job


def watch(server: Prometheus, run_dir: Path, until: Callable[..., None]) -> None:
    """Scrape all processes once the job is running."""
    for kind in ("trainer", "rollout", "environment", "reward"):
        until(
            lambda k=kind: any(name.startswith(k) for name in local_targets(run_dir)),
            kind,
            PATIENCE_S,
        )
    server.scrape(local_targets(run_dir))
    server.until("paceline_step > 3", bool, timeout_s=PATIENCE_S)


def test_the_slowed_service_is_named(
    tmp_path: Path,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    prometheus: Callable[..., Prometheus],
    until: Callable[..., None],
) -> None:
    platform = start_platform(tmp_path / "run")
    with platform.client() as client:
        job_id = client.submit(endless(tiny_job)).status.job_id
    server = prometheus(rules=[RULES], window=f"{WINDOW_S}s", timeout_s=1.0)
    watch(server, platform.run_dir, until)
    done = threading.Event()
    user = threading.Thread(target=use, args=(platform, job_id, done), daemon=True)
    user.start()
    wrong: dict[str, Any] = {}
    try:
        for service in SLOWED:
            with slowed(service, partial(platform.pid_of, service)):
                time.sleep(WINDOW_S)  # what was before it is out of the window
                try:
                    server.until("paceline:bottleneck", names(service), timeout_s=ANSWER_S)
                except TimeoutError as error:
                    wrong[service] = (str(error), server.query("paceline:blame:score"))
    finally:
        done.set()
        user.join()
        platform.stop()
    assert not wrong


@pytest.mark.extended
def test_the_slow_link_of_weights_is_named(
    tmp_path: Path,
    tiny_job: Callable[..., dict[str, Any]],
    prometheus: Callable[..., Prometheus],
    until: Callable[..., None],
) -> None:
    options = {WorkerKind.CONTROLLER: {"weights_mbit_per_s": LINK_MBIT}}
    with Local(tmp_path / "run", http_port=0, options=options) as platform:
        with Client(platform.url, token=platform.token) as client:
            client.submit(endless(tiny_job, max_staleness=0))
        server = prometheus(rules=[RULES], window=f"{WINDOW_S}s", timeout_s=1.0)
        watch(server, platform.run_dir, until)
        server.until("paceline:bottleneck", names("weights"), timeout_s=ANSWER_S)
