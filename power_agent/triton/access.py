"""Access to Tritons: what opens to their agent alone, and the certificate that they show.

Triton restricts whole protocols to those who send a key with each call. It takes that key on its command line only, so
users who see this host's processes see it. It still closes what can be called over a network.

A Triton's private key is in the hands of the models that it runs, which are the same user. So Tritons show a separate
pair, which names `tritons.<node>` and is none of a client: with it no process can pass for the agent, or call a
service.
"""

import hashlib
import hmac
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import DiskUnavailable, SettingError, system_error
from trefoil.core.fleet import triton_name
from trefoil.runtime.files import REMEDY, replace_file, replace_files
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.state_files import read_bytes, set_aside

RESTRICTED: Final = "model-repository,shared-memory,trace,logging"
"""Protocols that only the agent needs, or none. Dispatchers need health, metadata, model-config and inference."""
HEADER: Final = "agent"
SECRET: Final = "triton.key"
SECRET_BYTES: Final = 32
FIELDS: Final = ("triton_tls_certificate", "triton_tls_key", "tls_ca")


@dataclass(frozen=True, slots=True)
class TritonFiles:
    """PEM files of one Triton, copies of its own: it reads them once, at its start."""

    certificate: Path
    key: Path
    ca: Path


class TritonAccess:
    """Access of one agent to its Tritons."""

    def __init__(self, settings: PowerAgentSettings, tls: Tls | None) -> None:
        """Check the certificates of Tritons; `tls`: what the agent has of its own.

        Raises:
            SettingError: they are missing where the node has TLS, cannot be used, or name another node.
        """
        self._state_dir, self._secret = settings.state_dir.absolute(), b""
        self._reading = threading.Lock()  # slices that start together ask from separate threads
        self.name = triton_name(settings.node, settings.triton_tls_name)
        self.own = tls if tls is not None and tls.mutual else None
        """What the agent shows to its Tritons; None: they speak clear text."""
        self._tls: Tls | None = None
        self._ends_s: dict[str, float] = {}
        given = (settings.triton_tls_certificate, settings.triton_tls_key)
        if self.own is None:
            if any(given):
                raise SettingError("set without tls_ca", field=FIELDS[0], remedy="set tls_ca, or drop it")
            return
        self.own.check_name(own := settings.agent_tls_name.replace("{node}", settings.node))
        if own == self.name:
            remedy = "give Tritons another name than the agent's: models can read their key"
            raise SettingError("is agent_tls_name", field="triton_tls_name", value=self.name, remedy=remedy)
        if not all(given):
            raise SettingError(
                "missing: with the agent's own key models could pass for the agent",
                field=f"{FIELDS[0]}, {FIELDS[1]}",
                remedy=f"take a pair with subjectAltName=DNS:{self.name} and extendedKeyUsage=serverAuth",
            )
        self._tls = Tls(*given, settings.tls_ca, fields=FIELDS, calls=False)
        self._tls.check_name(self.name)

    def key(self, tag: str) -> str:
        """Key of one start of a Triton, by its tag: the same for an agent that adopts it.

        Raises:
            DiskUnavailable: the secret that it is made of can be neither read nor written.
        """
        with self._reading:
            if not self._secret:
                try:
                    self._secret = _secret_of(self._state_dir / SECRET)
                except OSError as error:
                    path, so = self._state_dir / SECRET, "it is the key of Tritons"
                    raise system_error(DiskUnavailable, error, "be used", path, remedy=REMEDY, so=so) from error
        return hmac.new(self._secret, tag.encode(), hashlib.sha256).hexdigest()[:32]

    def files(self, name: str) -> TritonFiles | None:
        """Files of the Triton of a slice, whether they are there or not; None: it speaks clear text."""
        if self._tls is None:
            return None
        folder = self._state_dir / "tls" / name
        return TritonFiles(folder / "triton.crt", folder / "triton.key", folder / "ca.crt")

    def write(self, name: str) -> None:
        """Write the files of a Triton that is to be started, as they are now. Only root, the agent and, where a runtime
        shows it the file, its Triton can enter that folder.

        Raises:
            OSError: they cannot be written.
        """
        files = self.files(name)
        if files is None or self._tls is None:
            return
        loaded = self._tls.now
        assert loaded.ca is not None
        files.key.parent.mkdir(parents=True, exist_ok=True)
        files.key.parent.parent.chmod(0o700)
        contents = {files.certificate: loaded.certificate, files.key: loaded.key, files.ca: loaded.ca}
        replace_files(contents, sync=False)
        for path in contents:
            path.chmod(0o644)
        self._ends_s.pop(name, None)

    def end_s(self, names: Sequence[str]) -> float:
        """When the first certificate ends that Tritons of these slices show [UTC s]; 0: it has, or is not there."""
        for name in names:
            if name not in self._ends_s:
                self._ends_s[name] = self._end_of(name)
        return min((self._ends_s[name] for name in names), default=math.inf)

    def _end_of(self, name: str) -> float:
        files = self.files(name)
        if files is None:
            return math.inf
        try:
            return Tls(files.certificate, files.key, files.ca, calls=False).end_s()
        except SettingError:
            return 0.0


def _secret_of(path: Path) -> bytes:
    """The secret in a file, made where there is none: what is shorter could be guessed, and stands aside."""
    found = read_bytes(path)
    if found is not None and len(found) == SECRET_BYTES:
        return found
    if found is not None:
        set_aside(path, f"has {len(found)} bytes, not {SECRET_BYTES}")
    made = secrets.token_bytes(SECRET_BYTES)
    replace_file(path, made, sync=False, mode=0o600)
    return made
