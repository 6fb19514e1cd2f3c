import asyncio
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from paceline.config.service import ProbeSettings
from paceline.errors import UnavailableError
from paceline.platform.server.health import Health, Probes
from paceline.platform.telemetry.metrics import Metrics
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import free_port


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_starting_has_no_time_limit() -> None:
    clock = Clock()
    health = Health(settings=ProbeSettings(stuck_s=60), clock=clock)
    clock.now_s += 3600
    health.tick()
    clock.now_s += 3600
    assert (health.why_dead(), health.why_unready()) == ("", "starting")


def test_a_blocked_loop_is_dead_and_not_ready() -> None:
    clock = Clock()
    health = Health(settings=ProbeSettings(stuck_s=60), clock=clock)
    health.serve()
    assert (health.why_dead(), health.why_unready()) == ("", "")
    clock.now_s += 61
    reason = "the event loop has been blocked for 61 s; limit 60 s"
    assert (health.why_dead(), health.why_unready()) == (reason, reason)
    health.tick()
    assert (health.why_dead(), health.why_unready()) == ("", "")


def test_draining_is_alive_and_never_ready_again() -> None:
    health = Health()
    health.drain()
    health.serve()
    assert (health.why_dead(), health.why_unready()) == ("", "draining")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(settings=ProbeSettings(stuck_s=1.5), clock=clock)


@pytest.fixture
def url(health: Health) -> Iterator[str]:
    metrics = Metrics()
    metrics.set("build", 1, service="reward", version="0")
    probes = Probes(host="127.0.0.1", port=0, health=health, metrics=metrics)
    yield f"http://127.0.0.1:{probes.port}"
    probes.close()


def test_the_answers_over_http(health: Health, url: str) -> None:
    starting = httpx.get(f"{url}/readyz")
    assert (starting.status_code, starting.text) == (503, "starting\n")
    assert httpx.get(f"{url}/livez").status_code == 200
    health.serve()
    assert (httpx.get(f"{url}/readyz").status_code, httpx.get(f"{url}/livez").text) == (200, "ok\n")
    shown = 'paceline_build_info{service="reward",version="0"} 1.0'
    assert shown in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/").status_code == 404


async def test_a_blocked_event_loop_fails_the_probes(
    health: Health, clock: Clock, url: str
) -> None:
    health.serve()
    beat = asyncio.create_task(health.beat())
    for _ in range(3):
        clock.now_s += 1.0
        await asyncio.sleep(0.5)  # one iteration is enough
    assert httpx.get(f"{url}/livez").status_code == 200
    clock.now_s += 2.0
    blocked = httpx.get(f"{url}/livez")
    assert blocked.status_code == 503
    assert re.match(r"the event loop has been blocked for \d+ s; limit 1.5 s\n", blocked.text)
    while httpx.get(f"{url}/livez").status_code != 200:
        await asyncio.sleep(0.05)
    beat.cancel()


def test_a_silent_caller_does_not_block_others(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert httpx.get(f"{url}/livez", timeout=PATIENCE_S).status_code == 200


def test_a_taken_port_is_named_and_a_closed_one_is_free() -> None:
    first = Probes(host="127.0.0.1", port=free_port(), health=Health(), metrics=Metrics())
    with pytest.raises(UnavailableError, match=f"metrics_port {first.port} on 127"):
        Probes(host="127.0.0.1", port=first.port, health=Health(), metrics=Metrics())
    first.close()
    Probes(host="127.0.0.1", port=first.port, health=Health(), metrics=Metrics()).close()
