"""Fixtures shared by all tests: a tiny model, a complete platform on this machine."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from paceline.client.client import Client
from paceline.files import locked, read_json, token_of
from paceline_harness.isolation import isolate_this_process, remove
from paceline_harness.monitoring.prometheus import MISSING, Prometheus, installed
from paceline_harness.patience import PATIENCE_S
from paceline_harness.ports import PLAIN
from paceline_harness.processes import share_fork_server

if TYPE_CHECKING:
    from paceline_trainer.ranks.distributed import RankGroup

# The speed of generating examples depends on the machine's load, not on the code under test.
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.register_profile("paceline", PATIENT, max_examples=50)
settings.register_profile("extended", PATIENT, max_examples=1000)
settings.load_profile("paceline")
# Before any other fixture, and in the environment of all processes that tests start.
OWN_FOLDER = isolate_this_process()
START_S = PATIENCE_S
STOP_S = PATIENCE_S
LOADED = 4  # tests name time limits for a machine with nothing else to do
# Plug-ins that only tests install, for this process and its children.
PLUGINS = str(Path(__file__).with_name("plugins"))
sys.path.append(PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), PLUGINS]))
SGLANG_PYTHON = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"
TINY = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
names = ["<pad>", "<bos>", "<eos>", *"0123456789+-*=", " "]
tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer.decoder = decoders.Fuse()
tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
tokenizer.save(str(folder / "tokenizer.json"))
settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
(folder / "tokenizer_config.json").write_text(json.dumps(settings))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
)
LlamaForCausalLM(config).save_pretrained(folder)
"""


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
    """Deselect extended tests and those of what must be installed first, unless marks are given."""
    chosen = str(config.getoption("markexpr"))
    left_out = [mark for mark in ("sglang", "adapters", "extended") if mark not in chosen]
    dropped = [item for item in items if any(map(item.get_closest_marker, left_out))]
    wanted = [item for item in items if not any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=dropped)
    items[:] = longest_first(wanted)
    for item in wanted:
        if mark := item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LOADED * mark.args[0]), append=False)


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files by their longest time limit, so that no worker is left with a long one at the end."""
    limits: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0), mark.args[0] if mark else 0)
    return sorted(items, key=lambda item: -limits[item.path])


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
    """A random Llama of some thousand parameters with a character tokenizer.

    Made once for all processes of a run, as its imports take seconds.
    """
    folder = of_the_run(tmp_path_factory) / "models" / "tiny"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with locked(folder.with_suffix(".lock")):
        if not (folder / "config.json").exists():
            part = folder.with_suffix(".part")
            subprocess.run([sys.executable, "-c", TINY, str(part)], check=True, env=environment)
            part.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_job(tiny_model: Path) -> Callable[..., dict[str, Any]]:
    """A small job as a dictionary; keyword arguments replace whole sections."""

    def make(**sections: Any) -> dict[str, Any]:
        job: dict[str, Any] = {
            "name": "tiny",
            "model": {"path": str(tiny_model)},
            "tasks": {"environment": "arithmetic", "options": {"digits": 1}},
            "eval": {"every": 10, "tasks": 16, "options": {"split": "heldout"}},
            "sampling": {"max_tokens": 4, "max_context": 32},
            "reward": [{"kind": "exact"}],
            "experience": {"batch_groups": 4, "group_size": 4, "filters": [], "lease_s": 3.0},
            "trainer": {"optimizer": {"lr": 1e-4}, "checkpoint": {"every": 5}},
            "stop": {"steps": 20},
        }
        job.update(sections)
        return job

    return make


@dataclass(slots=True)
class Platform:
    """`paceline up` as a separate process."""

    run_dir: Path
    http: str
    grpc: str
    up: "subprocess.Popen[bytes]"

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header for its gateway."""
        return {"authorization": f"Bearer {token_of(self.run_dir)}"}

    def client(self) -> Client:
        """An SDK client of its gateway."""
        token = token_of(self.run_dir)
        return Client(self.http, token=token, timeout_s=60.0, outage_s=START_S)

    def pid_of(self, name: str) -> int:
        """Process id of a started process, by name or prefix.

        Waits for one that is being started: until then its id is 0, and a signal to 0 would go to
        the sender's own process group.
        """
        deadline = time.monotonic() + START_S
        while True:
            records = sorted((self.run_dir / "processes").glob(f"{name}*.json"))
            content = read_json(records[-1]) if records else None
            if content is not None and content["pid"]:
                return int(content["pid"])
            assert time.monotonic() < deadline, f"no process {name}"
            time.sleep(0.02)

    def pids(self, kind: str = "", job_id: str = "") -> dict[str, int]:
        """Process ids by name: of all that are there now, and of this kind and job if given.

        One that is being started is waited for, and one that goes meanwhile is left out.
        """
        found: dict[str, int] = {}
        for name in self.names():
            if not name.startswith(kind) or job_id not in name:
                continue
            path = self.run_dir / "processes" / f"{name}.json"
            while (content := read_json(path)) is not None and not content["pid"]:
                time.sleep(0.02)
            if content is not None:
                found[name] = int(content["pid"])
        return found

    def names(self) -> list[str]:
        """Names of all started processes."""
        return sorted(path.stem for path in (self.run_dir / "processes").glob("*.json"))

    def stop(self) -> None:
        """Send SIGTERM and wait until everything has stopped."""
        end(self.up)

    def logs(self) -> str:
        """The last lines of all logs, for failed tests."""
        tails = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in (self.run_dir / "logs").iterdir()]
        return "\n".join(tails)


def end(up: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to `paceline up`; returns once everything has stopped."""
    if up.poll() is None:
        up.send_signal(signal.SIGTERM)
    up.wait(STOP_S)


def is_ready(addresses: dict[str, Any] | None) -> bool:
    """Whether jobs can be submitted to the gateway at these addresses."""
    if addresses is None:
        return False
    with suppress(httpx.TransportError):
        url = f"{addresses['http']}/readyz"
        return httpx.get(url, timeout=START_S, verify=PLAIN).is_success
    return False


@pytest.fixture(scope="session")
def start_platform(forks: None) -> Iterator[Callable[..., Platform]]:
    """Starts platforms, which are stopped after the tests."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run_dir: Path, *more: str) -> Platform:
        command = [sys.executable, "-m", "paceline.cli", "up", "--run-dir", str(run_dir)]
        up = subprocess.Popen([*command, "--port", "0", *more])
        started.append(up)
        deadline = time.monotonic() + START_S
        # The gateway publishes its address before the experience service, which it needs, is up.
        while not is_ready(addresses := read_json(run_dir / "gateway.json")):
            assert up.poll() is None, "paceline up ended"
            assert time.monotonic() < deadline, "the gateway did not start"
            time.sleep(0.1)
        assert addresses is not None
        return Platform(run_dir, addresses["http"], addresses["grpc"], up)

    yield start
    for up in started:
        end(up)


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
