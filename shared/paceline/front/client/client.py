"""The SDK: jobs over REST, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx

from paceline import errors
from paceline.errors import DeadlineError, PacelineError, PendingError, UnavailableError
from paceline.front.api.documents import CodeView, JobEvent, JobView, MetricPage, MetricRow
from paceline.front.client import calls
from paceline.front.client.calls import Archive, RestCall, Spec, View
from paceline.front.client.operations import AsyncOperations, Operations
from paceline.platform.proxies import httpx_options, proxy_note

POLL_S = 0.5
ROWS = 5000  # of a page of metrics, at most
# The gateway sends a keepalive at least every 15 s.
READ_TIMEOUT_S = 45.0


def read(response: httpx.Response, view: type[View]) -> View:
    """The document in a response.

    Raises:
        PacelineError: the class that the server raised.
    """
    if response.is_success:
        return view.model_validate_json(response.content)
    raise error_of(response.status_code, response.text)


def error_of(status: int, body: str) -> PacelineError:
    """The `PacelineError` for an HTTP error response."""
    try:
        detail = json.loads(body)["error"]
        kind, message = str(detail["type"]), str(detail["message"])
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"HTTP {status}: {body[:200]}"
    classes = errors.every_class()
    by_name = {cls.__name__: cls for cls in classes}
    by_status = {cls.http: cls for cls in reversed(classes)}
    return by_name.get(kind, by_status.get(status, PacelineError))(message)


def unreachable(error: httpx.TransportError, url: str) -> PacelineError:
    """The `PacelineError` for a call that got no response."""
    if isinstance(error, httpx.ReadTimeout):
        return DeadlineError(f"{url} did not answer in time")
    text = str(error) or type(error).__name__
    via = proxy_note(url)
    return UnavailableError(f"cannot reach {url}{via} ({text}); is the gateway running?")


class EventReader:
    """Parses server-sent events line by line; keeps the last id to resume from."""

    def __init__(self) -> None:
        self.last_id = "0"
        self.ended = False
        self._name = ""
        self._data: list[str] = []

    def feed(self, line: str) -> JobEvent | None:
        """The event that this line completes, if any.

        Raises:
            PacelineError: the server reports an error in the stream.
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
    """Tracks how long the gateway has been unreachable; gives up after `max_s`."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._since: float | None = None

    def end(self) -> None:
        self._since = None

    def record(self, error: PacelineError) -> None:
        if not isinstance(error, (UnavailableError, DeadlineError)):
            raise error
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._max_s:
            raise error


class _PendingOutage(_Outage):
    """Lets a request be repeated that goes on, through outages too once that is known."""

    def __init__(self, max_s: float) -> None:
        super().__init__(max_s)
        self._told = False

    def record(self, error: PacelineError) -> None:
        if isinstance(error, PendingError):
            self._told = True
            self.end()
        elif self._told:
            super().record(error)
        else:
            raise error


def _headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _watch_request(job_id: str, reader: EventReader) -> dict[str, Any]:
    return {
        "method": "GET",
        "url": f"/v1/jobs/{job_id}/events",
        "headers": {"last-event-id": reader.last_id},
        "timeout": httpx.Timeout(10.0, read=READ_TIMEOUT_S),
    }


class Client(Operations, AbstractContextManager["Client"]):
    """Jobs of the gateway at `url`.

    `watch` and `wait` tolerate `outage_s` seconds without the gateway; other calls fail at once.
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
            base_url=url,
            headers=_headers(token),
            timeout=timeout_s,
            **httpx_options(url, authorities=ca),
        )

    def submit(self, spec: Spec, *, request_id: str = "", data: Path | None = None) -> JobView:
        """Submit a `JobSpec`, a mapping, or a YAML file; idempotent by `request_id`.

        Code in a folder `code.path`, and data in a file or folder `data.path`, are packed and
        uploaded first; `data` stands for the latter. A fork may take long: its request is repeated
        until the checkpoint is copied.
        """
        spec = self.send_files(spec, data=data)
        request, pending = calls.submit(spec, request_id=request_id), _PendingOutage(self._outage_s)
        while True:
            try:
                return self.send(request)
            except PacelineError as error:
                pending.record(error)
            time.sleep(POLL_S)

    def send_files(self, spec: Spec, *, data: Path | None = None) -> Spec:
        """Pack and upload code and data of a job, as `submit`; returns it with their digests."""
        with ExitStack() as held:
            spec, archives = calls.with_uploads(spec, held, data=data)
            for archive in archives:
                self.upload(archive)
        return spec

    def upload(self, archive: Archive) -> CodeView:
        """Upload packed code or data; again while the connection breaks, for `outage_s` seconds."""
        outage = _Outage(self._outage_s)
        while True:
            try:
                return self.send(calls.upload(archive))
            except PacelineError as error:
                outage.record(error)
            time.sleep(POLL_S)

    def watch(self, job_id: str) -> Iterator[JobEvent]:
        """The current state, then every change until the job ends."""
        reader, outage = EventReader(), _Outage(self._outage_s)
        while not reader.ended:
            try:
                for event in self._events(job_id, reader):
                    outage.end()
                    yield event
            except PacelineError as error:
                outage.record(error)
            if not reader.ended:
                time.sleep(POLL_S)

    def history(self, job_id: str) -> MetricPage:
        """All metric rows of a job so far."""
        rows: list[MetricRow] = []
        while True:
            page = self.list_metrics(job_id, after=len(rows), page_size=ROWS)
            rows += page.rows
            if not page.next:
                return MetricPage(rows=rows, next=0)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """Wait until the job has ended; raises `DeadlineError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        outage = _Outage(self._outage_s)
        while True:
            try:
                job = self.get(job_id)
                outage.end()
                if job.status.state.terminal:
                    return job
            except PacelineError as error:
                outage.record(error)
            _check(deadline, job_id)
            time.sleep(POLL_S)

    def send(self, request: RestCall[View]) -> View:
        """Send one call."""
        try:
            response = self._http.request(**request.arguments())
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None
        return read(response, request.view)

    def close(self) -> None:
        """Close the connections."""
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


class AsyncClient(AsyncOperations, AbstractAsyncContextManager["AsyncClient"]):
    """Asynchronous version of `Client`."""

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
            base_url=url,
            headers=_headers(token),
            timeout=timeout_s,
            **httpx_options(url, authorities=ca),
        )

    async def submit(
        self, spec: Spec, *, request_id: str = "", data: Path | None = None
    ) -> JobView:
        """Submit a `JobSpec`, a mapping, or a YAML file; idempotent by `request_id`.

        Code in a folder `code.path`, and data in a file or folder `data.path`, are packed and
        uploaded first; `data` stands for the latter. A fork may take long: its request is repeated
        until the checkpoint is copied.
        """
        spec = await self.send_files(spec, data=data)
        request, pending = calls.submit(spec, request_id=request_id), _PendingOutage(self._outage_s)
        while True:
            try:
                return await self.send(request)
            except PacelineError as error:
                pending.record(error)
            await asyncio.sleep(POLL_S)

    async def send_files(self, spec: Spec, *, data: Path | None = None) -> Spec:
        """Pack and upload code and data of a job, as `submit`; returns it with their digests."""
        with ExitStack() as held:
            spec, archives = await asyncio.to_thread(calls.with_uploads, spec, held, data=data)
            for archive in archives:
                await self.upload(archive)
        return spec

    async def upload(self, archive: Archive) -> CodeView:
        """Upload packed code or data; again while the connection breaks, for `outage_s` seconds."""
        outage = _Outage(self._outage_s)
        while True:
            try:
                return await self.send(calls.upload(archive))
            except PacelineError as error:
                outage.record(error)
            await asyncio.sleep(POLL_S)

    async def watch(self, job_id: str) -> AsyncIterator[JobEvent]:
        """The current state, then every change until the job ends."""
        reader, outage = EventReader(), _Outage(self._outage_s)
        while not reader.ended:
            try:
                async for event in self._events(job_id, reader):
                    outage.end()
                    yield event
            except PacelineError as error:
                outage.record(error)
            if not reader.ended:
                await asyncio.sleep(POLL_S)

    async def history(self, job_id: str) -> MetricPage:
        """All metric rows of a job so far."""
        rows: list[MetricRow] = []
        while True:
            page = await self.list_metrics(job_id, after=len(rows), page_size=ROWS)
            rows += page.rows
            if not page.next:
                return MetricPage(rows=rows, next=0)

    async def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """Wait until the job has ended; raises `DeadlineError` after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        outage = _Outage(self._outage_s)
        while True:
            try:
                job = await self.get(job_id)
                outage.end()
                if job.status.state.terminal:
                    return job
            except PacelineError as error:
                outage.record(error)
            _check(deadline, job_id)
            await asyncio.sleep(POLL_S)

    async def send(self, request: RestCall[View]) -> View:
        """Send one call."""
        try:
            response = await self._http.request(**request.arguments(in_loop=True))
        except httpx.TransportError as error:
            raise unreachable(error, self.url) from None
        return read(response, request.view)

    async def close(self) -> None:
        """Close the connections."""
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
