"""Outside servers that jobs may use, as an operator names them: judges, and models to measure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from paceline.errors import UnavailableError
from paceline.plugins import StrictModel

_URL = re.compile(r"https?://[^/\s@?#]+(/[^\s?#]*)?")


def _host(url: str) -> str | None:
    """The host of a URL; None: it has none, or a wrong port."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.port != 0 else None
    except ValueError:
        return None


class EndpointSettings(StrictModel):
    """A server; its address and key are the operator's, so that no job file has them."""

    base_url: str
    """`http://` or `https://`, a host and a path up to what comes before `/chat/completions`, e.g. `https://api.openai.com/v1`."""
    key_file: Path | None = None
    """File with the API key, such as a mounted Secret; it is read for each request."""
    key_env: str = Field(default="", pattern=r"^([A-Za-z_]\w*)?$")
    """Or an environment variable of the workers that has it."""
    concurrency: int = Field(default=64, ge=1)
    """Requests that each worker has open at a time, which its jobs share evenly."""
    timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """Silence after which a request is given up and made again."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not _URL.fullmatch(value) or not _host(value):
            raise ValueError(
                "has to be http:// or https://, a host, perhaps a port and a path, such as "
                "http://127.0.0.1:8000/v1; keys belong into key_file or key_env"
            )
        if value.rstrip("/").endswith("/chat/completions"):
            raise ValueError("is what comes before /chat/completions")
        return value

    def key(self) -> str:
        """The API key; empty: none is needed.

        Raises:
            UnavailableError: it is not where it should be.
        """
        key = self._read() if self.key_file is not None else os.environ.get(self.key_env, "")
        if self.key_env and not key:
            raise UnavailableError(f"key_env: {self.key_env} is not set in the worker")
        # The client's error would quote a value that no header can have.
        if not key.isascii() or not key.isprintable():
            raise UnavailableError("the key of the endpoint has characters that no header may have")
        return key

    def _read(self) -> str:
        assert self.key_file is not None
        try:
            return self.key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "not text"
            raise UnavailableError(f"key_file: {self.key_file}: {what}") from None
