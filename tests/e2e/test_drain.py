"""SIGTERM to each service with work under way: not ready at once, gone within its grace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from paceline.config import ServiceSettings, load_settings

pytestmark = pytest.mark.slow
# With what the interpreter takes to end on a busy machine.
LATE_S = 4.0


def test_every_service_ends_within_its_grace(
    platform: Any, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    job = tiny_job(name="drain", eval=None, stop={"steps": 100_000})
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        for kind in ("rollout", "environment", "reward", "trainer", "gateway", "experience"):
            step = client.get(job_id).status.step
            until(lambda step=step: client.get(job_id).status.step > step + 1, "no step")
            ends(platform, kind)
            until(lambda: comes_back(client, job_id), f"nothing answers after {kind}")
        client.cancel(job_id)
        assert client.wait(job_id, timeout_s=60).status.state == "cancelled"
        assert client.audit(job_id).ok


def comes_back(client: Any, job_id: str) -> bool:
    with contextlib.suppress(Exception):
        return bool(client.get(job_id))
    return False


def settings_of(platform: Any, kind: str) -> ServiceSettings:
    return load_settings(sorted((platform.run_dir / "settings").glob(f"{kind}*.yaml"))[-1])


def ends(platform: Any, kind: str) -> None:
    """Ask a process to end, and look at what its probes say meanwhile."""
    settings = settings_of(platform, kind)
    url = f"http://127.0.0.1:{settings.metrics_port}"
    assert httpx.get(f"{url}/readyz").text == "ok\n"
    process = psutil.Process(platform.pid_of(kind))
    process.terminate()
    began_s = time.monotonic()
    said: list[str] = []
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        with contextlib.suppress(httpx.HTTPError):
            said.append(httpx.get(f"{url}/readyz", timeout=1.0).text)
        assert time.monotonic() - began_s < settings.grace_s + LATE_S, platform.logs()
    took_s = time.monotonic() - began_s
    print(f"{kind}: {took_s:.2f} s of {settings.grace_s:g} s")
    # The signal reaches a rank only when its torchrun passes it on.
    assert kind == "trainer" or "ok\n" not in said[1:]
    assert settings.logs.path is not None
    assert f"stopped kind={kind}" in settings.logs.path.read_text()
