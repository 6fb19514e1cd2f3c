"""Weights in shared memory, for processes of one machine and user; over HTTP to all others."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ConfigError, PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.weights.route import Route, TransferReport
from paceline.weights.shared_memory.lender import MemoryLender
from paceline.weights.shared_memory.mapped_transfer import MappedTransfer
from paceline.weights.snapshot.memory import lack_of_sealed_memory
from paceline.weights.transfer.http_transport import HttpTransport
from paceline.weights.transfer.version_receiver import Landing, Shortcut
from paceline.weights.transfer.version_transfer import Transfer
from paceline.weights.transport import TransportSettings

log = Log("weights")


class SharedMemoryTransport(HttpTransport):
    """Lends the memory of versions on this machine, and serves them over HTTP to everybody else."""

    def __init__(self, settings: TransportSettings) -> None:
        super().__init__(settings)
        self._lender = MemoryLender(self.server, metrics=settings.metrics)

    async def start(self) -> str:
        """Serve HTTP, and lend memory; returns the endpoint for peers.

        Raises:
            ConfigError: this system has no memory that can be lent.
            UnavailableError: the port, or the address at which memory is lent, is taken.
        """
        if problem := lack_of_sealed_memory():
            raise ConfigError(f"options.weights_transport: shared_memory: {problem}; use http")
        endpoint = await super().start()
        try:
            await self._lender.start(endpoint)
        except BaseException:
            await super().close()
            raise
        return endpoint

    async def close(self) -> None:
        """Stop lending and serving."""
        await self._lender.close()
        await super().close()

    def _shortcut(
        self, job_id: str, worker_id: str, report: Callable[[TransferReport], None]
    ) -> Shortcut:
        """Maps what peers lend."""

        def map_first(http: Transfer, route: Route, landing: Landing) -> MappedTransfer:
            return MappedTransfer(
                http,
                route,
                landing,
                job_id=job_id,
                worker_id=worker_id,
                report=report,
                metrics=self._settings.metrics,
            )

        return map_first


class AutomaticTransport(SharedMemoryTransport):
    """Lends memory if it can; if not, says why, and only serves HTTP."""

    async def start(self) -> str:
        """Serve HTTP; returns the endpoint for peers."""
        problem, endpoint = lack_of_sealed_memory(), await HttpTransport.start(self)
        if not problem:
            try:
                await self._lender.start(endpoint)
            except PacelineError as error:
                problem = str(error)
        if problem:
            log.warning("weights are served over HTTP only", why=problem)
        return endpoint
