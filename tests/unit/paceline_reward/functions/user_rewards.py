"""Rewards as a user may write them; imported by child processes only."""

import asyncio
import fcntl
import hashlib
import os
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any

from paceline.enums import ScoreStatus
from paceline.plugins import RewardInput
from paceline.rewards.bounded import bounded
from paceline.types import Score


def by_response(item: RewardInput) -> Any:
    """Do what the response says."""
    deeds = {
        "crash": lambda: os._exit(3),
        "exit": lambda: sys.exit(4),
        "hang": lambda: time.sleep(600),
        "raise": lambda: 1 / 0,
        "nan": lambda: float("nan"),
        "text": lambda: "one",
        "none": lambda: None,
        "bad score": lambda: Score(reward="x", parts={}),  # type: ignore[arg-type]
        "inf part": lambda: Score(reward=1.0, parts={"a": float("inf")}),
        "huge": lambda: 10**400,
        "brackets": lambda: brackets(2 << 20),
        "print": lambda: os.write(1, b"garbage") * 0.5 / 7,
    }
    return deeds[item.response]() if item.response in deeds else float(item.response)


def endless(item: RewardInput) -> float:
    """Computes in C, where no signal interrupts it."""
    rounds = 1_000_000_000 if item.response == "bomb" else 1
    bounded(lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", rounds), cpu_s=0.05)
    return 1.0


def brackets(size: int) -> float:
    """Finds the pipe to the parent, and writes an answer there that is deeper than its stack."""
    data = struct.pack(">I", size) + b"[" * size
    (sink,) = (fd for fd in range(3, 16) if is_writable_pipe(fd))
    while data:
        data = data[os.write(sink, data) :]
    return 1.0


def is_writable_pipe(fd: int) -> bool:
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode) or stat.S_ISSOCK(os.fstat(fd).st_mode)
        return is_pipe and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


async def later(item: RewardInput, *, bonus: float = 0.0) -> Score:
    """An asynchronous one with parts and a status."""
    await asyncio.sleep(0)
    return Score(
        reward=float(item.response) + bonus,
        parts={"bonus": bonus},
        status=ScoreStatus.PARSE_ERROR,
        raw_answer=item.response,
    )


def pid(item: RewardInput) -> float:
    """Which process this is."""
    time.sleep(0.01)
    return float(os.getpid())


def stray(item: RewardInput, *, pid_file: str) -> float:
    """Leave a process behind that holds the pipes, in a session of its own, and hang."""
    if os.fork() == 0:
        os.setsid()
        Path(pid_file).write_text(str(os.getpid()))
    time.sleep(600)
    return 0.0


def told(item: RewardInput) -> float:
    """A number made of all that an item has besides its response."""
    turns = sum(turn.reward + item.max_tokens * turn.num_tokens for turn in item.turns)
    return turns + sum(item.parts.values())
