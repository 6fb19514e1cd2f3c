"""ECDSA P-256 certificates and their keys, from an authority with name constraints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_network

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline_controller.certificates.config import DOMAIN

# Clocks of nodes differ, so certificates are valid from a little before their creation.
BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def parse(cls, certificate: bytes, key: bytes) -> Pair:
        """Parse PEM.

        Raises:
            ValueError: not PEM, not an elliptic-curve key, or the key of another certificate.
        """
        parsed = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is not of an elliptic curve")
        if private.public_key() != parsed.public_key():
            raise ValueError("the key is not that of the certificate")
        return cls(parsed, private)

    @property
    def certificate_pem(self) -> bytes:
        """The certificate as PEM."""
        return pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        """The key as unencrypted PKCS #8 PEM."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def renewal(certificate: x509.Certificate) -> datetime:
    """When to renew it: after two thirds of its lifetime."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begin + (end - begin) * 2 / 3


def valid(certificate: x509.Certificate, now: datetime) -> bool:
    """Whether it is in force."""
    return certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc


def signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority has signed it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Its DNS subject alternative names, in their order."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(extension.value.get_values_for_type(x509.DNSName))


def may_sign(authority: x509.Certificate, name: str) -> bool:
    """Whether the name constraints of an authority allow a DNS name."""
    try:
        constraints = authority.extensions.get_extension_for_class(x509.NameConstraints)
    except x509.ExtensionNotFound:
        return True
    bare = name.removeprefix("*.")
    allowed = [str(tree.value) for tree in constraints.value.permitted_subtrees or ()]
    return any(bare == tree or bare.endswith(f".{tree}") for tree in allowed)


def make_authority(names: Iterable[str], *, now: datetime, days: float) -> Pair:
    """An authority that may sign these names and their subdomains, but no IP addresses."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Subjects differ, so that successive authorities can be distinguished.
    subject = _distinguished_name(f"paceline authority {serial:040x}"[:40])
    trees = sorted({name.removeprefix("*.") for name in (DOMAIN, *names)})
    nowhere = [x509.IPAddress(ip_network(net)) for net in ("0.0.0.0/0", "::/0")]
    builder = (
        _builder(subject, key, serial)
        .issuer_name(subject)
        .not_valid_before(_begin(now, days))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(
            x509.NameConstraints(
                permitted_subtrees=[x509.DNSName(tree) for tree in _outermost(trees)],
                excluded_subtrees=nowhere,
            ),
            critical=True,
        )
    )
    return Pair(builder.sign(key, hashes.SHA256()), key)


def make_leaf(
    authority: Pair, service: str, names: Sequence[str], *, now: datetime, days: float
) -> Pair:
    """A certificate for clients and servers, which expires no later than its authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer = authority.certificate
    end = min(now + timedelta(days=days), signer.not_valid_after_utc)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    subject = _distinguished_name(f"paceline-{service}")
    builder = (
        _builder(subject, key, x509.random_serial_number())
        .issuer_name(signer.subject)
        .not_valid_before(_begin(now, days))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(both, critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(serial)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _begin(now: datetime, days: float) -> datetime:
    return now - min(BACKDATED, timedelta(days=days) / 10)


def _distinguished_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _outermost(trees: Sequence[str]) -> list[str]:
    return [t for t in trees if not any(t.endswith(f".{other}") for other in trees)]


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
