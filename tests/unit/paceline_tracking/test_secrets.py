"""Nothing that opens a door gets out of the process of a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.testing.trackers import tracked_run
from paceline_tracking.host import MOST_ERROR_CHARS, Host, words
from paceline_tracking.messages import run_to
from paceline_tracking.secrets import without_secrets
from paceline_tracking.trackers.mlflow import MLflow


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:pw@host/a", "at https://***@host/a"),
        ("https://h/?access_token=abc&a=1#/x", "https://h/?access_token=***&a=1#/x"),
        ("https://h/?a=1&api_key=abc", "https://h/?a=1&api_key=***"),
        ("https://h/?Password=abc and more", "https://h/?Password=*** and more"),
        ("https://h/?client-secret=abc", "https://h/?client-secret=***"),
        ("https://h/?X-Amz-Signature=abc", "https://h/?X-Amz-Signature=***"),
        ("https://h/?monkeys=3&tokens=4", "https://h/?monkeys=3&tokens=4"),
        ("the key is correct-horse", "the key is ***"),
    ],
)
def test_addresses_and_values_of_variables_are_hidden(text: str, shown: str) -> None:
    assert without_secrets(text, {"SOME_API_KEY": "correct-horse"}) == shown


def test_the_address_of_a_run_shows_no_secret(tmp_path: Path) -> None:
    host = Host()
    opened = {"kind": "leaky", "options": {}, "run": run_to(tracked_run(tmp_path))}
    requests: dict[str, Any] = {
        "open": opened,
        "write": [],
        "finish": {"state": "succeeded", "summary": {}},
    }
    for verb, asked in requests.items():
        assert host.do(verb, asked)["url"] == "https://***@host/run?token=***"


class Found:
    """A client of MLflow that knows one run, which holds nothing."""

    def search_runs(self, *_: Any, **__: Any) -> list[Any]:
        return [self]

    @property
    def info(self) -> Any:
        return self

    @property
    def data(self) -> Any:
        return self

    run_id = "r"
    metrics: dict[str, float] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ("https://me:pw@host:5000/", "https://host:5000"),
        ("https://host/base?token=abc", "https://host/base"),
        ("http://host", "http://host"),
    ],
)
def test_the_url_of_mlflow_has_no_credentials(tmp_path: Path, server: str, address: str) -> None:
    tracker = MLflow(tracked_run(tmp_path), Found(), server=server, experiment="7")
    assert tracker.url == f"{address}/#/experiments/7/runs/r"


def test_a_message_is_cut_after_its_secrets_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "k" * MOST_ERROR_CHARS * 2)
    opened = {"kind": "refusing", "options": {}, "run": run_to(tracked_run(tmp_path))}
    with pytest.raises(ConnectionError) as refused:
        Host().do("open", opened)
    assert words(refused.value) == "ConnectionError: key ***"
