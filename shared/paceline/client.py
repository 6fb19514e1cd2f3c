"""The SDK: jobs over REST, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from paceline import calls, errors
from paceline.calls import Request, Spec, View
from paceline.config.quota import Quota
from paceline.errors import DeadlineError, PacelineError, UnavailableError
from paceline.rest import (
    AuditLogPage,
    AuditView,
    JobEvent,
    JobPage,
    JobView,
    MetricPage,
    TenantPage,
    TenantView,
    TokenMade,
    TokenPage,
    TokenView,
    TrajectoryPage,
    WeightsView,
)

PAUSE_S = 0.5
# The gateway says something at least every 15 s.
SILENCE_S = 45.0


def read(response: httpx.Response, view: type[View]) -> View:
    """The document in a response.

    Raises:
        PacelineError: the class that the server raised.
    """
    if response.is_success:
        return view.model_validate_json(response.content)
    raise error_of(response.status_code, response.text)


def error_of(status: int, body: str) -> PacelineError:
    """The error of our tree that an answer stands for."""
    try:
        told = json.loads(body)["error"]
        kind, message = str(told["type"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"HTTP {status}: {body[:200]}"
    classes = errors.every_class()
    by_name = {cls.__name__: cls for cls in classes}
    by_status = {cls.http: cls for cls in reversed(classes)}
    return by_name.get(kind, by_status.get(status, PacelineError))(message)


def unreachable(error: httpx.TransportError, url: str) -> PacelineError:
    """The error of our tree for a call that got no answer."""
    if isinstance(error, httpx.ReadTimeout):
        return DeadlineError(f"{url} did not answer in time")
    text = str(error) or type(error).__name__
    return UnavailableError(f"cannot reach {url} ({text}); is the gateway running?")


class EventReader:
    """Server-sent events, line by line; remembers how to resume."""

    def __init__(self) -> None:
        self.last_id = "0"
        self.ended = False
        self._name = ""
        self._data: list[str] = []

    def feed(self, line: str) -> JobEvent | None:
        """The event that this line completes, if any.

        Raises:
            PacelineError: the server says that it lost the job's events.
        """
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self.last_id = value
        elif name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value)
        elif not line:
            return self._finish()
        return None

    def _finish(self) -> JobEvent | None:
        name, data = self._name, "\n".join(self._data)
        self._name, self._data = "", []
        if name == "error":
            raise error_of(500, data)
        if name == "end":
            self.ended = True
        return JobEvent.model_validate_json(data) if data and not name else None


class _Outage:
    """How long nothing could be read; gives up after `most_s`."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None

    def over(self) -> None:
        self._since = None

    def note(self, error: PacelineError) -> None:
        if not isinstance(error, (UnavailableError, DeadlineError)):
            raise error
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._most_s:
            raise error


def _trust(ca: Path | None) -> ssl.SSLContext | bool:
    return ssl.create_default_context(cafile=str(ca)) if ca else True


def _headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _watch_request(job_id: str, reader: EventReader) -> dict[str, Any]:
    return {
        "method": "GET",
        "url": f"/v1/jobs/{job_id}/events",
        "headers": {"last-event-id": reader.last_id},
        "timeout": httpx.Timeout(10.0, read=SILENCE_S),
    }


class Client(AbstractContextManager["Client"]):
    """Jobs of the gateway at `url`.

    `watch` and `wait` outlive `outage_s` seconds without the gateway; all else fails at once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        ca: Path | None = None,
        timeout_s: float = 30.0,
        outage_s: float = 60.0,
    ) -> None:
        self.url = url
        self._outage_s = outage_s
        self._http = httpx.Client(
            base_url=url, headers=_headers(token), timeout=timeout_s, verify=_trust(ca)
        )

    def submit(self, spec: Spec, *, request_id: str = "") -> JobView:
        """Submit a `JobSpec`, a mapping, or a YAML file; the same `request_id`, the same job."""
        return self.send(calls.submit(spec, request_id=request_id))

    def get(self, job_id: str) -> JobView:
        """One job."""
        return self.send(calls.get(job_id))

    def list(self, **params: Any) -> JobPage:
        """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
        return self.send(calls.list_jobs(**params))

    def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Ask a job to end."""
        return self.send(calls.cancel(job_id, reason))

    def metrics(self, job_id: str, **params: Any) -> MetricPage:
        """Metric rows; `after`, `page_size`."""
        return self.send(calls.metrics(job_id, **params))

    def trajectories(self, job_id: str, **params: Any) -> TrajectoryPage:
        """A page of trajectories; `page_size`, `page_token`, `purpose`."""
        return self.send(calls.trajectories(job_id, **params))

    def audit(self, job_id: str) -> AuditView:
        """Check the ledger's identity."""
        return self.send(calls.audit(job_id))

    def weights(self, job_id: str) -> WeightsView:
        """Who has which weights, and from whom."""
        return self.send(calls.weights(job_id))

    def list_tenants(self, *, tenant: str = "") -> TenantPage:
        """Quotas and use of tenants."""
        return self.send(calls.list_tenants(tenant))

    def set_quota(self, tenant: str, quota: Quota | None) -> TenantView:
        """The whole quota of a tenant; None: the default of the installation again."""
        return self.send(calls.set_quota(tenant, quota) if quota else calls.reset_quota(tenant))

    def create_token(
        self,
        name: str,
        *,
        role: str = "submit",
        tenant: str = "",
        expires_in_s: float | None = None,
    ) -> TokenMade:
        """A new token of a tenant (empty: the caller's; `*`: all); told this once."""
        return self.send(calls.create_token(name, role, tenant, expires_in_s))

    def list_tokens(self, *, tenant: str = "") -> TokenPage:
        """Tokens, oldest first."""
        return self.send(calls.list_tokens(tenant))

    def revoke_token(self, token_id: str) -> TokenView:
        """From now on it opens nothing."""
        return self.send(calls.revoke_token(token_id))

    def audit_log(self, **params: Any) -> AuditLogPage:
        """Who changed what, newest first; `before`, `page_size`, `tenant`, `action`."""
        return self.send(calls.audit_log(**params))

    def watch(self, job_id: str) -> Iterator[JobEvent]:
        """The state now and every change until the job ends."""
        reader, outage = EventReader(), _Outage(self._outage_s)
        while not reader.ended:
            try:
                for event in self._events(job_id, reader):
                    outage.over()
                    yield event
            except PacelineError as error:
                outage.note(error)
            if not reader.ended:
                time.sleep(PAUSE_S)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """The job when it has ended; raises `DeadlineError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        outage = _Outage(self._outage_s)
        while True:
            try:
                job = self.get(job_id)
                outage.over()
                if job.status.state.terminal:
                    return job
            except PacelineError as error:
                outage.note(error)
            _check(deadline, job_id)
            time.sleep(PAUSE_S)

    def send(self, request: Request[View]) -> View:
        """Send one call."""
        try:
            response = self._http.request(
                request.method,
                request.path,
                params=request.params,
                headers=request.headers,
                content=request.content,
            )
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None
        return read(response, request.view)

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _events(self, job_id: str, reader: EventReader) -> Iterator[JobEvent]:
        try:
            with self._http.stream(**_watch_request(job_id, reader)) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response.status_code, response.text)
                for line in response.iter_lines():
                    if event := reader.feed(line):
                        yield event
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None


class AsyncClient(AbstractAsyncContextManager["AsyncClient"]):
    """The same as `Client`, asynchronous."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        ca: Path | None = None,
        timeout_s: float = 30.0,
        outage_s: float = 60.0,
    ) -> None:
        self.url = url
        self._outage_s = outage_s
        self._http = httpx.AsyncClient(
            base_url=url, headers=_headers(token), timeout=timeout_s, verify=_trust(ca)
        )

    async def submit(self, spec: Spec, *, request_id: str = "") -> JobView:
        """Submit a `JobSpec`, a mapping, or a YAML file; the same `request_id`, the same job."""
        return await self.send(calls.submit(spec, request_id=request_id))

    async def get(self, job_id: str) -> JobView:
        """One job."""
        return await self.send(calls.get(job_id))

    async def list(self, **params: Any) -> JobPage:
        """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
        return await self.send(calls.list_jobs(**params))

    async def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Ask a job to end."""
        return await self.send(calls.cancel(job_id, reason))

    async def metrics(self, job_id: str, **params: Any) -> MetricPage:
        """Metric rows; `after`, `page_size`."""
        return await self.send(calls.metrics(job_id, **params))

    async def trajectories(self, job_id: str, **params: Any) -> TrajectoryPage:
        """A page of trajectories; `page_size`, `page_token`, `purpose`."""
        return await self.send(calls.trajectories(job_id, **params))

    async def audit(self, job_id: str) -> AuditView:
        """Check the ledger's identity."""
        return await self.send(calls.audit(job_id))

    async def weights(self, job_id: str) -> WeightsView:
        """Who has which weights, and from whom."""
        return await self.send(calls.weights(job_id))

    async def list_tenants(self, *, tenant: str = "") -> TenantPage:
        """Quotas and use of tenants."""
        return await self.send(calls.list_tenants(tenant))

    async def set_quota(self, tenant: str, quota: Quota | None) -> TenantView:
        """The whole quota of a tenant; None: the default of the installation again."""
        return await self.send(
            calls.set_quota(tenant, quota) if quota else calls.reset_quota(tenant)
        )

    async def create_token(
        self,
        name: str,
        *,
        role: str = "submit",
        tenant: str = "",
        expires_in_s: float | None = None,
    ) -> TokenMade:
        """A new token of a tenant (empty: the caller's; `*`: all); told this once."""
        return await self.send(calls.create_token(name, role, tenant, expires_in_s))

    async def list_tokens(self, *, tenant: str = "") -> TokenPage:
        """Tokens, oldest first."""
        return await self.send(calls.list_tokens(tenant))

    async def revoke_token(self, token_id: str) -> TokenView:
        """From now on it opens nothing."""
        return await self.send(calls.revoke_token(token_id))

    async def audit_log(self, **params: Any) -> AuditLogPage:
        """Who changed what, newest first; `before`, `page_size`, `tenant`, `action`."""
        return await self.send(calls.audit_log(**params))

    async def watch(self, job_id: str) -> AsyncIterator[JobEvent]:
        """The state now and every change until the job ends."""
        reader, outage = EventReader(), _Outage(self._outage_s)
        while not reader.ended:
            try:
                async for event in self._events(job_id, reader):
                    outage.over()
                    yield event
            except PacelineError as error:
                outage.note(error)
            if not reader.ended:
                await asyncio.sleep(PAUSE_S)

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """The job when it has ended; raises `DeadlineError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        outage = _Outage(self._outage_s)
        while True:
            try:
                job = await self.get(job_id)
                outage.over()
                if job.status.state.terminal:
                    return job
            except PacelineError as error:
                outage.note(error)
            _check(deadline, job_id)
            await asyncio.sleep(PAUSE_S)

    async def send(self, request: Request[View]) -> View:
        """Send one call."""
        try:
            response = await self._http.request(
                request.method,
                request.path,
                params=request.params,
                headers=request.headers,
                content=request.content,
            )
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None
        return read(response, request.view)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _events(self, job_id: str, reader: EventReader) -> AsyncIterator[JobEvent]:
        try:
            async with self._http.stream(**_watch_request(job_id, reader)) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response.status_code, response.text)
                async for line in response.aiter_lines():
                    if event := reader.feed(line):
                        yield event
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None


def _check(deadline: float | None, job_id: str) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineError(f"job {job_id} has not ended in time")
