"""Serves what a run directory has stored, for commands that read it while nothing runs there.

Needs the `local` extra.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from paceline.config import ServiceSettings
from paceline.config.limits import LimitSettings
from paceline.config.load import load
from paceline.config.plugins import PluginSettings
from paceline.config.service import LogSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, UnavailableError
from paceline.front.local.supervisor import Local
from paceline.platform.telemetry import logs

KINDS = (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY)
_STORE = "store"


@contextlib.contextmanager
def served(run_dir: Path) -> Generator[Local]:
    """Serve a copy of the store of a run directory for the duration of the context.

    Nothing in the directory is changed or locked: any number of readers may do this at once, and
    a run may begin meanwhile. The services only read, and no worker is started.

    Raises:
        UnavailableError: the store cannot be copied, or a service does not come up.
        StoreError: the copy cannot be loaded.
    """
    limits, plugins = _settings_of(run_dir)
    with tempfile.TemporaryDirectory(prefix="paceline-read-") as name:
        folder = Path(name)
        try:
            shutil.copytree(
                run_dir / _STORE, folder / _STORE, ignore=shutil.ignore_patterns("socket")
            )
        except (OSError, shutil.Error) as error:
            raise UnavailableError(f"{run_dir / _STORE} cannot be copied: {error}") from None
        logs.setup(LogSettings(path=folder / "logs" / "read.log"))
        options = {WorkerKind.EXPERIENCE: {"read_only": True}}
        with Local(
            folder, http_port=0, options=options, limits=limits, plugins=plugins, kinds=KINDS
        ) as local:
            yield local


def _settings_of(run_dir: Path) -> tuple[LimitSettings | None, PluginSettings | None]:
    """The settings under which its jobs were accepted; None if an older release wrote them."""
    path = run_dir / "settings" / f"{WorkerKind.EXPERIENCE}.yaml"
    with contextlib.suppress(ConfigError):
        settings = load(ServiceSettings, path)
        return settings.limits, settings.plugins
    return None, None
