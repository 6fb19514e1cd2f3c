"""How services prove their kind to each other in an installation without certificates.

The installation has one secret. A key for each kind of server is derived from it, and from that key
a credential for each kind of caller:

    key = sha256("paceline/server/SERVER/SECRET"), credential = sha256("paceline/caller/CALLER/KEY")

A process gets the key of its own kind, with which it verifies its callers, and the credentials of
its kind for the servers that it calls. So a process that is taken over speaks for no other kind.
The chart derives the same in `templates/service-keys.yaml`, where there is sha256 but no HMAC; with
a secret of fixed length at the end of what is hashed, the one is as good as the other.

Credentials are sent as they are: whoever can read or redirect the traffic can use them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from paceline.config.service import ServiceSettings
from paceline.enums import WorkerKind
from paceline.errors import ConfigError
from paceline.platform.files import kept_secret, write_secret
from paceline.platform.transport.metadata_channel import Metadata
from paceline.platform.transport.rpc_authorization import (
    ALL_KINDS,
    NOBODY,
    Identify,
    by_certificate,
    callers,
)
from paceline.plugins import StrictModel

METADATA_KEY: Final = "paceline-service"
"""Metadata of a call between services: `KIND/CREDENTIAL`."""
FILE: Final = "keys.json"
SPEAKS_FOR: Final = {WorkerKind.CONTROLLER: ALL_KINDS - {WorkerKind.EXPERIENCE, WorkerKind.GATEWAY}}
"""A controller without a cluster starts the workers, and gives each the keys of its own kind."""
_SECRET_BYTES = 32
Secret = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ServiceKeys(StrictModel):
    """The contents of a file of keys."""

    keys: dict[WorkerKind, Secret] = Field(default_factory=dict, repr=False)
    """Of servers, by kind."""
    credentials: dict[WorkerKind, dict[WorkerKind, Secret]] = Field(
        default_factory=dict, repr=False
    )
    """By kinds of server and caller, for servers whose key is not here."""

    @classmethod
    def of_installation(cls, secret: str) -> ServiceKeys:
        """The keys of all kinds of server."""
        return cls(keys={kind: _derived("server", kind, secret) for kind in WorkerKind})

    def credential(self, server: WorkerKind, caller: WorkerKind) -> str:
        """The credential of a kind of caller for a kind of server; empty if it is not known."""
        if (key := self.keys.get(server)) is not None:
            return _derived("caller", caller, key)
        return self.credentials.get(server, {}).get(caller, "")

    def narrowed(self, kinds: Iterable[WorkerKind]) -> ServiceKeys:
        """What processes of these kinds need, and all that they can make for each other."""
        own = set(kinds)
        others = {server: called_by(server) & own for server in WorkerKind if server not in own}
        return ServiceKeys(
            keys={kind: key for kind, key in self.keys.items() if kind in own},
            credentials={
                server: {caller: self.credential(server, caller) for caller in sorted(speakers)}
                for server, speakers in others.items()
                if speakers
            },
        )

    def dumped(self) -> str:
        """The text of the file."""
        return self.model_dump_json()

    def digest(self) -> str:
        """Tells whether keys have changed, and nothing about them."""
        return hashlib.sha256(self.dumped().encode()).hexdigest()[:16]


def called_by(server: WorkerKind) -> Set[WorkerKind]:
    """The kinds of service that call a kind of server, for more than its health."""
    methods = (
        each
        for service, rows in callers()[server].items()
        if service != "Health"
        for each in rows.values()
    )
    return frozenset().union(*(each or NOBODY for each in methods))


def issue(folder: Path, kinds: Iterable[WorkerKind]) -> dict[WorkerKind, Path]:
    """Write `KIND/keys.json` for each kind, from `secret`, which is created if there is none.

    All files are readable by their owner only.

    Raises:
        OSError: a file can be neither read nor written.
    """
    secret = kept_secret(folder / "secret", lambda: secrets.token_hex(_SECRET_BYTES))
    every = ServiceKeys.of_installation(secret)
    files = {kind: folder / kind / FILE for kind in kinds}
    for kind, path in files.items():
        write_secret(path, every.narrowed(SPEAKS_FOR.get(kind, {kind})).dumped())
    return files


def read_keys(path: Path) -> ServiceKeys:
    """The keys in a file.

    Raises:
        ConfigError: it cannot be read, or has other contents.
    """
    try:
        return ServiceKeys.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"service_keys: {path}: {error.strerror}") from None
    except ValidationError:
        raise ConfigError(
            f"service_keys: {path} is not a file of keys; "
            "`python -m paceline.platform.server.issue_keys` writes such files"
        ) from None


def presented_to(settings: ServiceSettings, server: WorkerKind) -> Metadata:
    """Metadata that proves the kind of this process to a kind of server.

    Empty if it has certificates, or no credential for this kind of server.

    Raises:
        ConfigError: its file of keys is missing or wrong.
    """
    if settings.tls is not None or settings.service_keys is None:
        return ()
    credential = read_keys(settings.service_keys).credential(server, settings.kind)
    return ((METADATA_KEY, f"{settings.kind}/{credential}"),) if credential else ()


def by_credential(keys: ServiceKeys, server: WorkerKind) -> Identify:
    """Identifies callers of a kind of server by the credentials that they show.

    Raises:
        ConfigError: the key of this kind of server is missing.
    """
    if server not in keys.keys:
        raise ConfigError(f"service_keys: the file has no key of {server}, only those of others")
    expected: Mapping[str, tuple[bytes, Set[WorkerKind]]] = {
        kind: (keys.credential(server, kind).encode(), frozenset({kind})) for kind in WorkerKind
    }

    def identify(context: Any) -> Set[WorkerKind]:
        text = dict(context.invocation_metadata() or ()).get(METADATA_KEY, "")
        kind, _, credential = str(text).partition("/")
        right, kinds = expected.get(kind, (b"", NOBODY))
        return kinds if hmac.compare_digest(credential.encode(), right) else NOBODY

    return identify


def identification(settings: ServiceSettings) -> Identify | None:
    """How a server identifies its callers; None: not at all.

    Raises:
        ConfigError: neither certificates nor keys are there, or both, or a file is wrong.
    """
    ways = (settings.tls is not None, settings.service_keys is not None, settings.insecure)
    if sum(ways) != 1:
        raise ConfigError(
            "tls, service_keys, insecure: exactly one is needed: certificates, a file of keys "
            "(`python -m paceline.platform.server.issue_keys` writes them), or `insecure: true`, "
            "with which everybody who reaches the port may call every method"
        )
    if settings.tls is not None:
        return by_certificate(settings.tls.peer_name)
    if settings.service_keys is not None:
        return by_credential(read_keys(settings.service_keys), settings.kind)
    return None


def _derived(use: str, kind: WorkerKind, secret: str) -> str:
    return hashlib.sha256(f"paceline/{use}/{kind}/{secret}".encode()).hexdigest()
