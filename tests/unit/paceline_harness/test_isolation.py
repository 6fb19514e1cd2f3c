"""Tests see nothing of other installations, clusters and trackers on the machine."""

import os
import tempfile
from pathlib import Path

import pytest

from paceline_harness.session.isolation import isolate, remove


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who uses Paceline on this machine."""
    (tmp_path / ".config" / "pip").mkdir(parents=True)
    (tmp_path / ".config" / "pip" / "pip.conf").touch()
    return {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "http_proxy": "http://proxy:3128",
        "no_proxy": "intranet",
        "PACELINE_URL": "http://127.0.0.1:8300",
        "PACELINE_TOKEN": "of-a-user",
        "PACELINE_LEDGER_STEPS": "20",
        "KUBECONFIG": "/root/.kube/config",
        "HF_TOKEN": "hf_of-a-user",
        "MLFLOW_TRACKING_URI": "http://mlflow",
        "WANDB_API_KEY": "of-a-user",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector",
    }


def test_what_names_an_installation_is_gone(elsewhere: dict[str, str]) -> None:
    folder = isolate(elsewhere)
    assert folder is not None
    try:
        told = {name for name, value in elsewhere.items() if "user" in value or "//" in value}
        assert told == {"http_proxy"}
        assert elsewhere["PACELINE_LEDGER_STEPS"] == "20"
        assert elsewhere["no_proxy"] == "intranet,127.0.0.1,localhost,::1"
        assert [*Path(elsewhere["HOME"]).iterdir()] == [Path(elsewhere["TMPDIR"])]
        assert isolate(elsewhere) is None  # in a worker of the same run
    finally:
        remove(folder)
    assert not folder.exists()


def test_packages_are_installed_as_before(elsewhere: dict[str, str]) -> None:
    home = Path(elsewhere["HOME"])
    folder = isolate(elsewhere)
    remove(folder)
    assert elsewhere["PIP_CONFIG_FILE"] == str(home / ".config" / "pip" / "pip.conf")
    assert elsewhere["XDG_CACHE_HOME"] == str(home / ".cache")


def test_this_run_is_isolated() -> None:
    folder = Path(os.environ["PACELINE_TEST_HOME"])
    assert Path.home() == folder
    assert folder in Path(tempfile.gettempdir()).parents
    assert "PACELINE_URL" not in os.environ
