"""Jobs on a machine whose GPUs are described: they queue for them, or are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.enums import JobState
from paceline.front.client.client import Client
from paceline.front.local.supervisor import Local
from paceline.platform.files import read_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("PACELINE_DEVICES", "2x80GiB")
    with Local(tmp_path / "site", http_port=0) as made:
        yield made


def devices_of(site: Local) -> dict[str, str]:
    """GPUs by process."""
    folder = site.run_dir / "processes"
    records = {path.stem: read_json(path) for path in folder.glob("*.json")}
    return {
        name: record["labels"]["devices"]
        for name, record in records.items()
        if record and "devices" in record["labels"]
    }


def test_jobs_queue_for_gpus(
    site: Local, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None], tmp_path: Path
) -> None:
    gated = {"kind": "gated", "gate": str(tmp_path / "gate"), "pattern": ".*", "timeout_s": 600.0}
    stop = {"steps": 2}
    with Client(site.url, token=site.token) as client:
        first = client.submit(tiny_job(name="first", reward=[gated], stop=stop)).status.job_id
        until(lambda: client.get(first).status.state is JobState.RUNNING, "the first job runs")
        assert devices_of(site) == {
            "environment-0": "",
            "reward-0": "",
            f"trainer-{first}": "0",
            f"rollout-{first}-0": "1",
        }
        second = client.submit(tiny_job(name="second", stop=stop)).status.job_id
        until(
            lambda: "and 0 of 2 are free" in client.get(second).status.reason,
            "the second job says what it waits for",
        )
        large = tiny_job(name="large", trainer={"world_size": 2}, rollout={"colocate": False})
        third = client.submit(large).status.job_id
        until(lambda: client.get(third).status.state is JobState.FAILED, "the third is refused")
        assert client.get(third).status.reason == (
            "devices: it needs 3 GPUs (trainer 2, 1 rollout worker with 1), and this machine has 2"
        )
        client.cancel(first)
        until(lambda: client.get(second).status.state is JobState.SUCCEEDED, "the second runs")
