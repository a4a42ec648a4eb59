"""A certificate authority of a test's own, and what it signs. Real ones, valid for an hour unless they have expired."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trefoil.runtime.clock import WallClock


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """(key, certificate), as gRPC takes them."""
        return self.key.read_bytes(), self.certificate.read_bytes()

    def settings(self, authority: "Authority") -> dict[str, Path]:
        """What a service of that authority is told."""
        return {"tls_certificate": self.certificate, "tls_key": self.key, "tls_ca": authority.certificate}

    def copy_to(self, other: "Pair") -> None:
        """Renew another pair by this one, file by file, as an operator would."""
        for source, target in ((self.certificate, other.certificate), (self.key, other.key)):
            target.write_bytes(source.read_bytes())


SIGNS = x509.KeyUsage(
    False, False, False, False, False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
)
"""Python 3.13 wants it of an authority, and key identifiers."""


class Authority:
    """Its own certificate is `certificate`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._begun(self._name, self._key).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        built = built.add_extension(SIGNS, True)
        built = built.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False)
        self.certificate = self._written("ca", self._key, built.sign(self._key, hashes.SHA256())).certificate

    def server(self, name: str = "localhost") -> Pair:
        """For `name` and 127.0.0.1."""
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return self._signed(name, names, ExtendedKeyUsageOID.SERVER_AUTH)

    def client(self, name: str, *, hours: float = 1) -> Pair:
        """For a client of that name."""
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        return self._signed(name, names, ExtendedKeyUsageOID.CLIENT_AUTH, hours=hours)

    def service(self, name: str, *, hours: float = 1) -> Pair:
        """For a service of that name (an agent: its node's) at 127.0.0.1, which serves and calls others; expired with
        `hours` below 0."""
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return self._signed(name, names, ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH, hours=hours)

    def _signed(
        self, name: str, names: x509.SubjectAlternativeName, *usages: x509.ObjectIdentifier, hours: float = 1
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = self._begun(subject, key, hours).add_extension(names, False)
        built = built.add_extension(x509.ExtendedKeyUsage(usages), False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = built.add_extension(authority, False)
        return self._written(name, key, built.sign(self._key, hashes.SHA256()))

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, hours: float = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.fromtimestamp(WallClock().now_s(), datetime.UTC)
        hour = datetime.timedelta(hours=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * hour)
            .not_valid_after(now + hours * hour)
        )

    def _written(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Pair:
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        pair.key.chmod(0o600)
        return pair
