import os
import random
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import StateError
from paceline.front.local.fork_server import SHARED
from paceline.front.local.ports import PORTS, PortSlots, are_free, free_port, is_free
from paceline.front.local.processes import Processes, summarise
from paceline.platform.files import lock_for_life, read_json, tail, write_json
from paceline.platform.server.failures import describe
from paceline.platform.server.restarts import RestartBackoff
from paceline_harness.patience import PATIENCE_S

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True)\n" + (
    "while True: time.sleep(1)"
)
# Like torchrun: a child in its own session, with the same mark among its arguments.
NESTING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *sys.argv[1:]],
                 start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("on", flush=True)
time.sleep(600)
"""


def until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.02)


@pytest.fixture(params=["started", "forked"])
def processes(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Processes]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the modules that `start` writes
    monkeypatch.delenv(SHARED, raising=False)
    made = again(tmp_path, preloaded=["json"] if request.param == "forked" else [])
    yield made
    for record in made.records():
        made.kill(record.name)
    made.close()


def again(tmp_path: Path, preloaded: Sequence[str] = ()) -> Processes:
    folder, logs = tmp_path / "processes", tmp_path / "logs"
    return Processes(folder=folder, logs=logs, preloaded=preloaded)


def start(processes: Processes, tmp_path: Path, code: str = SLEEP) -> int:
    mark = str(tmp_path / "settings.yaml")
    name = f"module_{zlib.crc32(code.encode())}"
    (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-P", "-m", name, mark]
    return processes.start("a", command, mark=mark, forked=True).pid


def said(tmp_path: Path, text: str) -> bool:
    return text in (tmp_path / "logs" / "a.out").read_text()


def marked(tmp_path: Path) -> list[int]:
    mark = str(tmp_path / "settings.yaml")
    found: list[int] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in (process.info["cmdline"] or []) and process.info["status"] != "zombie":
            found.append(process.pid)
    return found


def test_start_alive_stop(processes: Processes, tmp_path: Path) -> None:
    pid = start(processes, tmp_path)
    assert processes.alive("a")
    assert os.getpgid(pid) == pid
    processes.stop("a", grace_s=60)
    assert not processes.alive("a")
    assert processes.exit_code("a") == -signal.SIGTERM


def test_children_get_one_thread_and_stay_offline(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'], flush=True)")
    until(lambda: not processes.alive("a"))
    assert said(tmp_path, "1")
    assert processes.exit_code("a") == 0


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace_period(
    processes: Processes, tmp_path: Path
) -> None:
    start(processes, tmp_path, STUBBORN)
    until(lambda: said(tmp_path, "on"))
    processes.stop("a", grace_s=0.2)
    assert processes.exit_code("a") == -signal.SIGKILL


@pytest.mark.parametrize("leader_first", [False, True])
def test_stop_leaves_no_orphans(processes: Processes, tmp_path: Path, leader_first: bool) -> None:
    pid = start(processes, tmp_path, NESTING)
    until(lambda: said(tmp_path, "on"))
    below = psutil.Process(pid).children(recursive=True)
    assert len(below) == 2
    if leader_first:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not processes.alive("a"))
    processes.stop("a", grace_s=1)
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in below))
    assert marked(tmp_path) == []


def test_start_removes_leftovers_of_an_earlier_process(
    processes: Processes, tmp_path: Path
) -> None:
    first = start(processes, tmp_path, NESTING)
    until(lambda: said(tmp_path, "on"))
    os.kill(first, signal.SIGKILL)
    second = start(processes, tmp_path)
    assert marked(tmp_path) == [second]


def test_another_object_adopts_running_processes(processes: Processes, tmp_path: Path) -> None:
    pid = start(processes, tmp_path)
    other = again(tmp_path)
    assert [record.pid for record in other.records()] == [pid]
    assert other.alive("a")
    assert other.exit_code("a") is None
    other.stop("a", grace_s=60)
    assert not processes.alive("a")


def test_a_process_about_to_start_is_recorded(processes: Processes, tmp_path: Path) -> None:
    """A supervisor may be killed between starting a process and recording its pid."""
    mark = str(tmp_path / "settings.yaml")
    with pytest.raises(FileNotFoundError):
        processes.start("a", [str(tmp_path / "nothing"), mark], mark=mark)
    child = subprocess.Popen([sys.executable, "-c", SLEEP, mark], start_new_session=True)
    # The kernel wakes up the parent of an exec before the arguments can be read.
    while mark not in psutil.Process(child.pid).cmdline():
        time.sleep(0.001)
    other = again(tmp_path)
    assert [record.mark for record in other.records()] == [mark]
    assert not other.alive("a")
    other.stop("a", grace_s=1)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_supervisors_share_a_folder(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path)
    other = Processes(folder=tmp_path / "processes", logs=tmp_path / "logs", owner="other")
    assert other.records() == []


def test_a_reused_pid_is_not_ours(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path)
    path = tmp_path / "processes" / "a.json"
    content = read_json(path)
    assert content is not None
    write_json(path, {**content, "created": content["created"] - 100, "mark": ""})
    other = again(tmp_path)
    assert not other.alive("a")
    other.stop("a", grace_s=1)
    assert processes.alive("a")


def test_forget_removes_the_state_file(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path)
    processes.stop("a", grace_s=60)
    processes.forget("a")
    assert again(tmp_path).records() == []


def test_last_words_begin_with_the_error(processes: Processes, tmp_path: Path) -> None:
    start(processes, tmp_path, "raise ValueError('no such model')")
    until(lambda: not processes.alive("a"))
    words = processes.last_words("a").splitlines()
    assert words[0] == "ValueError: no such model"
    assert words[1].startswith("Traceback")
    assert processes.last_words("unknown") == ""


def test_summarise_prefers_the_error_of_a_rank() -> None:
    text = "[rank0]: RuntimeError: boom\nnoise\nelastic.ChildFailedError: \nroot cause"
    assert summarise(text, lines=1) == "[rank0]: RuntimeError: boom\nroot cause"


def test_last_words_include_errors_that_the_launcher_omits(
    processes: Processes, tmp_path: Path
) -> None:
    failing = (
        "import sys, traceback\n"
        "text = 'ERROR chassis service failed\\nTraceback (most recent call last):\\n'\n"
        "open(sys.argv[1], 'a').write(text + 'torch.OutOfMemoryError: CUDA out of memory.\\n')\n"
        "print('E1122 20:00:00 1 torch/distributed/elastic/multiprocessing/api.py:882] failed')\n"
        "print('Traceback (most recent call last):\\n  File \"run.py\"')\n"
        "print('torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \\n=====')\n"
        "print('  traceback : Signal 9 (SIGKILL) received by PID 4')\n"
        "sys.exit(1)\n"
    )
    log = tmp_path / "logs" / "a-rank1.log"
    mark = str(tmp_path / "mark")
    processes.start("a", [sys.executable, "-c", failing, str(log), mark], mark=mark)
    until(lambda: not processes.alive("a"))
    words = processes.last_words("a").splitlines()
    assert words[:2] == [
        "ended by SIGKILL",
        "OOM: torch.OutOfMemoryError: CUDA out of memory.",
    ]
    assert not any("ChildFailedError" in row or row.startswith("E1122") for row in words)


def test_how_failures_are_described() -> None:
    assert describe(ValueError("x")) == "ValueError: x"
    assert describe(MemoryError()) == "OOM: MemoryError"
    allocator = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")
    assert describe(allocator).startswith("OOM: RuntimeError: DefaultCPUAllocator")
    assert describe(StateError("gone")) == "paceline.errors.StateError: gone"


@given(st.lists(st.floats(0, 60), min_size=1, max_size=30))
def test_delays_grow_to_the_limit_and_reset_after_a_stable_run(
    lives: list[float],
) -> None:
    restarts = RestartBackoff(base_s=0.25, max_s=15.0, stable_s=10.0)
    now, before = 0.0, 0.0
    for lived_s in lives:
        now += lived_s
        restarts.failed(now, lived_s=lived_s)
        pause = restarts.due_s - now
        expected = 0.25 if lived_s >= 10 or before == 0 else min(15.0, before * 2)
        assert pause == pytest.approx(expected)
        before = pause


def test_ports_are_kept_and_distinct(tmp_path: Path) -> None:
    slots = PortSlots(tmp_path / "ports.json")
    first, second = slots.take("a"), slots.take("b")
    assert first != second
    assert PortSlots(tmp_path / "ports.json").take("a") == first
    assert slots.known("a") == first
    assert slots.known("c") is None


@pytest.mark.parametrize("distance", [0, 1, 233, 10_000])
def test_a_port_is_chosen_together_with_those_derived_from_it(distance: int) -> None:
    derived = (1, 13, *range(233, 240), 10_000)
    first = free_port(random.Random(7), derived=derived)
    assert {first, *(first + each for each in derived)} <= set(PORTS)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + distance))
        other.listen()
        assert not are_free(first, derived)
        second = free_port(random.Random(7), derived=derived)
    assert second != first
    assert second + 10_000 in PORTS
    assert not is_free(60_467 + 10_000)
    with pytest.raises(StateError, match=r"no port between 20000 and 31999 is free together"):
        free_port(random.Random(7), derived=[50_000])


def test_a_port_held_by_another_process_is_replaced(tmp_path: Path) -> None:
    slots = PortSlots(tmp_path / "ports.json")
    first = slots.take("a")
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert not is_free(first)
        assert slots.take("a") != first


def test_a_lock_for_life_has_one_holder(tmp_path: Path) -> None:
    held = lock_for_life(tmp_path / "lock", what="a supervisor")
    with pytest.raises(StateError, match=f"a supervisor already runs .*pid {os.getpid()}"):
        lock_for_life(tmp_path / "lock", what="a supervisor")
    held.close()
    lock_for_life(tmp_path / "lock", what="a supervisor").close()


def test_small_files(tmp_path: Path) -> None:
    path = tmp_path / "below" / "a.json"
    assert read_json(path) is None
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    path.write_text("{")
    assert read_json(path) is None
    assert tail(path, num_bytes=10) == "{"


def test_files_of_processes_are_readable_by_the_owner_only(
    processes: Processes, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        start(
            processes, tmp_path, f"import pathlib; pathlib.Path({str(tmp_path / 'made')!r}).mkdir()"
        )
        until((tmp_path / "made").exists)
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
