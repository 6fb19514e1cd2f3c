"""A tracker whose server never answers does not affect its job or the other trackers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.types import TrackerStatus
from paceline_harness.patience import PATIENCE_S
from paceline_tracking.trackers import tensorboard, wandb

STEPS = 4


def points(folder: Path) -> Iterator[Any]:
    """Events of TensorBoard that have values; the first of a file has none."""
    return (event for event in tensorboard.events_in(folder) if event.summary.value)


@pytest.mark.timeout(1200)
def test_a_hung_tracker_costs_the_job_nothing(
    tmp_path: Path,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    until: Callable[..., None],
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
        # Of a job that is over there are no system points: it waits for the first one.
        gate = tmp_path / "gate"
        reward = {"kind": "gated", "timeout_s": 600.0}
        held = {**reward, "gate": str(gate), "pattern": "^[0-9]"}
        spec = parse_job(tiny_job(stop={"steps": STEPS}, reward=[held], tracking=tracking))
        with platform.client() as client:
            job_id = client.submit(spec).status.job_id
            system = platform.run_dir / "jobs" / job_id / "tracking" / "tensorboard" / "system"
            until(lambda: any(points(system)), "no system point", PATIENCE_S)
            gate.touch()
            job = client.wait(job_id, timeout_s=PATIENCE_S)
            assert job.status.state == "succeeded", platform.logs()

            def look() -> tuple[dict[str, TrackerStatus], dict[str, str]]:
                found = {each.name: each for each in client.get(job_id).status.tracking}
                return found, {name: each.state for name, each in found.items()}

            deadline = time.monotonic() + PATIENCE_S
            wanted = {"tensorboard": "done", "wandb": "done", "mlflow": "retrying"}
            found, states = look()
            while states != wanted:
                assert time.monotonic() < deadline, (found, platform.logs())
                time.sleep(0.5)
                found, states = look()
        platform.stop()
    assert found["mlflow"].detail.startswith("hung: ")
    folder = tmp_path / "run" / "jobs" / job_id
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["index"] for line in lines]
    assert found["tensorboard"].rows == found["wandb"].rows == len(rows)
    entries = wandb.history_in(folder / "tracking" / "wandb")
    assert [entry[wandb.ROW] for entry in entries if wandb.ROW in entry] == rows
    assert tensorboard.rows_in(folder / "tracking" / "tensorboard") == len(rows)
    texts = list(tensorboard.events_in(folder / "tracking" / "tensorboard" / "samples"))
    assert any(event.summary.value for event in texts)
    assert any(points(system))
