"""Forks behave as processes that were started with the same command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import UnavailableError
from paceline.front.local import fork_server
from paceline.front.local.fork_server import SHARED, UNKNOWN_CODE, ForkServer, launch_shared
from paceline.front.local.processes import ENVIRONMENT, Processes
from paceline_harness.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(not fork_server.is_useful(), reason="this machine has a GPU")
STATE = """
import json, os, random, sys, threading
print(json.dumps({
    "name": __name__, "argv": sys.argv, "orig": os.environ["OMP_NUM_THREADS"],
    "rank": os.environ.get("RANK"), "session": os.getsid(0) == os.getpid(),
    "files": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1], "stdin": sys.stdin.read(),
    "random": random.random(), "safe_path": sys.flags.safe_path,
    "threads": threading.active_count(),
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}), flush=True)
"""
ENDS = {
    "print('bye')": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(256 + 3)": 3,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit('wrong')": 1,
    "import threading; threading.Thread(target=print, args=('last',)).start()": 0,
    "raise ValueError('wrong')": 1,
    "import os; os._exit(7)": 7,
    "import os; os.kill(os.getpid(), 9)": -9,
    "import os; os.abort()": -6,
    "import atexit; atexit.register(print, 'at the end')": 0,
}
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Processes]]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(SHARED, raising=False)
    every: list[Processes] = []

    def one(*preloaded: str, folder: str = "run") -> Processes:
        where = tmp_path / folder
        every.append(Processes(folder=where / "p", logs=where, preloaded=preloaded))
        return every[-1]

    yield one
    for processes in every:
        for record in processes.records():
            processes.kill(record.name)
        processes.close()


def run(processes: Processes, tmp_path: Path, name: str, code: str, **options: Any) -> None:
    (tmp_path / f"{name}.py").write_text(code)
    mark = f"{tmp_path}/with a blank/{name}.yaml"  # of this test: all with a mark are killed
    command = [sys.executable, "-P", "-m", name, mark]
    processes.start(name, command, mark=mark, forked=True, **options)


def wait(processes: Processes, name: str) -> int | None:
    deadline = time.monotonic() + PATIENCE_S
    while processes.alive(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return processes.exit_code(name)


def servers(under: int) -> list[psutil.Process]:
    """Those of these tests; the one of all platforms of a test run has other modules."""
    below = psutil.Process(under).children()
    return [
        each
        for each in below
        if "paceline.front.local.fork_server_process" in each.cmdline()
        and "paceline_trainer.service" not in each.cmdline()
    ]


def test_a_fork_is_like_a_new_process(make: Callable[..., Processes], tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    for folder, preloaded in (("new", []), ("forked", ["numpy", "asyncio"])):
        processes = make(*preloaded, folder=folder)
        for name in ("one", "two"):
            run(processes, tmp_path, name, STATE, environment={"RANK": name})
            assert wait(processes, name) == 0
            states.append(json.loads((tmp_path / folder / f"{name}.out").read_text()))
    numbers = [state.pop("random") for state in states]
    assert len(set(numbers)) == 4
    assert states[0] == states[2]
    assert states[1] == states[3]
    assert states[2]["files"] == [0, 1, 2]
    assert states[3]["command"][-2:] == ["two", f"{tmp_path}/with a blank/two.yaml"]


@pytest.mark.parametrize("code", ENDS)
def test_a_fork_ends_as_a_new_process_does(
    make: Callable[..., Processes], tmp_path: Path, code: str
) -> None:
    outputs: list[str] = []
    for folder, preloaded in (("new", []), ("forked", ["json"])):
        processes = make(*preloaded, folder=folder)
        run(processes, tmp_path, "ends", code)
        assert wait(processes, "ends") == ENDS[code]
        outputs.append((tmp_path / folder / "ends.out").read_text())
    # Of tracebacks, those of forks have more frames.
    assert outputs[0].splitlines()[-1:] == outputs[1].splitlines()[-1:]


LASTING = """
class Lasting:
    def __del__(self):
        print("taken apart", flush=True)

thing = Lasting()
"""


def test_a_fork_does_not_take_apart_what_was_imported(
    make: Callable[..., Processes], tmp_path: Path
) -> None:
    """That takes half a second where torch was."""
    (tmp_path / "lasting.py").write_text(LASTING)
    processes = make("json")
    run(processes, tmp_path, "ends", "import lasting; print('bye')")
    assert wait(processes, "ends") == 0
    assert (tmp_path / "run" / "ends.out").read_text() == "bye\n"


def test_forks_outlive_their_server_and_another_is_started(
    make: Callable[..., Processes], tmp_path: Path
) -> None:
    processes = make("json")
    for name in ("one", "two"):
        run(processes, tmp_path, name, SLEEP)
    (server,) = servers(os.getpid())
    assert {child.pid for child in server.children()} == {r.pid for r in processes.records()}
    server.send_signal(signal.SIGKILL)
    run(processes, tmp_path, "three", SLEEP)  # without a server, which is noticed
    assert all(processes.alive(name) for name in ("one", "two", "three"))
    processes.stop("one", grace_s=PATIENCE_S)
    assert processes.exit_code("one") == UNKNOWN_CODE
    run(processes, tmp_path, "four", SLEEP)
    (server,) = servers(os.getpid())
    assert [child.cmdline()[3] for child in server.children()] == ["four"]
    processes.stop("four", grace_s=PATIENCE_S)
    assert processes.exit_code("four") == -signal.SIGTERM


def test_a_server_ends_with_its_owner_and_its_forks_do_not(
    make: Callable[..., Processes], tmp_path: Path
) -> None:
    processes = make("json")
    run(processes, tmp_path, "one", SLEEP)
    (server,) = servers(os.getpid())
    processes.close()
    assert not server.is_running()
    assert processes.alive("one")


@pytest.mark.parametrize(
    "preloaded",
    [
        "no_such_module",
        "starts_a_thread",
        "exits",
    ],
)
def test_without_a_server_processes_start_as_ever(
    make: Callable[..., Processes], tmp_path: Path, preloaded: str
) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    processes = make(preloaded)
    for name in ("one", "two"):
        run(processes, tmp_path, name, STATE)
        assert wait(processes, name) == 0
    assert servers(os.getpid()) == []


def test_a_command_that_has_no_room_is_started_as_ever(
    make: Callable[..., Processes], tmp_path: Path
) -> None:
    processes = make("json")
    mark = f"{tmp_path}/" + "x" * 2000
    (tmp_path / "long.py").write_text(STATE)
    command = [sys.executable, "-P", "-m", "long", mark]
    processes.start("long", command, mark=mark, forked=True)
    assert wait(processes, "long") == 0
    assert json.loads((tmp_path / "run/long.out").read_text())["command"][-1] == mark
    run(processes, tmp_path, "short", SLEEP)
    (server,) = servers(os.getpid())
    assert [child.cmdline()[3] for child in server.children()] == ["short"]


@pytest.mark.parametrize(
    "how", [["-P", "{path}"], ["{path}"], ["-P", "-c", STATE], ["-m", "other"]]
)
def test_what_is_not_a_module_is_a_new_process(
    make: Callable[..., Processes], tmp_path: Path, how: list[str]
) -> None:
    processes = make("json")
    run(processes, tmp_path, "first", SLEEP)  # the server is ready
    path = tmp_path / "other.py"
    path.write_text(STATE)
    command = [
        sys.executable,
        *(word.format(path=path) if "{path}" in word else word for word in how),
    ]
    processes.start("other", command, mark=str(path), forked=True)
    assert wait(processes, "other") == 0
    assert json.loads((tmp_path / "run/other.out").read_text())["command"] == command


def test_the_exit_code_of_a_killed_fork_is_known_though_the_server_is_slow(
    make: Callable[..., Processes], tmp_path: Path
) -> None:
    processes = make("json")
    run(processes, tmp_path, "one", SLEEP)
    (server,) = servers(os.getpid())
    server.suspend()
    resumed = threading.Timer(0.5, server.resume)
    resumed.start()
    processes.kill("one")
    assert processes.exit_code("one") == -signal.SIGKILL
    resumed.join()


@pytest.fixture
def shared(
    make: Callable[..., Processes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psutil.Process]:
    """A fork server for several owners of processes."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # paths of sockets are short
    path, output = str(folder / "forks"), tmp_path / "shared.out"
    environment = {**os.environ, **ENVIRONMENT}
    server = launch_shared(
        ["json"], path=path, output=output, environment=environment, owner=os.getpid()
    )
    monkeypatch.setenv(SHARED, path)
    yield psutil.Process(server.pid)
    server.kill()
    server.wait()
    shutil.rmtree(folder)


def test_several_owners_share_a_server(
    shared: psutil.Process, make: Callable[..., Processes], tmp_path: Path
) -> None:
    first, second = make("json", folder="first"), make("json", folder="second")
    for processes, name in ((first, "one"), (second, "two"), (first, "three")):
        run(processes, tmp_path, name, STATE if name == "three" else SLEEP)
    assert wait(first, "three") == 0
    state = json.loads((tmp_path / "first" / "three.out").read_text())
    assert (state["name"], state["session"], state["files"]) == ("__main__", True, [0, 1, 2])
    started = {record.pid for processes in (first, second) for record in processes.records()}
    assert {child.pid for child in shared.children()} == started - {first.records()[-1].pid}
    first.close()  # the other one's go on, and more can be started
    assert second.alive("two")
    run(second, tmp_path, "four", "raise SystemExit(4)")
    assert wait(second, "four") == 4


def test_a_shared_server_makes_no_process_that_would_be_another(
    shared: psutil.Process,
    make: Callable[..., Processes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = make("json")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    run(processes, tmp_path, "one", "import os; print(os.getppid())")
    assert wait(processes, "one") == 0
    assert (tmp_path / "run/one.out").read_text().strip() == str(os.getpid())
    server = ForkServer.connect(os.environ[SHARED])
    environment = {**os.environ, **ENVIRONMENT}
    for python, why in (("/other/python", "it runs"), (sys.executable, "another PYTHONHASHSEED")):
        command = [python, "-P", "-m", "one"]
        with (tmp_path / "out").open("wb") as out, pytest.raises(UnavailableError, match=why):
            server.start(command, output=out, environment=environment)
    server.close()


CHANGES = "import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = 'set by an import'"
STARTS = """
import sys, pathlib
from paceline.front.local.processes import Processes

folder = pathlib.Path(sys.argv[1]).parent / "below"
processes = Processes(folder=folder, logs=folder, preloaded=["changes"])
command = [sys.executable, "-P", "-m", "asks", str(folder / "asks.yaml")]
processes.start("asks", command, mark=str(folder / "asks.yaml"), forked=True)
while processes.alive("asks"):
    pass
"""


def test_forks_have_forks_although_an_import_has_changed_their_environment(
    make: Callable[..., Processes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does; what a controller starts is forked, even if it is a fork itself."""
    (tmp_path / "changes.py").write_text(CHANGES)
    (tmp_path / "asks.py").write_text("import os; print(os.getppid())")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path, environment = str(folder / "forks"), {**os.environ, **ENVIRONMENT}
    server = launch_shared(
        ["changes"], path=path, output=tmp_path / "o", environment=environment, owner=os.getpid()
    )
    monkeypatch.setenv(SHARED, path)
    processes = make("changes")
    run(processes, tmp_path, "starts", STARTS)
    assert wait(processes, "starts") == 0
    server.kill()
    server.wait()
    shutil.rmtree(folder)
    (answer,) = tmp_path.rglob("asks.out")
    assert answer.read_text().strip() == str(server.pid)


def test_a_shared_server_ends_with_its_owner(tmp_path: Path) -> None:
    """Also if that ends before the imports are done."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    owner = subprocess.Popen([sys.executable, "-c", SLEEP])
    for connects in (True, False):
        path = str(folder / str(connects))
        server = launch_shared(
            ["json"], path=path, output=tmp_path / "o", environment=os.environ, owner=owner.pid
        )
        if connects:
            ForkServer.connect(path).close()
        owner.kill()
        owner.wait()
        server.wait(PATIENCE_S)
        with pytest.raises(UnavailableError, match="no fork server at"):
            ForkServer.connect(path)
    shutil.rmtree(folder)


CONTAINER = ["unshare", "-Ur", "--pid", "--fork", "--mount-proc", "--kill-child"]
SERVES = """
import os, sys
from pathlib import Path
from paceline.front.local.fork_server import launch_shared

launch_shared(
    ["json"], path=sys.argv[1], output=Path(os.devnull), environment=os.environ, owner=os.getpid()
).wait()
"""


@pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="needs namespaces",
)
def test_processes_of_other_containers_start_nothing(tmp_path: Path) -> None:
    """A volume with the socket shows it to them; seen from its namespace they have no pid."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    path, deed = str(folder / "forks"), tmp_path / "deed"
    container = subprocess.Popen([*CONTAINER, sys.executable, "-c", SERVES, path])
    try:
        deadline = time.monotonic() + PATIENCE_S
        server = None
        while server is None:
            assert container.poll() is None
            assert time.monotonic() < deadline
            with suppress(UnavailableError, OSError):  # it is not there yet, or does not listen
                server = ForkServer.connect(path)
        command = [sys.executable, "-P", "-m", "timeit", f"open({str(deed)!r}, 'w').close()"]
        with (
            (tmp_path / "out").open("wb") as out,
            pytest.raises(UnavailableError, match="has ended"),
        ):
            server.start(command, output=out, environment=os.environ)
    finally:
        container.kill()
        container.wait()
        shutil.rmtree(folder)
    assert not deed.exists()
