"""Settings of the services of `docker/compose.yaml`, loaded by their own code from its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.config import ServiceSettings
from paceline.config.load import load_settings

COMPOSE = Path(__file__).resolve().parents[4] / "docker" / "compose.yaml"


@cache
def composition() -> dict[str, Any]:
    """The content of the file."""
    return yaml.safe_load(COMPOSE.read_text())


def settings_in_compose(name: str, folder: Path, secrets: Mapping[str, str]) -> ServiceSettings:
    """Settings of a service with the defaults of all variables but these."""
    entry = composition()["services"][name]
    files = {mount["target"]: mount["source"] for mount in entry["configs"]}
    paths: list[Path] = []
    for number, target in enumerate(entry["command"][1:]):
        text = composition()["configs"][files[target]]["content"]
        path = folder / f"{name}-{number}.yaml"
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
        path.write_text(re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: secrets[found[1]], text))
        paths.append(path)
    return load_settings(*paths)
