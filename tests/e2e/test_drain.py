"""SIGTERM to each service with work in flight: unready at once, gone within its grace period."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from paceline.config import ServiceSettings, load_settings
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import PLAIN
from paceline_harness.processes import goes_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# With what the interpreter takes to end on a busy machine.
LATE_S = 30.0
# What a busy event loop may take until it turns to the signal; probes have threads of their own.
AT_ONCE_S = 2.0
STEP_S = PATIENCE_S


def test_every_service_exits_within_its_grace_period(
    platform: Any, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    job = tiny_job(name="drain", eval=None, stop={"steps": 100_000})
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        for kind in ("rollout", "environment", "reward", "trainer", "gateway", "experience"):
            step = client.get(job_id).status.step
            until(lambda step=step: client.get(job_id).status.step > step + 1, "no step", STEP_S)
            ends(platform, kind, until)
            until(lambda: comes_back(client, job_id), f"nothing answers after {kind}", STEP_S)
        client.cancel(job_id)
        assert client.wait(job_id, timeout_s=PATIENCE_S).status.state == "cancelled"
        assert client.verify(job_id).ok


def comes_back(client: Any, job_id: str) -> bool:
    with contextlib.suppress(Exception):
        return bool(client.get(job_id))
    return False


def settings_of(platform: Any, kind: str) -> ServiceSettings:
    return load_settings(sorted((platform.run_dir / "settings").glob(f"{kind}*.yaml"))[-1])


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=PATIENCE_S, verify=PLAIN).text == "ok\n"
    return False


def ends(platform: Any, kind: str, until: Callable[..., None]) -> None:
    """Terminate a process and watch its probes meanwhile."""
    settings = settings_of(platform, kind)
    url = f"http://127.0.0.1:{settings.metrics_port}"
    until(lambda: is_ready(url), f"{kind} is not ready", STEP_S)
    process = psutil.Process(platform.pid_of(kind))
    process.terminate()
    began_s = time.monotonic()
    while goes_on(process):
        asked_s = time.monotonic() - began_s
        assert asked_s < settings.grace_s + LATE_S, platform.logs()
        # The signal reaches a rank only when its torchrun passes it on; and what answers may be
        # the next one already.
        late = is_ready(url) and asked_s >= AT_ONCE_S and kind != "trainer"
        assert not late or not goes_on(process)
    print(f"{kind}: {time.monotonic() - began_s:.2f} s of {settings.grace_s:g} s")
    assert settings.logs.path is not None
    assert f"stopped kind={kind}" in settings.logs.path.read_text()
