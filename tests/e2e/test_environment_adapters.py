"""Environments of other frameworks through all services."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.sync.server import ServerConnection, serve

from paceline.enums import JobState
from paceline.errors import InvalidError
from paceline.isolation.sandbox import landlock
from paceline_harness.patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes"),
]
SAMPLING = {"max_tokens": 2, "max_context": 48, "on_truncation": "score"}


def plays(connection: ServerConnection) -> None:
    """An OpenEnv session whose episodes have two turns, each worth 0.5."""
    turns = 0
    for text in connection:
        message = json.loads(text)
        if message["type"] == "close":
            return
        turns = 0 if message["type"] == "reset" else turns + 1
        data = {"observation": {"hint": f"{turns}+1="}, "reward": 0.5, "done": turns == 2}
        connection.send(json.dumps({"type": "observation", "data": data}))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve(plays, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def allowing(
    address: str,
    tmp_path_factory: pytest.TempPathFactory,
    start_platform: Callable[..., Any],
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("adapters")
    worlds = folder / "worlds.yaml"
    worlds.write_text(yaml.safe_dump({"worlds": {"openenv": {"allow": [address]}}}))
    made = start_platform(folder / "run", "--worlds", str(worlds))
    yield made
    made.stop()


@pytest.fixture
def job(tiny_job: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def make(name: str, **options: Any) -> dict[str, Any]:
        made = tiny_job(name=name, stop={"steps": 2}, eval=None, sampling=SAMPLING)
        tasks = {"environment": name, "options": options}
        return made | {"tasks": tasks, "reward": [{"kind": "environment"}]}

    return make


def test_a_job_plays_gymnasium(allowing: Any, job: Callable[..., dict[str, Any]]) -> None:
    lake = {"id": "FrozenLake-v1", "max_turns": 4, "invalid_reward": -0.125}
    texts = {"prompt": "{observation}+0=", "template": "{observation}+0=", "invalid": "0+0="}
    with allowing.client() as client:
        job_id = client.submit(job("gymnasium", **lake, **texts)).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = client.list_trajectories(job_id).trajectories
    assert any(row.score.reward < 0 for row in rows)


def test_a_job_plays_what_an_operator_allows(
    allowing: Any, address: str, job: Callable[..., dict[str, Any]]
) -> None:
    given = {"prompt": "{hint}", "template": "{hint}"}
    with allowing.client() as client:
        wanted = job("openenv", base_url=f"http://{address}", **given)
        job_id = client.submit(wanted).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = client.list_trajectories(job_id).trajectories
        # Each turn is worth 0.5, and one that was cut off is the last.
        assert {row.score.reward for row in rows} | {0.5, 1.0} == {0.5, 1.0}
        assert rows

        other = job("openenv", base_url="http://127.0.0.1:9", **given)
        job_id = client.submit(other).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.FAILED
        assert "base_url: 127.0.0.1:9 is not allowed here" in ended.status.reason


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("gymnasium", {"id": "os:Lake-v0"}, "tasks.options.id: an id that is registered"),
        ("gymnasium", {"id": "FrozenLak-v1"}, "tasks.options.id: 'FrozenLak-v1'"),
        ("gymnasium", {"id": "FrozenLake-v1", "turns": 3}, "tasks.options.turns: unknown option"),
        ("openenv", {"base_url": "file:///etc"}, "tasks.options.base_url: a URL is needed"),
        ("verifiers", {"id": "gsm8k"}, "tasks.options.size: is missing"),
    ],
)
def test_what_is_wrong_is_refused_at_submit(
    allowing: Any,
    job: Callable[..., dict[str, Any]],
    name: str,
    options: dict[str, Any],
    told: str,
) -> None:
    with allowing.client() as client, pytest.raises(InvalidError) as refused:
        client.submit(job(name, **options))
    assert told in str(refused.value)


def test_a_wrong_file_of_worlds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "worlds.yaml").write_text("openenv: {}")
    command = [sys.executable, "-m", "paceline.front.cli", "up", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--worlds", str(tmp_path / "worlds.yaml")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode != 0
    assert "openenv" in ended.stderr
