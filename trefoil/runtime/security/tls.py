"""TLS of services by PEM files, which are read again when they change: a renewed certificate needs no restart.

One authority, `tls_ca`, signs the certificates of all services of a cluster. Where it is set each side of a connection
shows its certificate, and no other caller is accepted.
"""

import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from trefoil.core.errors import SettingError, system_words
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.security.reread import Reread

FIELDS: Final = ("tls_certificate", "tls_key", "tls_ca")
PEM_BYTES_MAX: Final = 4 * 2**20
GRPC: Final = ("h2",)  # what both sides of gRPC call themselves (ALPN)


@dataclass(frozen=True, slots=True)
class Loaded:
    """PEM files at one moment, tried out. `names`: whom the certificate names. `expires_at_s`: when the first of them
    ends [UTC s], infinite if not read."""

    certificate: bytes
    key: bytes
    ca: bytes | None
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None
    names: tuple[str, ...]
    expires_at_s: float


class Tls:
    """TLS by a certificate, its key and an authority; `files` follows their changes."""

    def __init__(
        self,
        certificate: Path | None,
        key: Path | None,
        ca: Path | None,
        *,
        fields: tuple[str, str, str] = FIELDS,
        signed: bool = True,
        serves: bool = True,
        calls: bool = True,
        alpn: tuple[str, ...] = GRPC,
    ) -> None:
        """`fields`: what a person knows the three files by. `signed`: the authority signed our own certificate too, and
        not those of clients alone. `serves`, `calls`: what our certificate has to be good for.

        Raises:
            SettingError: only one of certificate and key is set; they are not a pair; a file cannot be read, or is not
                PEM. The certificate has expired, is another authority's, or is not for what it is used for.
        """
        if (certificate is None) != (key is None):
            raise SettingError("only one of the two is set", field=f"{fields[0]}, {fields[1]}", remedy="set both")
        self._pair = (certificate, key) if certificate is not None and key is not None else None
        self._ca, self._fields, self._signed, self._alpn = ca, fields, signed, list(alpn)
        self._serves, self._calls, self._name = serves, calls, ""
        paths = tuple(path for path in (certificate, key, ca) if path is not None)
        self.files: Reread[Loaded] = Reread(", ".join(fields), self._load, lambda: paths)

    @classmethod
    def of(cls, settings: ServiceSettings) -> "Tls | None":
        """TLS of a service's settings; None: it speaks clear text. Raises like the class."""
        if settings.tls_certificate is None and settings.tls_key is None:
            return None
        return cls(settings.tls_certificate, settings.tls_key, settings.tls_ca)

    @property
    def now(self) -> Loaded:
        """The files as they are now, or as they were when they could be used last."""
        return self.files.now

    @property
    def mutual(self) -> bool:
        """Whether both sides show certificates of one authority, so that it serves clients too."""
        return self._ca is not None and self._signed

    def end_s(self) -> float:
        """When the first of the certificates ends [UTC s]."""
        return self.now.expires_at_s

    def server_context(self) -> ssl.SSLContext:
        """What the next connection to a server of ours is made with."""
        context = self.now.server
        assert context is not None
        return context

    def client_context(self) -> ssl.SSLContext:
        """What our next connection to another server is made with."""
        context = self.now.client
        assert context is not None
        return context

    def server_credentials(self) -> Any:
        """Credentials of a gRPC server, which asks for the files as they are at each new connection."""
        given = self.now

        def configuration(loaded: Loaded) -> Any:
            return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], loaded.ca)

        def changed() -> Any:
            nonlocal given
            if self.now is given:
                return None
            given = self.now
            return configuration(given)

        return grpc.dynamic_ssl_server_credentials(configuration(given), changed, given.ca is not None)

    def channel_credentials(self) -> Any:
        """Credentials of a gRPC channel, by the files as they are now."""
        loaded = self.now
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key or None, loaded.certificate or None)

    def check_name(self, name: str) -> None:
        """Check that our own certificate names us as others know us, from now on also one that is renewed.

        Raises:
            SettingError: it does not.
        """
        self._refuse_other_name(name, self.now.names)
        self._name = name

    def _refuse_other_name(self, name: str, names: Sequence[str]) -> None:
        if name and name.lower() not in (each.lower() for each in names):
            raise SettingError(
                f"does not name {name}, but {', '.join(names) or 'no host'}",
                field=self._fields[0],
                value=str(self._pair[0]) if self._pair else None,
                remedy=f"take one with subjectAltName=DNS:{name}",
            )

    def _named(self) -> str:
        return ", ".join(str(path) for path in self._pair or (self._ca,))

    def _load(self) -> Loaded:
        pair, ca, named, value = self._pair, self._ca, self._fields[2], str(self._ca)
        try:
            authority = read_plain(ca, PEM_BYTES_MAX) if ca is not None else None
            ends = [_seconds(each) for each in _client(ca).get_ca_certs()] if ca is not None else []
            if pair is None:
                end_s = min(ends, default=math.inf)
                return Loaded(b"", b"", authority, None, self._with_alpn(_client(ca)), (), end_s)
            named, value = f"{self._fields[0]}, {self._fields[1]}", self._named()
            certificate, key = (read_plain(path, PEM_BYTES_MAX) for path in pair)
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.minimum_version = ssl.TLSVersion.TLSv1_2
            server.load_cert_chain(*pair)
            own_ca = ca if self._signed else None
            # Who trusts no authority trusts the certificate itself, which then still says how long it holds.
            trial = _client(own_ca or pair[0], own_ca is None)
            trial.load_cert_chain(*pair)
            trial.check_hostname = False
            if not self._serves:
                trial.verify_mode = ssl.CERT_NONE  # it need not do for a server
            if ca is not None:
                server.load_verify_locations(ca)
                server.verify_mode = ssl.CERT_REQUIRED if own_ca and self._calls else ssl.CERT_NONE
            shown = _shake_hands(server, trial)
            ends.append(_seconds(shown))
            if ca is not None:
                server.verify_mode = ssl.CERT_REQUIRED
            client = _client(own_ca) if own_ca else None
            if client is not None:
                client.load_cert_chain(*pair)
        except (OSError, NotPlain, ssl.SSLError) as error:
            raise SettingError(
                f"cannot be used ({_reason(error)})", field=named, value=value, remedy=_remedy(str(error), ca)
            ) from error
        server = self._with_alpn(server)
        names = tuple(name for _, name in shown.get("subjectAltName", ()))
        self._refuse_other_name(self._name, names)
        return Loaded(certificate, key, authority, server, client and self._with_alpn(client), names, min(ends))

    def _with_alpn(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.set_alpn_protocols(self._alpn)
        return context


def _client(ca: Path | None, itself: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ca)
    if itself:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> Mapping[str, Any]:
    """Shake hands in memory, as two services would; returns the certificate, which both show; {} if neither checks it.

    Raises:
        ssl.SSLError: one of the two does not like the other's certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    sides = [client_side, server_side]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            sides.remove(side)
    return client_side.getpeercert() or server_side.getpeercert() or {}


def _seconds(certificate: Mapping[str, Any]) -> float:
    """When a certificate ends [UTC s]; infinite: unknown."""
    return ssl.cert_time_to_seconds(certificate["notAfter"]) if "notAfter" in certificate else math.inf


NAMES_ANOTHER: Final = "the certificate names another host"
_FOREIGN: Final = ("the certificate is another authority's", "take one that {ca} signed")
_NAME_IT: Final = (NAMES_ANOTHER, "take one that names it (subjectAltName)")
# What Python and gRPC say where a certificate is not accepted: what it is, and what fixes it.
REASONS: Final = {
    "certificate has expired": ("the certificate has expired", "renew it"),
    "certificate is not yet valid": ("the certificate is not valid yet", "set the clocks, or take another"),
    "unable to get": _FOREIGN,
    "self-signed": _FOREIGN,
    "self signed": _FOREIGN,
    "signature failure": _FOREIGN,
    "certificate purpose": ("it is not for this use", "take one with the extendedKeyUsage that it needs"),
    "Hostname": _NAME_IT,
    "IP address mismatch": _NAME_IT,
    "WRONG_VERSION_NUMBER": ("it speaks clear text", "set tls_certificate, tls_key and tls_ca there too"),
}


def explain(said: str, ca: str = "tls_ca") -> tuple[str, str] | None:
    """Explain what a TLS library said: what is wrong, and what fixes it; None: it is not about certificates."""
    for text, (why, remedy) in REASONS.items():
        if text in said:
            return why, remedy.format(ca=ca)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return system_words(error)


def _remedy(said: str, ca: Path | None) -> str:
    found = explain(said, str(ca))
    return found[1] if found else "name readable PEM files, and a certificate's own key"
