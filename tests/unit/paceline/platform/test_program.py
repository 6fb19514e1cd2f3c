"""How programs of ours start and end."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from paceline.platform.program import importing

PROGRAM = """
from paceline.platform.program import importing, leave
import atexit, sys, threading, time

class Kept:
    def __del__(self):
        print("taken apart")

kept = Kept()
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
sys.stdout.write("said ")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (3, 3), (-1, 255)])
def test_it_leaves_with_its_code_after_threads_and_what_was_registered(
    code: int, seen: int
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == seen
    assert done.stdout.split() == ["said", "thread", "registered"]
    assert not done.stderr


def test_an_error_while_it_leaves_is_said() -> None:
    text = "from paceline.platform.program import leave\nimport atexit\n"
    text += "atexit.register(len)\nleave(2)\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "TypeError" in done.stderr


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [("pass", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit()", 0, ""), ("sys.exit('no')", 1, "no\n")],
)
def test_a_program_in_it_ends_as_it_would_alone(ends: str, code: int, said: str) -> None:
    text = (
        f"import sys\nfrom paceline.platform.program import leaving\nwith leaving():\n    {ends}\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_what_is_imported_is_collected_neither_meanwhile_nor_later() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made: list[list[int]] = [[] for _ in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()
