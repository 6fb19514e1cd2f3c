"""One POST to a webhook: to allowed hosts and public addresses only, signed, within a deadline.

The signature is that of Standard Webhooks (https://www.standardwebhooks.com): HMAC-SHA256 over
`id.timestamp.body`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from paceline.errors import InvalidError, PermissionDeniedError, UnavailableError
from paceline_experience.webhooks.addresses import check_address

_PORTS = {"http": 80, "https": 443}
# Labels as DNS has them, with the underscores of internal hosts.
_HOST_BYTES = 253
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
Resolve = Callable[[str, int], Sequence[str]]


def check_url(url: str, allowed: Sequence[str]) -> tuple[str, str, int]:
    """Scheme, host and port of a URL that an installation allows.

    `allowed` are origins: `https://hooks.example.com`, `https://*.example.com`,
    `http://ci.internal:8080`.

    Raises:
        PermissionDeniedError: it does not.
        InvalidError: it is no URL, has a user or password in it, or a host that DNS cannot have.
    """
    if not url.isprintable():  # parsers differ in whether they drop control characters
        raise InvalidError("notify.webhook: has characters that a URL cannot have")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise InvalidError("notify.webhook: is not a URL") from None
    if parts.scheme not in _PORTS or not host or parts.username or parts.password:
        raise InvalidError("notify.webhook: an http(s) URL without user and password is needed")
    if not _is_host(host):
        raise InvalidError(
            f"notify.webhook: {host!r} is neither a host name in ASCII nor an address"
        )
    port = port or _PORTS[parts.scheme]
    if not any(_matches(each, parts.scheme, host, port) for each in allowed):
        origins = ", ".join(allowed) or "none"
        raise PermissionDeniedError(
            f"notify.webhook: {parts.scheme}://{host}:{port} is not allowed by this installation "
            f"(experience option webhooks.origins); allowed are: {origins}"
        )
    return parts.scheme, host, port


def _is_host(name: str) -> bool:
    if len(name) <= _HOST_BYTES and _HOST.fullmatch(name):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _matches(origin: str, scheme: str, host: str, port: int) -> bool:
    parts = urlsplit(origin)
    name = (parts.hostname or "").lower()
    same_host = name == host or (name.startswith("*.") and host.endswith(name[1:]))
    return parts.scheme == scheme and same_host and (parts.port or _PORTS.get(scheme, 0)) == port


def signature(secret: bytes, *, notice_id: str, timestamp: int, body: bytes) -> str:
    """The value of the header `webhook-signature`."""
    signed = f"{notice_id}.{timestamp}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def secret_of(folder: Path | None, tenant: str, name: str) -> bytes:
    """The content of `<folder>/<tenant>/<name>`.

    Raises:
        InvalidError: there is none.
    """
    try:
        content = b"" if folder is None else (folder / tenant / name).read_bytes().strip()
    except OSError:
        content = b""
    if not content:
        raise InvalidError(
            f"notify.secret: tenant {tenant!r} has no secret {name!r} in this installation"
        )
    return content


def resolved(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system resolves it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter of names that cannot be encoded
        return []
    return [str(each[4][0]) for each in found]


class WebhookSender:
    """Sends notices; redirects are not followed."""

    def __init__(
        self, *, origins: Sequence[str], timeout_s: float, resolve: Resolve = resolved
    ) -> None:
        """`resolve` returns the addresses of a host."""
        self._origins = origins
        self._timeout_s = timeout_s
        self._resolve = resolve

    async def send(
        self, url: str, body: bytes, *, notice_id: str, timestamp: int, secret: bytes | None
    ) -> None:
        """Send one notice.

        Raises:
            PermissionDeniedError: the host, or where it is, is not allowed.
            UnavailableError: it was not accepted; the error does not say what was answered.
        """
        import httpx  # loads what only few installations need

        headers = {
            "content-type": "application/json",
            "webhook-id": notice_id,
            "webhook-timestamp": str(timestamp),
        }
        if secret is not None:
            headers["webhook-signature"] = signature(
                secret, notice_id=notice_id, timestamp=timestamp, body=body
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._post(url, body, headers)
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise UnavailableError(f"webhook: {type(error).__name__}") from None
        if not 200 <= status < 300:
            raise UnavailableError(f"webhook: answered {status}")

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> int:
        import httpx

        scheme, host, port = check_url(url, self._origins)
        addresses = await asyncio.to_thread(self._resolve, host, port)
        named = any(_matches(each, scheme, host, port) for each in self._origins if "*" not in each)
        for address in addresses:
            check_address(address, named=named)
        if not addresses:
            raise UnavailableError("webhook: its host is not known")
        # The address that was checked, so that a second look-up cannot give another one.
        target = httpx.URL(url).copy_with(host=addresses[0])
        extensions = {"sni_hostname": host}
        default = port == _PORTS[scheme]
        sent = {**headers, "host": host if default else f"{host}:{port}"}
        async with (
            httpx.AsyncClient(follow_redirects=False, trust_env=False) as client,
            client.stream(
                "POST", target, content=body, headers=sent, extensions=extensions
            ) as response,
        ):
            return response.status_code
