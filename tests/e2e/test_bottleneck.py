"""A service that is slowed on purpose is named by the query of the utilisation dashboard.

The controller and the link of weights are not among them: a run that goes on waits for neither.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import paceline.monitoring
from paceline.testing.prometheus import Prometheus, Sample, local_targets

RULES = Path(paceline.monitoring.__file__).parent / "rules" / "utilisation.yaml"
PERIOD_S = 1.0
FROZEN = 0.9  # share of the time
ANSWER_S = 60.0
WINDOW_S = 10  # of the rules
SLOWED = ("reward", "rollout", "environment", "trainer", "experience", "store", "gateway")


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for each in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += [int(child) for child in children.read_text().split()]
    return found


@contextmanager
def slowed(pid: int) -> Generator[None]:
    """A process that is frozen most of the time."""
    done = threading.Event()

    def tell(number: int) -> None:
        for each in family(pid):
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
    """What a console does: asks for a job again and again."""
    client = platform.client()
    while not done.wait(0.2):
        with suppress(Exception):
            client.get(job_id)


def names(service: str) -> Callable[[list[Sample]], bool]:
    """Whether an answer is one service, this one."""
    return lambda found: [sample.labels["service"] for sample in found] == [service]


def test_the_slowed_service_is_named(
    tmp_path: Path,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    prometheus: Callable[..., Prometheus],
    until: Callable[..., None],
) -> None:
    platform = start_platform(tmp_path / "run")
    job = tiny_job(stop={"steps": 100_000})
    del job["eval"]
    job["experience"] |= {"max_staleness": 1, "lease_s": 30.0}
    job_id = platform.client().submit(job).status.job_id
    server = prometheus(rules=[RULES], window=f"{WINDOW_S}s", timeout_s=1.0)
    until(lambda: any(n.startswith("trainer") for n in local_targets(platform.run_dir)), "trainer")
    until(lambda: any(n.startswith("rollout") for n in local_targets(platform.run_dir)), "rollout")
    server.scrape(local_targets(platform.run_dir))
    server.until("paceline_step > 3", bool, timeout_s=180)
    done = threading.Event()
    user = threading.Thread(target=use, args=(platform, job_id, done), daemon=True)
    user.start()
    wrong: dict[str, Any] = {}
    try:
        for service in SLOWED:
            with slowed(platform.pid_of(service)):
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
