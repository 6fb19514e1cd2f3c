"""Tries whether programs are contained on this machine, by running one that attacks."""

from __future__ import annotations

import json

from paceline.errors import UnavailableError
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Level, Sandbox
from paceline.plugins import ProgramLimits

_ATTACKS = """
import json, os, socket

def fails(attack, *arguments):
    try:
        attack(*arguments)
    except OSError:
        return True
    return False

print(json.dumps({
    "files": fails(open, "/etc/passwd"),
    "processes": fails(os.fork),
    "signals": fails(os.kill, 1, 0) and fails(os.kill, os.getppid(), 0),
    "network": fails(socket.socket),
}))
"""


_HELD = {
    2: "Landlock {abi}, seccomp and limits",
    3: "namespaces, Landlock {abi}, seccomp and limits",
}


async def probe() -> str:
    """What contains programs here: the level, what it is made of, and why it is no higher one.

    Raises:
        UnavailableError: nothing does; says what is missing.
    """
    sandbox = Sandbox()
    try:
        outcome = await sandbox.run(_ATTACKS, stdin=b"", limits=ProgramLimits())
        level = await sandbox.level()
    finally:
        await sandbox.close()
    try:
        held: dict[str, bool] = json.loads(outcome.stdout)
    except ValueError:
        raise UnavailableError(f"sandbox: the probe says {outcome.stderr!r}") from None
    if missing := ", ".join(name for name, holds in held.items() if not holds):
        raise UnavailableError(f"sandbox: programs reach {missing}")
    return described(level)


def described(level: Level) -> str:
    """A level in words."""
    held = f"level {level.number}: {_HELD[level.number].format(abi=landlock.abi())}"
    return held + (f" (no namespaces: {level.why})" if level.why else "")
