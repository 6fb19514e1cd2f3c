"""The settings file with which a supervisor starts a service."""

from __future__ import annotations

from pathlib import Path

import yaml

from paceline.config import ServiceSettings
from paceline.platform.files import write_secret


def write_settings(path: Path, settings: ServiceSettings) -> str:
    """Write a file for `load_settings`, readable by the owner alone: it may hold a token."""
    text = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
    write_secret(path, text.rstrip("\n"))
    return text
