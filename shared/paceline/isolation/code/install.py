"""Fetches and unpacks wheels in processes of their own, bounded in time, memory and disk."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config.packages import PackageSettings
from paceline.errors import UnavailableError
from paceline.isolation.calls import CallError, EndedError
from paceline.isolation.code.members import SMALLEST_BYTES
from paceline.isolation.code.wheels.messages import (
    FETCH,
    HANDLE,
    MOST_ANSWER_BYTES,
    REPLY,
    UNPACK,
    FetchRequest,
    LocalWheel,
    UnpackRequest,
    WheelsReply,
)
from paceline.isolation.code.wheels.sources import CERTIFICATES, WheelSources, without_credentials
from paceline.isolation.frames import Frame
from paceline.isolation.once import call_once
from paceline.isolation.process import PlainProcess
from paceline.isolation.sandbox.hold import Hold

# Loaded in every sealed process before its job's code, so that code cannot have other versions.
SHARED = (
    *("annotated-types", "grpcio", "grpcio-health-checking", "pydantic", "pydantic-core"),
    *("typing-extensions", "typing-inspection"),
)
FETCHER, UNPACKER = (
    "paceline.isolation.code.wheels.fetch_child",
    "paceline.isolation.code.wheels.unpack_child",
)
_LOOK_S = 0.25
_MOST_CHARS = 2000  # of an error
_LOG_BYTES = 64 << 10  # that are read of what a process has printed, the last ones
# Proxies, certificates and `.netrc` for the fetcher; nothing else of the service.
_PASSED = ("HOME", "NETRC", "SSL_CERT_DIR", *CERTIFICATES)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_SEALED = {"HOME": "/nonexistent", "LANG": "C.UTF-8"}


class InstallError(UnavailableError):
    """The packages that a job's code requires cannot be installed here."""


def shared_versions() -> tuple[str, ...]:
    """`name==version` of what sealed processes load of the worker's packages."""
    found = list[str]()
    for name in SHARED:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name}=={metadata.version(name)}")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Installation:
    """One installation in an empty folder, from its start to its deadline."""

    folder: Path
    settings: PackageSettings
    deadline: float  # of the event loop's clock

    @classmethod
    def begin(cls, folder: Path, settings: PackageSettings) -> Installation:
        """An installation that has `settings.timeout_s` from now."""
        now = asyncio.get_running_loop().time()
        return cls(folder, settings, now + settings.timeout_s)

    async def fetch(
        self, requirements: Sequence[str], *, own: Sequence[LocalWheel], sources: WheelSources
    ) -> tuple[LocalWheel, ...]:
        """Resolve requirements; returns the wheels that they need, in the folder, by name.

        `own`: wheels of the job's code, besides those of `sources`.

        Raises:
            InstallError: they cannot be met, a wheel is refused, or it takes too much time or disk.
        """
        into = self._made("wheels")
        request = FetchRequest(
            requirements=tuple(requirements),
            constraints=(*shared_versions(), *sources.constraints),
            own=tuple(own),
            sources=sources,
            into=into,
            most_bytes=self.settings.most_bytes,
            hold=self._hold(),
        )
        reply = await self._run(
            FETCHER, FETCH.dump_python(request, mode="json"), _environment(os.environ)
        )
        return tuple(sorted(reply.wheels, key=lambda each: (each.path.name, each.digest)))

    async def unpack(self, wheels: Sequence[LocalWheel]) -> Path:
        """Unpack wheels without network or secrets; returns the folder to import from.

        Of files that several have, that of the last wheel stays.

        Raises:
            InstallError: they cannot be unpacked, or it takes too much time or disk.
        """
        into = self._made("site")
        request = UnpackRequest(tuple(wheels), into, self._hold())
        await self._run(UNPACKER, UNPACK.dump_python(request, mode="json"), _SEALED)
        if await asyncio.to_thread(size_of, into) > self.settings.most_bytes:
            raise self._too_much()
        return into

    def _made(self, name: str) -> Path:
        path = (self.folder / name).absolute()
        path.mkdir()
        return path

    def _hold(self) -> Hold:
        return Hold(os.getpid(), self.settings.most_bytes, int(self.settings.timeout_s) + 1)

    def _too_much(self) -> InstallError:
        return InstallError(f"more than {self.settings.most_bytes} bytes of packages")

    async def _run(self, module: str, request: Any, environment: Mapping[str, str]) -> WheelsReply:
        """The answer of a process to its only request, as JSON."""
        log = self.folder / f"{module}.log"
        with log.open("wb") as errors:
            process = await PlainProcess.start(
                (sys.executable, "-I", "-m", module),
                stderr=errors,
                env=dict(environment),
                cwd=self.folder,
            )
        try:
            async with asyncio.timeout_at(self.deadline):
                return REPLY.validate_python((await self._answer(process, request)).fields)
        except TimeoutError:
            raise InstallError(f"not installed within {self.settings.timeout_s:g} s") from None
        except CallError as error:
            raise InstallError(without_credentials(error.message)[:_MOST_CHARS]) from None
        except (EndedError, ValidationError) as error:
            last = _last_line(log) or getattr(error, "how", "") or "an unreadable answer"
            raise InstallError(without_credentials(last)[:_MOST_CHARS]) from None

    async def _answer(self, process: PlainProcess, request: Any) -> Frame:
        """What it answers, unless that or the folder grows too large."""
        asked = call_once(process, HANDLE, {"request": request}, most_bytes=MOST_ANSWER_BYTES)
        answer = asyncio.ensure_future(asked)
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=_LOOK_S)
                # Wheels are there packed and unpacked, and some that were not chosen.
                if await asyncio.to_thread(size_of, self.folder) > 3 * self.settings.most_bytes:
                    raise self._too_much()
            return answer.result()
        finally:
            answer.cancel()  # and with it the process
            await asyncio.wait({answer})


def size_of(folder: Path) -> int:
    """Bytes that files and folders in a folder take; some may vanish meanwhile."""
    total = 0
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            with suppress(OSError):
                size = os.lstat(os.path.join(parent, name)).st_size
                total += max(size, SMALLEST_BYTES)
    return total


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    passed = {
        name: value for name, value in own.items() if name in _PASSED or name.upper() in _PROXIES
    }
    return passed | {"LANG": "C.UTF-8"}


def _last_line(log: Path) -> str:
    """The last line that a process has printed; empty: none."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
