"""Starts programs of a job's code in the sandbox, where they may read its folder."""

from __future__ import annotations

from pathlib import Path

import paceline
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.process import program
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.isolation.sandbox.sealed_process import SealedProcess
from paceline.isolation.sandbox.zygote import LANDLOCK, NAMESPACES
from paceline.plugins import ProgramLimits

SCRATCH_BYTES = 64 << 20
OWN = Path(paceline.__file__ or "").resolve().parents[1]
# What the job requires comes after the standard library and before the packages of the worker.
_PATHS = """
at = next((n for n, p in enumerate(sys.path) if p.endswith("-packages")), len(sys.path))
sys.path[at:at] = {required!r}
sys.path[:0] = {paths!r}
"""


def sandbox_for(module: str, package: Path | None = None, *, lowest: int = LANDLOCK) -> Sandbox:
    """A sandbox whose programs start at once with this module of ours, found in a folder."""
    return Sandbox(f"{module}@{package or OWN}", lowest=lowest)


async def start_sealed(
    sandbox: Sandbox,
    code: CodeFolder,
    module: str,
    *arguments: str | int,
    memory_bytes: int,
    packages: tuple[Path, ...] = (),
) -> SealedProcess:
    """Run `main(*arguments)` of a module of ours, with the code first among the import paths.

    Where the sandbox has namespaces, it has a `/tmp` of its own to write in. `memory_bytes` bounds
    its address space; `packages`: folders to import from besides that of this package.

    Raises:
        UnavailableError: programs cannot be contained here.
    """
    paths = (code.path, OWN, *packages)
    required = (code.packages,) if code.packages else ()
    lines = _PATHS.format(paths=[*map(str, paths)], required=[*map(str, required)])
    source = program(lines, module, arguments)
    level = await sandbox.level()
    limits = ProgramLimits(
        cpu_s=1 << 30,
        memory_bytes=memory_bytes,
        output_bytes=16 << 20,
        open_files=256,
        scratch_bytes=SCRATCH_BYTES if level.number >= NAMESPACES else 0,
    )
    return await sandbox.start(source, readable=[*paths, *required], limits=limits)
