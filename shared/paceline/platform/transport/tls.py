"""TLS certificates: read and checked, passed to gRPC and HTTP, and watched for renewal."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.config.service import TlsSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc_authorization import certified_kinds

POLL_S = 10.0
log = Log("tls")


@dataclass(frozen=True, slots=True, repr=False)
class Pem:
    """The contents of certificate, key and authority files."""

    certificate: bytes
    key: bytes
    authority: bytes

    def digest(self) -> bytes:
        """A hash of the contents."""
        parts = (self.certificate, self.key, self.authority)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def read(tls: TlsSettings) -> Pem:
    """Read the files and check that they belong together.

    Raises:
        ConfigError: a file is missing or invalid; says which.
    """
    _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    return _read(tls)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    """Credentials of a gRPC server; raises `ConfigError`."""
    pem = read(tls)
    authority = pem.authority if tls.require_client else None
    return grpc.ssl_server_credentials(
        [(pem.key, pem.certificate)], authority, require_client_auth=tls.require_client
    )


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Credentials of a gRPC channel; raises `ConfigError`."""
    pem = read(tls)
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """Context of an HTTP server; raises `ConfigError`."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    if tls.require_client:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsSettings) -> ssl.SSLContext:
    """Context of an HTTP client that verifies `server_hostname`; raises `ConfigError`."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def peer_kinds(transport: asyncio.BaseTransport, domain: str) -> Set[WorkerKind]:
    """The kinds of service that the peer's certificate names."""
    certificate = transport.get_extra_info("peercert") or {}
    names = (name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")
    return certified_kinds(names, domain)


async def wait_for_renewal(
    tls: TlsSettings,
    *,
    rng: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once the files have changed and a random part of `reload_within_s` has passed.

    Contents are compared, not modification times: Kubernetes swaps a symlink above the files. A
    file that is temporarily missing does not count as changed.
    """
    before = _read(tls).digest()
    while True:
        await sleep(min(POLL_S, tls.reload_within_s / 10 + 0.1))
        try:
            changed = _read(tls).digest() != before
        except ConfigError as error:
            log.warning("certificates cannot be read", error=error)
            continue
        if changed:
            break
    pause_s = rng() * tls.reload_within_s
    log.info("certificates have changed", restarts_in_s=round(pause_s, 1))
    await sleep(pause_s)


def _context(tls: TlsSettings, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pem = _read(tls)
    try:
        context.load_verify_locations(cadata=pem.authority.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"tls.authority: {tls.authority} holds no PEM certificates") from None
    try:
        # Without a password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
    except ssl.SSLError:
        raise ConfigError(
            f"tls.certificate, tls.key: {tls.certificate} and {tls.key} are not a PEM certificate "
            "and its unencrypted key"
        ) from None
    return context


def _read(tls: TlsSettings) -> Pem:
    return Pem(
        certificate=_bytes("certificate", tls.certificate),
        key=_bytes("key", tls.key),
        authority=_bytes("authority", tls.authority),
    )


def _bytes(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{field}: {path}: {error.strerror}") from None
