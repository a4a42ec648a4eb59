"""Scopes of callers on a command port: who may call what, and which methods only ask."""

import hmac
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trefoil.core import errors
from trefoil.runtime.config import ServiceSettings

READ_VERBS: Final = ("Get", "Watch", "List", "Explain", "Preview")


def asks_only(method: str) -> bool:
    """True if a method changes nothing, by the verb its name begins with; what is not known to ask, commands."""
    return method.rpartition("/")[2].startswith(READ_VERBS)


class Scopes(Protocol):
    """Scopes: what a caller may do, by its metadata."""

    def scope(self, metadata: Any) -> str:
        """Scope of a caller: "control", "read", "open" (no token demanded), "denied" (known, may nothing), ""."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that callers must present: `control` opens everything, `read` what only asks. None: no demand."""

    control: str | None = None
    read: str | None = None

    @classmethod
    def from_settings(cls, settings: ServiceSettings) -> "Tokens":
        """Tokens of settings; errors.SettingError for a read token without a control token: all could command."""
        if settings.read_token is not None and settings.token is None:
            remedy = "set token too: it guards commands"
            raise errors.SettingError("set without token", field="read_token", remedy=remedy)
        secrets = (settings.token, settings.read_token)
        return cls(*(secret.get_secret_value() if secret is not None else None for secret in secrets))

    def scope(self, metadata: Any) -> str:
        """Scope of a caller: "control", "read", "open" (no token demanded), or "" without a valid token."""
        if self.control is None:
            return "open"
        given = str(dict(metadata or ()).get("authorization", "")).encode()
        if hmac.compare_digest(given, f"Bearer {self.control}".encode()):
            return "control"
        if self.read is not None and hmac.compare_digest(given, f"Bearer {self.read}".encode()):
            return "read"
        return ""
