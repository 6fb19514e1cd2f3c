"""Settings of the installation for webhooks of jobs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from paceline.plugins import StrictModel


class WebhookSettings(StrictModel):
    """Which webhooks of jobs are told when these end."""

    origins: tuple[str, ...] = ()
    """Allowed ones: `https://hooks.example.com`, `https://*.example.com` (public addresses only),
    `http://ci.internal:8080`. None by default."""
    secrets: Path | None = None
    """Folder with the secrets of tenants: `<tenant>/<name>`."""
    timeout_s: float = Field(default=10.0, gt=0, le=60)
    """Timeout of one attempt."""
    max_backoff_s: float = Field(default=600.0, gt=0)
    give_up_s: float = Field(default=86_400.0, gt=0)
    """After so long without an answer of success, nobody tries any more."""
