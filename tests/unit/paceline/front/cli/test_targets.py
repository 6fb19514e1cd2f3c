"""Which installation a command is about."""

from __future__ import annotations

import json
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.front.cli.target.clients import DEFAULT_URL, CommandTarget, target_of
from paceline.front.cli.target.run_dirs import last_run, remember, run_dir_of

NONE = CommandTarget()


def asked(**given: object) -> Namespace:
    return Namespace(**{"url": "", "run_dir": None, "token_file": None, "ca": None} | given)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with no installation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("URL", "TOKEN", "RUN_DIR"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)


@pytest.fixture
def gateway() -> Iterator[str]:
    """The URL of something that listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def run_dir(path: str, url: str = "") -> Path:
    """A run directory with a store, and the address of a gateway if there is one."""
    folder = Path(path).resolve()
    (folder / "store").mkdir(parents=True)
    if url:
        (folder / "gateway.json").write_text(json.dumps({"http": url}))
    return folder


def test_a_run_directory_is_read_where_its_gateway_is_gone(gateway: str) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    live, over, killed = run_dir("live", gateway), run_dir("over"), run_dir("killed", url)
    assert target_of(asked(run_dir=live)) == CommandTarget(gateway, live)
    assert target_of(asked(run_dir=over)) == CommandTarget(run_dir=over)
    # A supervisor that was killed leaves the address behind.
    assert target_of(asked(run_dir=killed)) == CommandTarget(run_dir=killed)
    assert target_of(asked(run_dir=Path("empty"))) == NONE


def test_what_is_named_comes_first(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, other = run_dir("named"), run_dir("other")
    remember(run_dir("last", gateway))
    monkeypatch.setenv("PACELINE_RUN_DIR", str(named))
    assert target_of(asked()) == CommandTarget(run_dir=named)
    monkeypatch.setenv("PACELINE_URL", "http://paceline")
    assert target_of(asked()) == CommandTarget("http://paceline")
    assert target_of(asked(run_dir=other)) == CommandTarget(run_dir=other)
    assert target_of(asked(run_dir=other, url="http://other")) == CommandTarget("http://other")


def test_the_last_run_serves_commands_that_name_nothing(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (target_of(asked()), run_dir_of(asked())) == (NONE, Path("runs/local"))
    last = run_dir("last")
    remember(Path("last"))  # relative to where the run began
    found = CommandTarget(run_dir=last, is_remembered=True)
    assert (target_of(asked()), run_dir_of(asked())) == (found, last)
    # Only an installation elsewhere has use for a token.
    monkeypatch.setenv("PACELINE_TOKEN", "some")
    assert target_of(asked()) == CommandTarget(DEFAULT_URL)
    monkeypatch.delenv("PACELINE_TOKEN")
    local = run_dir("runs/local", gateway)
    assert target_of(asked()) == CommandTarget(gateway, Path("runs/local"))
    assert run_dir_of(asked()) == Path("runs/local")
    (local / "gateway.json").unlink()
    assert target_of(asked()) == found
    last.joinpath("store").rmdir()
    last.rmdir()
    assert (last_run(), target_of(asked())) == (None, CommandTarget(run_dir=Path("runs/local")))
