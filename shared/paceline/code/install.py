"""Installs wheels into a folder with pip, bounded in time, memory and disk."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from paceline.config.packages import PackageSettings
from paceline.errors import UnavailableError

# Loaded in every sealed process before its job's code, so that code cannot have other versions.
SHARED = (
    *("annotated-types", "grpcio", "grpcio-health-checking", "pydantic", "pydantic-core"),
    *("typing-extensions", "typing-inspection"),
)
CHILD = Path(__file__).with_name("pip_child.py")
_MEMORY_BYTES = 4 << 30
_LOOK_S = 0.25
_TOLD_LINES, _TOLD_CHARS = 3, 1000
_RETRIED = "Retrying ("
# Proxies and certificates of the index, and pip's own settings; nothing else of the service.
_PASSED = ("HOME", "LANG", "PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
_PASSED_PREFIX = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_ARGUMENTS = (
    *("--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--no-cache-dir"),
    *("--root-user-action", "ignore", "--progress-bar", "off", "--no-warn-script-location"),
    *("--retries", "1", "--timeout", "15"),
)


class InstallError(UnavailableError):
    """The packages that a job's code requires cannot be installed here."""


def shared_versions() -> tuple[str, ...]:
    """`name==version` of what sealed processes load of the worker's packages."""
    found = list[str]()
    for name in SHARED:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name}=={metadata.version(name)}")
    return tuple(found)


async def install(
    requirements: Sequence[str], *, wheels: Path | None, into: Path, settings: PackageSettings
) -> Path:
    """Install packages; returns the folder to import from, which is in the empty folder `into`.

    `wheels`: a folder with wheels besides those of the index.

    Raises:
        InstallError: pip refuses, or takes too much time or disk; says its last lines.
    """
    if importlib.util.find_spec("pip") is None:
        raise InstallError("pip is not installed in this image")
    target, log = into / "site", into / "log"
    target.mkdir()
    (into / "tmp").mkdir()
    (into / "requirements.txt").write_text("\n".join(requirements) + "\n")
    (into / "constraints.txt").write_text("\n".join(shared_versions()) + "\n")
    limits = (os.getpid(), _MEMORY_BYTES, settings.most_bytes, int(settings.timeout_s) + 1)
    options = [
        *("--target", target, "-r", into / "requirements.txt"),
        *("--constraint", into / "constraints.txt", *_sources(wheels, settings)),
    ]
    command = [sys.executable, "-I", CHILD, *limits, "install", *_ARGUMENTS, *options]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(os.environ, settings) | {"TMPDIR": str(into / "tmp")},
            cwd=into,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(settings.timeout_s):
            await _finished(process, into, settings.most_bytes)
    except TimeoutError:
        raise InstallError(f"not installed within {settings.timeout_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        raise InstallError(_told(log.read_text(errors="replace"), process.returncode))
    return target


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder; some may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


async def _finished(process: asyncio.subprocess.Process, folder: Path, most_bytes: int) -> None:
    """Wait for its end, or until the folder has grown too large."""
    ended = asyncio.create_task(process.wait())
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=_LOOK_S)
            # While pip works, what it has downloaded is there packed and unpacked.
            allowed = most_bytes if ended.done() else 3 * most_bytes
            if await asyncio.to_thread(size_of, folder) > allowed:
                raise InstallError(f"more than {most_bytes} bytes of packages")
    finally:
        ended.cancel()


def _sources(wheels: Path | None, settings: PackageSettings) -> Iterator[str | Path]:
    if settings.no_index:
        yield "--no-index"
    if wheels is not None:
        yield from ("--find-links", wheels)


def _environment(own: Mapping[str, str], settings: PackageSettings) -> dict[str, str]:
    passed = {
        name: value
        for name, value in own.items()
        if name in _PASSED or name.upper().startswith(_PASSED_PREFIX)
    }
    if settings.index_url:  # which may have a password: all users can read arguments
        passed["PIP_INDEX_URL"] = settings.index_url
    return passed


def _told(log: str, code: int) -> str:
    """What pip says is wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("ERROR:")] or lines
    retried = [line for line in lines if _RETRIED in line][-1:]
    text = "; ".join([*retried, *wrong[-_TOLD_LINES:]]) or f"exit code {code}"
    return f"pip: {text}"[:_TOLD_CHARS]
