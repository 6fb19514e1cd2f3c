"""The SDK: jobs over REST, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel

from paceline import errors
from paceline.config import JobSpec
from paceline.errors import DeadlineError, PacelineError, UnavailableError
from paceline.rest import (
    AuditView,
    JobEvent,
    JobPage,
    JobView,
    MetricPage,
    TrajectoryPage,
    WeightsView,
)

View = TypeVar("View", bound=BaseModel)
Spec = JobSpec | Mapping[str, Any] | Path | str
PAUSE_S = 0.5
# The gateway says something at least every 15 s.
SILENCE_S = 45.0


@dataclass(frozen=True, slots=True)
class Request(Generic[View]):
    """One call, independent of who sends it."""

    method: str
    path: str
    view: type[View]
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    content: str | None = None


def submit(spec: Spec, *, request_id: str = "") -> Request[JobView]:
    """Submit a `JobSpec`, a mapping, or a YAML file by its path."""
    media = "application/json"
    if isinstance(spec, (str, Path)):
        content, media = Path(spec).read_text(), "application/yaml"
    elif isinstance(spec, JobSpec):
        content = spec.model_dump_json()
    else:
        content = json.dumps(dict(spec))
    key = request_id or uuid.uuid4().hex
    headers = {"content-type": media, "idempotency-key": key}
    return Request("POST", "/v1/jobs", JobView, headers=headers, content=content)


def get(job_id: str) -> Request[JobView]:
    """One job."""
    return Request("GET", f"/v1/jobs/{job_id}", JobView)


def list_jobs(**params: Any) -> Request[JobPage]:
    """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
    return Request("GET", "/v1/jobs", JobPage, params=params)


def cancel(job_id: str, reason: str) -> Request[JobView]:
    """Ask a job to end."""
    return Request("POST", f"/v1/jobs/{job_id}/cancel", JobView, params={"reason": reason})


def metrics(job_id: str, **params: Any) -> Request[MetricPage]:
    """Metric rows; `after`, `page_size`."""
    return Request("GET", f"/v1/jobs/{job_id}/metrics", MetricPage, params=params)


def trajectories(job_id: str, **params: Any) -> Request[TrajectoryPage]:
    """A page of trajectories; `page_size`, `page_token`, `purpose`."""
    return Request("GET", f"/v1/jobs/{job_id}/trajectories", TrajectoryPage, params=params)


def audit(job_id: str) -> Request[AuditView]:
    """Check the ledger's identity."""
    return Request("GET", f"/v1/jobs/{job_id}/audit", AuditView)


def weights(job_id: str) -> Request[WeightsView]:
    """Who has which weights, and from whom."""
    return Request("GET", f"/v1/jobs/{job_id}/weights", WeightsView)


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
        return self.send(submit(spec, request_id=request_id))

    def get(self, job_id: str) -> JobView:
        """One job."""
        return self.send(get(job_id))

    def list(self, **params: Any) -> JobPage:
        """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
        return self.send(list_jobs(**params))

    def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Ask a job to end."""
        return self.send(cancel(job_id, reason))

    def metrics(self, job_id: str, **params: Any) -> MetricPage:
        """Metric rows; `after`, `page_size`."""
        return self.send(metrics(job_id, **params))

    def trajectories(self, job_id: str, **params: Any) -> TrajectoryPage:
        """A page of trajectories; `page_size`, `page_token`, `purpose`."""
        return self.send(trajectories(job_id, **params))

    def audit(self, job_id: str) -> AuditView:
        """Check the ledger's identity."""
        return self.send(audit(job_id))

    def weights(self, job_id: str) -> WeightsView:
        """Who has which weights, and from whom."""
        return self.send(weights(job_id))

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
        return await self.send(submit(spec, request_id=request_id))

    async def get(self, job_id: str) -> JobView:
        """One job."""
        return await self.send(get(job_id))

    async def list(self, **params: Any) -> JobPage:
        """A page of jobs; `tenant`, `state`, `page_size`, `page_token`."""
        return await self.send(list_jobs(**params))

    async def cancel(self, job_id: str, *, reason: str = "") -> JobView:
        """Ask a job to end."""
        return await self.send(cancel(job_id, reason))

    async def metrics(self, job_id: str, **params: Any) -> MetricPage:
        """Metric rows; `after`, `page_size`."""
        return await self.send(metrics(job_id, **params))

    async def trajectories(self, job_id: str, **params: Any) -> TrajectoryPage:
        """A page of trajectories; `page_size`, `page_token`, `purpose`."""
        return await self.send(trajectories(job_id, **params))

    async def audit(self, job_id: str) -> AuditView:
        """Check the ledger's identity."""
        return await self.send(audit(job_id))

    async def weights(self, job_id: str) -> WeightsView:
        """Who has which weights, and from whom."""
        return await self.send(weights(job_id))

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
