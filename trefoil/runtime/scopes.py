"""Who may call what on a command port: scopes of callers, and which methods only ask."""

import hmac
from dataclasses import dataclass
from typing import Any, Final, Protocol

from trefoil.core import errors
from trefoil.runtime.config import ServiceSettings

READ_VERBS: Final = ("Get", "Watch", "List", "Explain", "Preview")


def asks_only(method: str) -> bool:
    """Whether a method changes nothing, by the verb its name begins with; what is not known to ask, commands."""
    return method.rpartition("/")[2].startswith(READ_VERBS)


class Scopes(Protocol):
    """Tells what a caller may do, by its metadata."""

    def scope(self, metadata: Any) -> str:
        """ "control", "read", "open" (no token is demanded), "denied" (known, may nothing here), or "" = nobody."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """What callers must present: `control` opens everything, `read` only what asks. None: nothing is demanded."""

    control: str | None = None
    read: str | None = None

    @classmethod
    def of(cls, settings: ServiceSettings) -> "Tokens":
        """Raises errors.SettingError for a read token without a control token: commands would be open to all."""
        if settings.read_token is not None and settings.token is None:
            remedy = "set token too: it guards commands"
            raise errors.SettingError("set without token", field="read_token", remedy=remedy)
        secrets = (settings.token, settings.read_token)
        return cls(*(secret.get_secret_value() if secret is not None else None for secret in secrets))

    def scope(self, metadata: Any) -> str:
        """ "control", "read", "open" (no token is demanded), or "" for a caller without a valid token."""
        if self.control is None:
            return "open"
        given = str(dict(metadata or ()).get("authorization", "")).encode()
        if hmac.compare_digest(given, f"Bearer {self.control}".encode()):
            return "control"
        if self.read is not None and hmac.compare_digest(given, f"Bearer {self.read}".encode()):
            return "read"
        return ""
