"""Callers of services that have keys instead of certificates."""

from pathlib import Path

from paceline.enums import WorkerKind
from paceline.platform.transport.metadata_channel import Metadata
from paceline.platform.transport.service_keys import METADATA_KEY, ServiceKeys


def keys_of(folder: Path) -> ServiceKeys:
    """All keys of the installation whose files `issue` has written to this folder."""
    return ServiceKeys.of_installation((folder / "secret").read_text().strip())


def metadata_of(folder: Path, server: WorkerKind, caller: WorkerKind) -> Metadata:
    """What a service of this kind shows to a kind of server."""
    return ((METADATA_KEY, f"{caller}/{keys_of(folder).credential(server, caller)}"),)
