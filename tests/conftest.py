"""Fixtures shared by all tests: a tiny model, a complete platform on this machine."""

import gc
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from paceline_harness.installations.platforms import Platform
from paceline_harness.models.tiny import tiny_job_of, tiny_model_in
from paceline_harness.monitoring.prometheus import MISSING, Prometheus, installed
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import share_fork_server
from paceline_harness.session.isolation import isolate_this_process, remove
from paceline_harness.session.selection import select

if TYPE_CHECKING:
    from paceline_trainer.ranks.distributed import RankGroup

# The speed of generating examples depends on the machine's load, not on the code under test.
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.register_profile("paceline", PATIENT, max_examples=50)
settings.register_profile("extended", PATIENT, max_examples=1000)
settings.load_profile("paceline")
# Before any other fixture, and in the environment of all processes that tests start.
OWN_FOLDER = isolate_this_process()
# Plug-ins that only tests install, for this process and its children.
PLUGINS = str(Path(__file__).with_name("plugins"))
sys.path.append(PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PLUGINS]))
SGLANG_PYTHON = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would walk again and again all that is imported.

    Nor does it walk that while tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    remove(OWN_FOLDER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config, items)


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """SGLang's Python. Fails rather than skips if `make sglang-env` has not been run."""
    assert SGLANG_PYTHON.exists(), f"{SGLANG_PYTHON} is missing: run make sglang-env"
    return str(SGLANG_PYTHON)


def of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what one process of a run makes and the others use."""
    return of_the_run(tmp_path_factory)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One fork server for all platforms of a run, as its imports take seconds."""
    share_fork_server(of_the_run(tmp_path_factory))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of some thousand parameters with a character tokenizer."""
    return tiny_model_in(of_the_run(tmp_path_factory) / "models")


@pytest.fixture(scope="session")
def tiny_job(tiny_model: Path) -> Callable[..., dict[str, Any]]:
    """A small job as a dictionary; keyword arguments replace whole sections."""
    return partial(tiny_job_of, tiny_model)


@pytest.fixture(scope="session")
def start_platform(forks: None) -> Iterator[Callable[..., Platform]]:
    """Starts platforms, which are stopped after the tests."""
    started: list[Platform] = []

    def start(run_dir: Path, *more: str) -> Platform:
        started.append(Platform.start(run_dir, *more))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def platform(
    tmp_path_factory: pytest.TempPathFactory, start_platform: Callable[..., Platform]
) -> Iterator[Platform]:
    """One platform for the tests of a module."""
    made = start_platform(tmp_path_factory.mktemp("run"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition; fails with `what` if it does not become true."""

    def wait(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    return wait


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[..., Prometheus]]:
    """Starts real Prometheus servers, stopped after the test; skips if not installed."""
    if not installed():
        pytest.skip(MISSING)
    started: list[Prometheus] = []

    def start(targets: Mapping[str, Iterable[str]] | None = None, **options: Any) -> Prometheus:
        folder = options.pop("folder", tmp_path / f"prometheus-{len(started)}")
        started.append(Prometheus(folder=folder, **options))
        return started[-1].start(targets)

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def group() -> Iterator["RankGroup"]:
    """The process group of a single-rank trainer; a process can have only one."""
    from paceline_trainer.ranks.distributed import RankGroup
    from paceline_trainer.ranks.rank_info import RankInfo

    made = RankGroup(RankInfo())
    yield made
    made.close()
