"""The highest numbers of a job that were handed out, on a disk that is not the store's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from paceline.errors import UnavailableError
from paceline.files import write_json
from paceline.logs import Log

log = Log("watermarks")


class Watermarks:
    """Numbers that were handed out are never handed out again, whatever the store forgets.

    The store may lose its last second, fail over to a replica that lags, or be put back from a
    backup. So the owner of the job hands a number out only when it is durable here, and makes the
    next one from the higher of what the store and this say. Without a path they last as long as
    this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises `UnavailableError` if what is there cannot be read."""
        self._path = path
        self._highest: dict[str, int] = {}
        if path is not None:
            self._highest = _read(path)

    def highest(self, name: str) -> int:
        """Of the numbers of this name that were handed out; -1: none was."""
        return self._highest.get(name, -1)

    async def reach(self, name: str, number: int) -> None:
        """Durable when this returns: `number` and all below it are never handed out again.

        Raises:
            UnavailableError: it cannot be written; the number must not be handed out.
        """
        if number <= self.highest(name):
            return
        content = {**self._highest, name: number}
        if self._path is not None:
            try:
                await asyncio.to_thread(write_json, self._path, content, durable=True)
            except OSError as error:
                log.error("cannot keep what was handed out", number=name, error=error)
                raise UnavailableError(f"{name} {number} cannot be handed out: {error}") from error
        self._highest = content


def _read(path: Path) -> dict[str, int]:
    try:
        return {name: int(n) for name, n in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{path}: cannot be read: {error}; without it numbers could be handed out twice"
        ) from error
