"""Event logs: a short message and key=value pairs, rotated by size."""

from __future__ import annotations

import logging
import re
import sys
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from typing import Any

from paceline.config.service import LogSettings
from paceline.platform.text import visible

_TIME = re.compile(r"\d{4}-\d\d-\d\dT")  # how every event begins

trace: ContextVar[int] = ContextVar("trace", default=0)
"""Trace id of the current work, added to its events."""


class EventFormatter(logging.Formatter):
    """`2026-11-21T05:00:00.123Z INFO reward scored job=a episode=b`."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """One event on one line, a traceback below it.

        Names and texts of users, and what code of theirs has raised, can neither act on a terminal
        nor pass for another event: below an event, a line that begins like one is indented.
        """
        head = f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"
        pairs: dict[str, Any] = getattr(record, "event", {})
        if trace_id := trace.get():
            pairs = {**pairs, "trace": f"{trace_id:032x}"}
        line = " ".join([head, *(f"{key}={_quote(value)}" for key, value in pairs.items())])
        line = visible(line).replace("\n", "␊")
        if not record.exc_info:
            return line
        below = visible(self.formatException(record.exc_info)).split("\n")
        return "\n".join(
            (line, *(f"  {lower}" if _TIME.match(lower) else lower for lower in below))
        )


class Log:
    """`log.info("scored", job=job_id, episode=episode_id)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, message: str, **event: Any) -> None:
        """Log details for debugging a single process."""
        self._logger.debug(message, extra={"event": event})

    def info(self, message: str, **event: Any) -> None:
        """Log a change of state."""
        self._logger.info(message, extra={"event": event})

    def warning(self, message: str, **event: Any) -> None:
        """Log that something was lost, retried or refused."""
        self._logger.warning(message, extra={"event": event})

    def error(self, message: str, **event: Any) -> None:
        """Log a problem that needs attention."""
        self._logger.error(message, extra={"event": event})

    def exception(self, message: str, *, of: BaseException | None = None, **event: Any) -> None:
        """Log an error with its traceback: the one being handled, or `of`."""
        self._logger.error(message, exc_info=of or True, extra={"event": event})


def setup(settings: LogSettings) -> None:
    """Configure the logging of this process."""
    handler: logging.Handler
    if settings.path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        settings.path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(
            settings.path, maxBytes=settings.max_bytes, backupCount=settings.backups
        )
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=settings.level, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _quote(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = bool(text) and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else repr(text)
