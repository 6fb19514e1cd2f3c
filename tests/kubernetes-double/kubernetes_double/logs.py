"""Events of the nodes as lines of text, and the ends of log files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any


class EventFormatter(logging.Formatter):
    """`2026-11-21T05:00:00.123Z INFO cluster.pod not removed pod='web-0'`."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """One event on one line, a traceback below it."""
        pairs: dict[str, Any] = getattr(record, "event", {})
        head = f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"
        line = " ".join([head, *(f"{key}={value!r}" for key, value in pairs.items())])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Log:
    """`log.info("not ready", container=name)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, message: str, **event: Any) -> None:
        """Log a change of state."""
        self._logger.info(message, extra={"event": event})

    def warning(self, message: str, **event: Any) -> None:
        """Log that something failed and is repeated or given up."""
        self._logger.warning(message, extra={"event": event})

    def error(self, message: str, **event: Any) -> None:
        """Log a problem that needs attention."""
        self._logger.error(message, extra={"event": event})

    def exception(self, message: str, **event: Any) -> None:
        """Log the error that is being handled, with its traceback."""
        self._logger.exception(message, extra={"event": event})


def tail(path: Path, *, num_bytes: int) -> str:
    """The last bytes of a file as text."""
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - num_bytes))
        return handle.read().decode(errors="replace")
