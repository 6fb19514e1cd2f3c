"""The tables of `make slowest-tests` name the line at which a test waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = '''
import asyncio, subprocess, sys, time
import pytest

@pytest.fixture
def slow_start():
    time.sleep(0.6)

def test_sleeps(slow_start):
    pass

async def waits_inside():
    await asyncio.create_task(asyncio.sleep(0.6))

async def test_awaits():
    await waits_inside()

def test_computes():
    subprocess.run([sys.executable, "-c", """
import time
while time.process_time() < 0.6: pass
"""], check=True)
'''


@pytest.mark.parametrize("processes", [(), ("--numprocesses", "1")])
def test_waits_are_named(tmp_path: Path, processes: tuple[str, ...]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_three.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "paceline_harness.slowest.plugin"]
    options = [
        "--rootdir",
        ".",
        "-c",
        os.devnull,
        "-o",
        "asyncio_mode=auto",
        "--import-mode=importlib",
    ]
    done = subprocess.run(
        [*command, *options, *processes, "tests"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = " ".join(done.stdout.split())
    assert "at test_three.py:7 slow_start" in found
    assert "at test_three.py:13 waits_inside" in found
    assert "slow_start" in found.partition("slowest fixtures")[2]
    (computes,) = {line for line in done.stdout.splitlines() if line.endswith("::test_computes")}
    _, _, children, *_ = computes.split()
    assert float(children) >= 0.6
