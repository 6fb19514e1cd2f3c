"""Memory that was freed goes back to the system, if it is worth it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, sys
from pathlib import Path
from paceline.platform.free_memory import return_free_memory, share_one_arena

def kept():
    [line] = [each for each in Path("/proc/self/status").open() if each.startswith("RssAnon")]
    return int(line.split()[1]) >> 10

share_one_arena()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
assert not return_free_memory()  # there is next to nothing
blocks = [library.malloc(64 << 10) for _ in range(4096)]  # 256 MiB
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
full = kept()
for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
    library.free(block)
assert full - kept() < 32, (full, kept())
assert return_free_memory()
assert full - kept() > 200, (full, kept())
library.free(blocks[-1])
"""


def test_pages_of_what_was_freed_go_back_to_the_system() -> None:
    """In a process of its own, with a heap that nothing else has used."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
