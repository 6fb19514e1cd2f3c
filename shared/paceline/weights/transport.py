"""The seam between those who make and use weights, and the way on which bytes travel.

A trainer publishes, a rollout worker receives, and neither knows how: see docs/weights.md. A
transport is an entry point in `paceline.weight_transports`; `paceline.testing.weight_transports`
has its contract.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.config.service import TlsSettings
from paceline.errors import ConfigError, InvalidError
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import registry
from paceline.weights.route import Route, TransferProgress, TransferReport
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging

KIND = "weight_transports"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """What the transport of one process is created with."""

    host: str
    """Address to listen on."""
    port: int = 0
    """0: any free one."""
    advertise_host: str = ""
    """Address in the endpoint that peers are told; `host` if empty."""
    metrics: Metrics | None = None
    tls: TlsSettings | None = None
    bytes_per_s: float = 0.0
    """Cap for what is sent to all peers together, and another for what is received; 0: none."""
    keep_streaming: bool = False
    """Keep the oldest version that is still being sent, for peers much slower than publications."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""


class WeightReceiver(Protocol):
    """Keeps one worker at the newest version of a job's weights, following assigned routes."""

    @property
    def wanted(self) -> int:
        """The newest version that a route leads to; -1: none yet."""
        ...

    @property
    def latest(self) -> int:
        """The newest version that is complete; -1: none yet."""
        ...

    def route(self, route: Route) -> bool:
        """Follow a new route, unless it leads to an older version than the current one.

        False: another publication is held under this version; it is dropped and fetched again.
        """
        ...

    def held(self, version: int) -> Staging | None:
        """The snapshot of a version, complete or partial; None if not held."""
        ...

    def refetch(self, version: int) -> None:
        """Fetch the newest complete version again, as what is held of it proved unusable."""
        ...

    def progress(self) -> list[TransferProgress]:
        """Progress of each version held, with the sources of the one in progress."""
        ...

    async def run(self) -> None:
        """Follow the routes until cancelled or closed."""
        ...

    async def close(self) -> None:
        """Stop `run`; a transfer in progress is abandoned."""
        ...


class WeightTransport(Protocol):
    """How one process publishes, offers, receives and verifies versions of weights.

    A snapshot is handed to anybody only with every chunk verified against its digest, which is
    keyed with the key of the job, and never changes after that.
    """

    async def start(self) -> str:
        """Be reachable; returns the endpoint for the roster.

        Raises:
            UnavailableError: the port is taken.
            ConfigError: this machine cannot do it, or a file of `tls` is missing or invalid.
        """
        ...

    def publish(
        self,
        header: SnapshotHeader,
        *,
        key: bytes = b"",
        part: int = 0,
        parts: int = 1,
        keep: int = -1,
    ) -> Staging:
        """Memory to fill with a version, which peers may receive while it is being filled.

        Only the chunks with `index % parts == part` are served. Of the job's other versions the
        newest complete one and `keep` stay. Raises `StateError` when out of memory.
        """
        ...

    def offer(self, staging: Staging, *, keep: int = -1) -> None:
        """Serve a snapshot at hand; the two newest versions of the job and `keep` stay."""
        ...

    def receive(
        self,
        *,
        job_id: str,
        worker_id: str,
        report: Callable[[TransferReport], None],
        complete: Callable[[Staging], None],
        keep: Callable[[], int] = lambda: -1,
    ) -> WeightReceiver:
        """What follows the routes of one worker, and offers to peers what it receives.

        `complete` is called in the event loop with each finished version, in ascending order (once
        more after `refetch`); `report` with what each peer sent. Neither may block. `keep` returns
        a version to hold in place of a newer complete one, which proved unusable; -1: none.
        """
        ...

    async def header(
        self, endpoint: str, *, job_id: str, version: int, key: bytes, timeout_s: float
    ) -> SnapshotHeader:
        """The header of a version that another process publishes, for one that has the bytes too.

        Raises:
            IntegrityError: it is not authenticated with the key, or belongs to another version.
            UnavailableError: no header arrived within `timeout_s`.
        """
        ...

    def verify(self, staging: Staging) -> None:
        """Check the bytes of a complete snapshot once more, in any thread.

        Raises:
            IntegrityError: they are no longer those that arrived.
        """
        ...

    def reuse(self, buffers: int) -> None:
        """Expect so many snapshots in use at once; the memory of so many may be kept for others."""
        ...

    def progress(self) -> list[TransferProgress]:
        """Progress of each version held."""
        ...

    async def close(self) -> None:
        """Stop serving; open streams are aborted."""
        ...


TransportFactory = Callable[[TransportSettings], WeightTransport]
"""The target of an entry point in `paceline.weight_transports`."""


def make_transport(name: str, settings: TransportSettings) -> WeightTransport:
    """The transport of this name. Raises `ConfigError`: no such one is installed."""
    try:
        factory: TransportFactory = registry.find(KIND, name)
    except InvalidError as error:
        raise ConfigError(f"options.weights_transport: {error}") from error
    return factory(settings)
