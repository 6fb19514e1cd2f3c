"""Certificates: read and checked, as gRPC and as HTTP want them, and watched for renewal."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.callers import roles_of
from paceline.config.service import TlsSettings
from paceline.errors import ConfigError
from paceline.logs import Log
from paceline.types import WorkerKind

POLL_S = 10.0
log = Log("tls")


@dataclass(frozen=True, slots=True, repr=False)
class Pem:
    """The contents of the three files."""

    certificate: bytes
    key: bytes
    authority: bytes

    def digest(self) -> bytes:
        """Equal for equal contents."""
        parts = (self.certificate, self.key, self.authority)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def read(tls: TlsSettings) -> Pem:
    """The files, found to belong together.

    Raises:
        ConfigError: a file is missing or is not what it should be; says which.
    """
    _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    return _read(tls)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    """For a gRPC port; raises `ConfigError`."""
    pem = read(tls)
    authority = pem.authority if tls.require_client else None
    return grpc.ssl_server_credentials(
        [(pem.key, pem.certificate)], authority, require_client_auth=tls.require_client
    )


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """For a gRPC channel; raises `ConfigError`."""
    pem = read(tls)
    return grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificate)


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """For an HTTP port; raises `ConfigError`."""
    context = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    if tls.require_client:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(tls: TlsSettings) -> ssl.SSLContext:
    """For HTTP calls; verifies the name that the caller gives. Raises `ConfigError`."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def peer_kinds(transport: asyncio.BaseTransport, domain: str) -> Set[WorkerKind]:
    """What the certificate at the other end of a TLS connection speaks for."""
    certificate = transport.get_extra_info("peercert") or {}
    names = (name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")
    return roles_of(names, domain)


async def renewed(
    tls: TlsSettings,
    *,
    chance: Callable[[], float] = random.random,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once the files have changed and a random part of `reload_within_s` has passed.

    Contents are compared, not times: Kubernetes changes a link above the files. A file that is
    missing in between counts as no change.
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
    pause_s = chance() * tls.reload_within_s
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
        # Without a password OpenSSL would ask the terminal for one.
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
