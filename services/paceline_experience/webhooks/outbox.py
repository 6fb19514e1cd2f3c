"""Which ends of jobs webhooks have not accepted yet. At least once, with a fixed id."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from paceline.config import JobSpec
from paceline.config.lifecycle.webhooks import WebhookSettings
from paceline.errors import InvalidError, PermissionDeniedError
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s
from paceline_experience.store.store import Store
from paceline_experience.webhooks.notice import NOTICES, Notice, parse_notice
from paceline_experience.webhooks.sender import WebhookSender, check_url, secret_of

log = Log("webhooks")
# At a time, so that slow receivers of one tenant do not keep those of others waiting.
_AT_A_TIME, _OF_TENANT = 32, 4
_WAIT_S = 1.0


class Webhooks:
    """Sends a notice for each job that has ended, until its receiver accepts it or time is up."""

    def __init__(
        self,
        *,
        store: Store,
        settings: WebhookSettings,
        sender: WebhookSender,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._settings = settings
        self._sender = sender
        self._clock = clock
        self._slots = FairQueue(_AT_A_TIME, most_of_tenant=_OF_TENANT)
        self._sending: dict[str, asyncio.Task[None]] = {}

    def check(self, spec: JobSpec) -> None:
        """Check a job before it is accepted.

        Raises:
            PermissionDeniedError: the installation does not allow the host.
            InvalidError: the URL or the secret is invalid.
        """
        if spec.notify is None:
            return
        check_url(spec.notify.webhook, self._settings.origins)
        if spec.notify.secret:
            secret_of(self._settings.secrets, spec.tenant, spec.notify.secret)

    async def sweep(self) -> None:
        """Send what is due; call it every second or so. What takes longer goes on meanwhile."""
        found: dict[bytes, bytes] = (await self._store.hashes(NOTICES))[0]
        now = self._clock()
        for name, text in found.items():
            job_id = name.decode()
            if job_id in self._sending:
                continue
            try:
                notice = parse_notice(text)
            except InvalidError as error:
                log.error("webhook given up", job=job_id, error=error)
                await self._store.command("HDEL", NOTICES, job_id)
                continue
            if notice.due <= now:
                self._sending[job_id] = asyncio.create_task(self._try_in_turn(notice))
                self._sending[job_id].add_done_callback(
                    lambda _, job_id=job_id: self._sending.pop(job_id, None)
                )
        if self._sending:
            await asyncio.wait([*self._sending.values()], timeout=_WAIT_S)

    async def close(self) -> None:
        """Stop sending; the next process sends the rest."""
        tasks = [*self._sending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _try_in_turn(self, notice: Notice) -> None:
        try:
            async with self._slots.slot(QueueOwner(notice.tenant, notice.job_id)):
                await self._try(notice)
        except Exception:  # the supervisor boundary of this notice; the next sweep tries again
            log.exception("webhook not tried", job=notice.job_id)

    async def _try(self, notice: Notice) -> None:
        job_id = notice.job_id
        try:
            await self._send(notice)
        except PermissionDeniedError as error:
            log.error("webhook refused", job=job_id, error=error)
        except Exception as error:  # the supervisor boundary of an attempt: it was not accepted
            if (later := self._later(notice)) is not None:
                log.warning("webhook not reached", job=job_id, error=error, attempt=later.attempt)
                await self._store.command("HSET", NOTICES, job_id, later.to_json())
                return
            log.error("webhook given up", job=job_id, error=error, attempts=notice.attempt + 1)
        else:
            log.info("webhook told", job=job_id)
        await self._store.command("HDEL", NOTICES, job_id)

    def _later(self, notice: Notice) -> Notice | None:
        """The notice as it is to be tried again; None: time is up."""
        wait_s = backoff_s(notice.attempt + 1, base_s=1.0, max_s=self._settings.max_backoff_s)
        later = notice.failed(self._clock(), wait_s)
        return later if later.due - later.first < self._settings.give_up_s else None

    async def _send(self, notice: Notice) -> None:
        secret = None
        if notice.secret:
            secret = secret_of(self._settings.secrets, notice.tenant, notice.secret)
        await self._sender.send(
            notice.url,
            json.dumps(notice.content).encode(),
            notice_id=notice.notice_id,
            timestamp=int(self._clock()),
            secret=secret,
        )
