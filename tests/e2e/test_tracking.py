"""A tracker whose server never answers costs its job nothing; the other trackers get all of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.types import TrackerStatus
from paceline_tracking.trackers import tensorboard, wandb

STEPS = 4
PATIENCE_S = 240.0


@pytest.mark.timeout(600)
def test_a_hung_tracker_costs_the_job_nothing(
    tmp_path: Path,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:  # takes connections, answers nothing
        port = hole.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_MODE", "offline")
        platform = start_platform(tmp_path / "run")
        tracking = [
            {"kind": "tensorboard", "system_s": 1.0, "samples": {"every": 2}},
            "wandb",
            {"kind": "mlflow", "timeout_s": 5.0},
        ]
        spec = parse_job(tiny_job(stop={"steps": STEPS}, tracking=tracking))
        with platform.client() as client:
            job = client.wait(client.submit(spec).status.job_id)
            assert job.status.state == "succeeded", platform.logs()

            def trackers() -> dict[str, TrackerStatus]:
                return {each.name: each for each in client.get(job.status.job_id).status.tracking}

            deadline = time.monotonic() + PATIENCE_S
            wanted = {"tensorboard": "done", "wandb": "done", "mlflow": "retrying"}
            while {name: each.state for name, each in trackers().items()} != wanted:
                assert time.monotonic() < deadline, (trackers(), platform.logs())
                time.sleep(0.5)
            found = trackers()
        platform.stop()
    assert found["mlflow"].detail.startswith("hung: ")
    folder = tmp_path / "run" / "jobs" / job.status.job_id
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["index"] for line in lines]
    assert found["tensorboard"].rows == found["wandb"].rows == len(rows)
    entries = wandb.history_in(folder / "tracking" / "wandb")
    assert [entry[wandb.ROW] for entry in entries if wandb.ROW in entry] == rows
    assert tensorboard.rows_in(folder / "tracking" / "tensorboard") == len(rows)
    texts = list(tensorboard.events_in(folder / "tracking" / "tensorboard" / "samples"))
    assert any(event.summary.value for event in texts)
    assert list(tensorboard.events_in(folder / "tracking" / "tensorboard" / "system"))
