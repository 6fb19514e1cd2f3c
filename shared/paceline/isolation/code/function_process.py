"""The sealed process that runs functions of a job's ledger."""

from __future__ import annotations

from paceline.isolation.calls import Calls
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.sealed import start_sealed
from paceline.isolation.sandbox.sandbox import Sandbox

MODULE = "paceline.isolation.code.ledger_child"


async def start_functions(sandbox: Sandbox, code: CodeFolder, *, memory_bytes: int) -> Calls:
    """Start a process that may import a code; calls are answered one at a time.

    Raises:
        UnavailableError: programs cannot be contained here.
    """
    return Calls(await start_sealed(sandbox, code, MODULE, memory_bytes=memory_bytes))
