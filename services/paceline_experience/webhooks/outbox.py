"""Which jobs have a webhook that has not heard of their end yet. At least once, with a fixed id."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from paceline.config import JobSpec
from paceline.config.lifecycle.webhooks import WebhookSettings
from paceline.errors import NotFoundError, PacelineError, PermissionDeniedError
from paceline.telemetry.logs import Log
from paceline.transport.rpc import backoff_s
from paceline.types import Job
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.registry import WEBHOOKS
from paceline_experience.store.store import Store
from paceline_experience.webhooks.sender import WebhookSender, check_url, secret_of

log = Log("webhooks")
_AT_ONCE = 20  # of one sweep, as a slow receiver must not keep all others waiting for long


class Webhooks:
    """Sends a notice for each job that has ended, until its receiver accepts it or time is up."""

    def __init__(
        self,
        *,
        store: Store,
        jobs: JobStore,
        settings: WebhookSettings,
        sender: WebhookSender | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._settings = settings
        self._sender = sender or WebhookSender(
            origins=settings.origins, timeout_s=settings.timeout_s
        )
        self._clock = clock

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
        """Send what is due; call it every second or so."""
        found: dict[bytes, bytes] = (await self._store.hashes(WEBHOOKS))[0]
        now, left = self._clock(), _AT_ONCE
        for name, text in found.items():
            progress: dict[str, Any] = json.loads(text)
            if progress["due"] > now or not left:
                continue
            try:
                job = await self._jobs.get(name.decode())
            except NotFoundError:
                await self._store.command("HDEL", WEBHOOKS, name)
                continue
            if job.status.state.terminal:
                left -= 1
                await self._try(job, progress, now)

    async def _try(self, job: Job, progress: dict[str, Any], now: float) -> None:
        job_id = job.status.job_id
        first = progress["first"] or now
        try:
            await self._send(job, first)
        except PermissionDeniedError as error:
            log.error("webhook refused", job=job_id, error=error)
        except PacelineError as error:
            attempt = progress["attempt"] + 1
            wait_s = backoff_s(attempt, base_s=1.0, max_s=self._settings.max_backoff_s)
            if now + wait_s - first < self._settings.give_up_s:
                log.warning("webhook not reached", job=job_id, error=error, attempt=attempt)
                later = {"first": first, "attempt": attempt, "due": now + wait_s}
                await self._store.command("HSET", WEBHOOKS, job_id, json.dumps(later))
                return
            log.error("webhook given up", job=job_id, error=error, attempts=attempt)
        else:
            log.info("webhook told", job=job_id)
        await self._store.command("HDEL", WEBHOOKS, job_id)

    async def _send(self, job: Job, first: float) -> None:
        notify = JobSpec.model_validate_json(job.spec).notify
        if notify is None:
            return
        status = job.status
        notice_id = f"{status.job_id}.ended"
        content = {
            "type": "job.ended",
            "id": notice_id,
            "job_id": status.job_id,
            "name": status.name,
            "tenant": status.tenant,
            "state": status.state,
            "reason": status.reason,
            "step": status.step,
            "eval_reward": status.eval_reward,
            "finished_at": status.finished_at,
        }
        secret = None
        if notify.secret:
            secret = secret_of(self._settings.secrets, status.tenant, notify.secret)
        await self._sender.send(
            notify.webhook,
            json.dumps(content).encode(),
            notice_id=notice_id,
            timestamp=int(self._clock()),
            secret=secret,
        )
