"""Starts programs of a job's code in the sandbox, where they may read its folder."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline.plugins import ProgramLimits
from paceline.sandbox.sandbox import Sandbox
from paceline.sandbox.sealed_process import SealedProcess

LIMITS = ProgramLimits(cpu_s=1 << 30, memory_bytes=4 << 30, output_bytes=16 << 20, open_files=256)
_PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from {module} import main
main(*{arguments!r})
"""


async def start_sealed(
    sandbox: Sandbox,
    folder: Path,
    module: str,
    *arguments: str | int,
    packages: tuple[Path, ...] = (),
    limits: ProgramLimits = LIMITS,
) -> SealedProcess:
    """Run `main(*arguments)` of a module of ours, with `folder` first among the import paths.

    `packages`: folders to import from besides that of this package.

    Raises:
        UnavailableError: programs cannot be contained here.
    """
    own = Path(paceline.__file__ or "").resolve().parents[1]
    readable = (folder, own, *packages)
    paths = [str(path) for path in readable]
    source = _PROGRAM.format(paths=paths, module=module, arguments=arguments)
    return await sandbox.start(source, readable=readable, limits=limits)
