"""The highest numbers that were assigned in a job, on another disk than the store's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from paceline.errors import UnavailableError
from paceline.platform.files import write_json
from paceline.platform.telemetry.logs import Log

log = Log("watermarks")


class Watermarks:
    """Ensures that no number is assigned twice, whatever the store loses.

    The store may lose its last second, fail over to a lagging replica, or be restored from a
    backup. So the owner of the job assigns a number only when it is durable here, and the next one
    is above both this watermark and the store's value. Without a path watermarks last as long as
    this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises `UnavailableError` if the file cannot be read."""
        self._path = path
        self._highest: dict[str, int] = {}
        if path is not None:
            self._highest = _read(path)

    def highest(self, name: str) -> int:
        """The highest assigned number of this name; -1: none."""
        return self._highest.get(name, -1)

    async def reach(self, name: str, number: int) -> None:
        """Make `number` durable: it and all below are never assigned again.

        Raises:
            UnavailableError: it cannot be written; the number must not be used.
        """
        if number <= self.highest(name):
            return
        content = {**self._highest, name: number}
        if self._path is not None:
            try:
                await asyncio.to_thread(write_json, self._path, content, durable=True)
            except OSError as error:
                log.error("cannot write the watermark", number=name, error=error)
                raise UnavailableError(f"{name} {number} cannot be assigned: {error}") from error
        self._highest = content


def _read(path: Path) -> dict[str, int]:
    try:
        return {name: int(n) for name, n in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{path}: cannot be read: {error}; without it numbers could be assigned twice"
        ) from error
