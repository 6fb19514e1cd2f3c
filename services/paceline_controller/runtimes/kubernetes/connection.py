"""Kubernetes API client: plain objects, deadlines, retries and `PacelineError`s."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import (
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from paceline.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
)
from paceline.platform.proxies import environment_proxy
from paceline.platform.transport.rpc import backoff_s
from paceline_controller.runtimes.kubernetes.names import MANAGER
from paceline_controller.runtimes.kubernetes.resources import Kind, Object, kind_of, name_of

TIMEOUT_S = 10.0
# Less than `lease_s - renew_within_s`, or a slow connection could carry a write into another term.
CONNECT_S = 3.0
WATCH_S = 60
PAGE = 500
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class HistoryGoneError(StateError):
    """The server has discarded the changes since a resource version: list again."""


async def configuration(kubeconfig: Path | None = None) -> Configuration:
    """Client configuration from a kubeconfig file, or from the ServiceAccount of the pod.

    A pod calls the API server of its cluster directly; elsewhere a proxy that the kubeconfig or
    else the environment names is used, as kubectl does.

    Raises:
        ConfigError: the file, or the ServiceAccount, is missing or invalid.
    """
    settings = Configuration()
    try:
        if kubeconfig is not None:
            await load_kube_config(
                config_file=str(kubeconfig), client_configuration=settings, persist_config=False
            )
            settings.proxy = settings.proxy or environment_proxy(settings.host)
        else:
            load_incluster_config(client_configuration=settings)
    except ConfigException as error:
        raise ConfigError(f"kubernetes: {error}") from None
    return settings


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    kind: Kind
    name: str = ""
    subresource: str = ""
    query: dict[str, str] = field(default_factory=dict[str, str])
    body: Object | None = None
    content: str = "application/json"

    @property
    def what(self) -> str:
        """The request in the terms of an RBAC rule, for messages."""
        verb = _VERBS.get(self.method) or ("get" if self.name else "list")
        verb = "watch" if "watch" in self.query else verb
        resource = "/".join(part for part in (self.kind.resource, self.subresource) if part)
        return f"{verb} {resource} {self.name}".rstrip()


class KubernetesClient:
    """Client for one namespace of a cluster.

    Writes are refused while `may_write()` is false. It is checked just before a request is sent,
    so that a process that was frozen cannot continue with a stale write.
    """

    def __init__(
        self,
        settings: Configuration,
        *,
        namespace: str,
        timeout_s: float = TIMEOUT_S,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._may_write = may_write
        self._session: aiohttp.ClientSession | None = None

    @property
    def namespace(self) -> str:
        """Namespace of all requests."""
        return self._namespace

    async def close(self) -> None:
        """Close the session and abort its requests."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, kind: Kind, name: str) -> Object:
        """One object.

        Raises:
            NotFoundError: it does not exist.
        """
        return await self._json(_Request("GET", kind, name))

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects of a kind, and the resource version from which a watch can continue."""
        items: list[Object] = []
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(PAGE)}
        while True:
            page = await self._json(_Request("GET", kind, query=query))
            for item in page["items"]:
                # The server omits these in lists.
                items.append({"apiVersion": kind.api_version, "kind": kind.kind, **item})
            more = page["metadata"].get("continue")
            if not more:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = more

    async def create(self, kind: Kind, body: Object) -> Object:
        """Create an object that must not exist yet; never retried."""
        return await self._json(_Request("POST", kind, body=body), once=True)

    async def apply(self, body: Object) -> Object:
        """Server-side apply: create an object, or update the fields we own."""
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._json(
            _Request("PATCH", kind_of(body), name_of(body), query=query, body=body, content=_APPLY)
        )

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        """Merge `changes` into an object; null removes a field, lists are replaced."""
        query = {"fieldManager": MANAGER}
        return await self._json(
            _Request("PATCH", kind, name, subresource, query=query, body=changes, content=_MERGE)
        )

    async def replace(self, kind: Kind, body: Object) -> Object:
        """Replace an object unless it has changed since it was read; never retried.

        Raises:
            ConflictError: it has changed.
        """
        return await self._json(_Request("PUT", kind, name_of(body), body=body), once=True)

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        """Delete an object after its dependents; no error if it is gone or has another `uid`."""
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self._json(_Request("DELETE", kind, name, body=body))
        except (NotFoundError, ConflictError):
            return

    async def log(self, kind: Kind, name: str, *, container: str, lines: int) -> str:
        """The last lines of a container's log."""
        query = {"container": container, "tailLines": str(lines)}
        data = await self._send(_Request("GET", kind, name, "log", query=query), once=False)
        return data.decode(errors="replace")

    async def watch(
        self,
        kind: Kind,
        *,
        selector: str = "",
        fields: str = "",
        version: str,
        watch_s: int = WATCH_S,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes since `version` as (ADDED | MODIFIED | DELETED | BOOKMARK, object).

        The first is a BOOKMARK of `version` itself, as soon as the server has answered. The watch
        ends after `watch_s` seconds, or when the server closes it.

        Raises:
            HistoryGoneError: `version` is too old; list again.
            UnavailableError: the connection was lost.
        """
        query = {
            "labelSelector": selector,
            "fieldSelector": fields,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(watch_s),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeout_s, sock_read=watch_s + self._timeout_s
        )
        request = _Request("GET", kind, query=query)
        try:
            async with await self._open(request, timeout) as response:
                await _check(response, request.what)
                yield "BOOKMARK", {"metadata": {"resourceVersion": version}}
                async for line in _lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(
                            event["object"].get("code", 500), event["object"], request.what
                        )
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _lost(error) from None

    async def _json(self, request: _Request, *, once: bool = False) -> Object:
        return json.loads(await self._send(request, once=once))

    async def _send(self, request: _Request, *, once: bool) -> bytes:
        """Send, retrying until the deadline; `once` is for requests that are not idempotent."""
        deadline = time.monotonic() + self._timeout_s
        attempt = 0
        problem: PacelineError | None = None
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            timeout = aiohttp.ClientTimeout(total=left, connect=min(left, CONNECT_S))
            try:
                async with await self._open(request, timeout) as response:
                    await _check(response, request.what)
                    return await response.read()
            except UnavailableError as error:
                problem = error
            except TimeoutError as error:
                problem = problem or _lost(
                    error
                )  # an earlier error says more than a retry's timeout
            except (aiohttp.ClientError, OSError) as error:
                problem = _lost(error)
            pause = backoff_s(attempt)
            if once or pause >= deadline - time.monotonic():
                raise problem
            await asyncio.sleep(pause)
            attempt += 1

    async def _open(self, request: _Request, timeout: aiohttp.ClientTimeout) -> Any:
        """The streaming response, to be used in `async with`."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=_ssl(self._settings))
            )
        path = request.kind.path(self._namespace, request.name, request.subresource)
        headers = {"Accept": "application/json, */*", **await _authorization(self._settings)}
        if request.method != "GET" and not self._may_write():
            raise FencedError(f"kubernetes: {request.what}: another controller leads")
        data = None
        if request.body is not None:
            headers["Content-Type"] = request.content
            data = json.dumps(request.body)
        return self._session.request(
            request.method,
            f"{self._settings.host.rstrip('/')}{path}",
            params=request.query,
            data=data,
            headers=headers,
            timeout=timeout,
            proxy=self._settings.proxy or None,
            server_hostname=self._settings.tls_server_name or None,
        )


async def _authorization(settings: Configuration) -> dict[str, str]:
    """Headers of a request; read every time, as the token of a pod is rotated every hour."""
    token_settings: Any = settings.auth_settings()
    if inspect.isawaitable(token_settings):
        token_settings = await token_settings
    token = token_settings.get("BearerToken")
    return {token["key"]: token["value"]} if token and token["value"] else {}


def _ssl(settings: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ssl_ca_cert)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    if not settings.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length; an object may have more than a reader's usual buffer."""
    rest = b""
    async for chunk in response.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


async def _check(response: aiohttp.ClientResponse, what: str) -> None:
    if response.status < 300:
        return
    text = await response.text(errors="replace")
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {"message": text[:500]}
    raise _error(response.status, status, what)


def _error(code: int, status: Object, what: str) -> PacelineError:
    """The `PacelineError` for a `Status` object of the API."""
    text = f"kubernetes: {what}: {status.get('message') or status.get('reason') or code}"
    if code == 500 and not status.get("reason") and _misfit(status.get("message") or ""):
        return InvalidError(text)
    if code in _RETRIED or code >= 500:
        return UnavailableError(text)
    causes: list[Object] = (status.get("details") or {}).get("causes") or []
    for cause in causes:
        text += f"\n{cause.get('field', '')}: {cause.get('message', '')}"
    return _BY_CODE.get(code, PacelineError)(text)


def _misfit(message: str) -> bool:
    """Whether an applied body does not match the schema of its kind, so that retrying is useless.

    The server has no status for this (apimachinery, `structuredmerge.go`): it answers 500 without
    a reason, as it does when its own store is unavailable. Only the message differs.
    """
    return message.startswith(_MISFITS)


_MISFITS = (
    "failed to create typed patch object ",
    "failed to convert new object ",
    "failed to convert new typed object ",
    "failed to convert to unversioned ",
)
_RETRIED = {408, 429}
_BY_CODE: dict[int, type[PacelineError]] = {
    400: InvalidError,
    401: PermissionDeniedError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: HistoryGoneError,
    422: InvalidError,
}


def _lost(error: Exception) -> UnavailableError:
    return UnavailableError(f"kubernetes: {type(error).__name__}: {error}".rstrip(": "))
