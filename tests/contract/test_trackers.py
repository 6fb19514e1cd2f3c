"""The contract of trackers, with the real libraries, read back by the real programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.plugins import TrackedRun
from paceline.testing.trackers import ROWS, fulfils_the_contract, tracked_rows, tracked_run
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import held_port
from paceline_tracking.trackers import tensorboard, wandb

pytestmark = pytest.mark.timeout(900)
BIN = Path(sys.executable).parent
START_S = PATIENCE_S
ROW = "paceline/row"
# Steps 1, 2, 3, 4, then again 3, 4.
STEPS = [1, 2, 3, 4, 3, 4]


@contextmanager
def serving(
    command: Sequence[str | Path], ready: str, folder: Path, **variables: str
) -> Generator[str]:
    """Run a server on its own port; yields its address once `ready` answers."""
    log = folder / "server.log"
    with held_port() as port, log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_S
            while True:
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                with suppress(OSError):
                    urllib.request.urlopen(f"{address}{ready}", timeout=5).close()
                    break
                time.sleep(0.2)
            yield address
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, 9)
            server.wait()


def asked(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def until(address: str, enough: Callable[[Any], bool] = bool) -> Any:
    """The first sufficient answer of a server, which reads files one after another."""
    deadline, found = time.monotonic() + START_S, None
    while True:
        assert time.monotonic() < deadline, (address, found)
        with suppress(OSError):
            if enough(found := asked(address)):
                return found
        time.sleep(0.2)


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def rows_of_tensorboard(run: TrackedRun) -> list[int]:
    rows = [
        int(value.simple_value)
        for event in tensorboard.events_in(run.folder / "train")
        for value in event.summary.value
        if value.tag == ROW
    ]
    return rows


def test_tensorboard_keeps_every_row_and_shows_the_live_branch(tmp_path: Path) -> None:
    run = fulfils_the_contract("tensorboard", tmp_path, read=rows_of_tensorboard)
    # Rows 2 and 3 (steps 3 and 4) were taken back by the rewind at row 4.
    assert scalars(run.folder / "train", ROW) == [(1, 0.0), (2, 1.0), (3, 4.0), (4, 5.0)]
    assert len(scalars(run.folder / "system", "system/tokens_per_s")) == 3


def test_real_tensorboard_serves_scalars_and_texts(tmp_path: Path) -> None:
    run = fulfils_the_contract("tensorboard", tmp_path, read=rows_of_tensorboard)
    command = [BIN / "tensorboard", "--logdir", run.folder, "--load_fast=false"]
    with serving(command, "/data/plugin/scalars/tags", tmp_path) as address:
        loss = f"{address}/data/plugin/scalars/scalars?run=train&tag=train%2Floss"
        text = f"{address}/data/plugin/text/text?run=samples&tag=samples%2Ftext_summary"
        wanted = [(1, 1), (2, 2), (3, 5), (4, 6)]
        until(loss, lambda points: [(step, round(1 / v)) for _, step, v in points] == wanted)
        texts = until(text)
        assert "1+1=" in texts[0]["text"]
        assert "<table>" in texts[0]["text"]


def rows_of_wandb(run: TrackedRun) -> list[int]:
    return [entry[ROW] for entry in wandb.history_in(run.folder) if ROW in entry]


def test_wandb_offline_holds_every_row_in_files_that_wandb_can_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = fulfils_the_contract("wandb", tmp_path, read=rows_of_wandb, options={"tags": ["t"]})
    told = [entry for entry in wandb.history_in(run.folder) if ROW in entry]
    assert [entry["step"] for entry in told] == STEPS
    assert [entry["version"] for entry in told] == list(range(ROWS))
    files = list(run.folder.glob("wandb/offline-run-*/run-contract-1.wandb"))
    assert len(files) == 3  # one for each life
    assert list(run.folder.glob("wandb/offline-run-*/files/media/table/samples*.table.json"))
    folders = [path.parent for path in files]
    done = subprocess.run(
        [BIN / "wandb", "sync", "--dry-run", *folders],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Would sync 3 run(s)" in done.stdout + done.stderr


def test_a_cut_file_of_wandb_is_read_up_to_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = fulfils_the_contract("wandb", tmp_path, read=rows_of_wandb)
    for path in run.folder.glob("wandb/offline-run-*/*.wandb"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert rows_of_wandb(run) == sorted(set(rows_of_wandb(run)))


def test_trackio_is_read_by_its_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "trackio")
    monkeypatch.setenv("TRACKIO_DIR", folder)

    def values(metric: str) -> list[dict[str, Any]]:
        command = ["get", "metric", "--project", "contract", "--run", "contract-1"]
        done = subprocess.run(
            [BIN / "trackio", *command, "--metric", metric, "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return json.loads(done.stdout)["values"]

    run = fulfils_the_contract(
        "trackio",
        tmp_path,
        read=lambda _: [int(entry["value"]) for entry in values(ROW)],
        options={"project": "contract"},
    )
    assert run.run_id == "contract-1"
    assert [entry["step"] for entry in values("train/loss")] == STEPS


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """A real server on SQLite."""
    command = [
        *(BIN / "mlflow", "server", "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"),
        *("--artifacts-destination", str(tmp_path / "artifacts")),
    ]
    # Processes of its own for jobs that no tracker uses would import all of it once more.
    jobs = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with serving(command, "/health", tmp_path, **jobs) as address:
        yield address


def test_a_real_server_of_mlflow_has_every_row(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    client = MlflowClient(mlflow_server)

    def runs() -> Any:
        experiment = client.get_experiment_by_name("contract")
        assert experiment is not None
        return client.search_runs([experiment.experiment_id])

    def read(_: TrackedRun) -> list[int]:
        (run,) = runs()
        history = client.get_metric_history(run.info.run_id, ROW)
        return sorted(int(metric.value) for metric in history)

    fulfils_the_contract("mlflow", tmp_path, read=read, options={"experiment": "contract"})
    (run,) = runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["stop.steps"] == str(ROWS)
    history = client.get_metric_history(run.info.run_id, "train/loss")
    by_value = sorted(history, key=lambda metric: -metric.value)
    assert [metric.step for metric in by_value] == STEPS
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"job.json", "samples", "summary.json"} <= files
    table = client.list_artifacts(run.info.run_id, "samples")[0].path
    content = json.loads(Path(client.download_artifacts(run.info.run_id, table)).read_text())
    assert content["columns"][1] == "prompt"
    assert content["data"][0][1] == "1+1="


def test_mlflow_without_a_server_explains_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(LookupError, match="set MLFLOW_TRACKING_URI in the environment"):
        fulfils_the_contract("mlflow", tmp_path, read=lambda _: [])


def test_versions_can_be_the_axis(tmp_path: Path) -> None:
    run = tracked_run(tmp_path, axis="version")
    tracker = tensorboard.tensorboard(run)
    tracker.write(tracked_rows(0, ROWS))
    tracker.close()
    # Versions only grow: nothing is taken back.
    assert scalars(run.folder / "train", ROW) == [(row, float(row)) for row in range(ROWS)]
