"""A certificate authority for tests that issues real certificates, valid for an hour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.config.service import TlsSettings
from paceline.enums import WorkerKind

LIFE = timedelta(hours=1)
SLACK = timedelta(minutes=5)


class Authority:
    """Signs certificates and writes them to its own folder."""

    def __init__(self, folder: Path, *, name: str = "authority") -> None:
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signing = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        public = self._key.public_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        unsigned = (
            self._unsigned(self._name, public)
            .add_extension(constraints, critical=True)
            .add_extension(signing, critical=True)
            .add_extension(identifier, critical=False)
        )
        certificate = unsigned.sign(self._key, hashes.SHA256())
        self.path = self._folder / "ca.crt"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        kinds: Iterable[WorkerKind] = WorkerKind,
        domain: str = "paceline.internal",
        names: Sequence[str] = (),
        since: timedelta = -SLACK,
        **changes: Any,
    ) -> TlsSettings:
        """Issue a certificate for these kinds of service and further DNS names, with its key.

        Issuing the same name again replaces the files. Valid for `LIFE`, starting `since` from now.
        """
        every = [domain, *(f"{kind}.{domain}" for kind in kinds), *names]
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        both = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        unsigned = (
            self._unsigned(subject, key.public_key(), since)
            .add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, every)]), critical=False)
            .add_extension(both, critical=False)
            .add_extension(issuer, critical=False)
        )
        certificate = unsigned.sign(self._key, hashes.SHA256())
        paths = {"certificate": self._folder / f"{name}.crt", "key": self._folder / f"{name}.key"}
        pem = serialization.Encoding.PEM
        paths["certificate"].write_bytes(certificate.public_bytes(pem))
        paths["key"].write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return TlsSettings(**paths, authority=self.path, **changes)

    def _unsigned(
        self, subject: x509.Name, public: Any, since: timedelta = -SLACK
    ) -> x509.CertificateBuilder:
        start = datetime.now(UTC) + since
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + SLACK + LIFE)
        )
