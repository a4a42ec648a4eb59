"""Operating errors: what a person can mend. Bugs are assertion failures and crash.

TrefoilError                  one clear line: field, value, remedy.
+-- InvalidInput              a value that a caller gave.                 INVALID_ARGUMENT, exit 2
|   +-- SettingError          ... in settings, a scenario or a flag.
|   +-- CatalogError          ... in family.toml or profile.csv.
|   |   +-- ProfileMissing    ... no row for an operating point.
|   +-- TraceError            ... in a carbon or arrival trace.
|   +-- PlanError             ... in a plan.
|   +-- SeriesMismatch        two intensities that must not be compared.
+-- Infeasible                an objective that nothing can meet.         FAILED_PRECONDITION
+-- Fenced                    a writer that is no longer the holder.      FAILED_PRECONDITION
|   +-- StaleRevision         ... a revision older than one seen.
+-- ClockApart                a clock that is not that of Redis.          INTERNAL
+-- RoleFree                  a role that another process has held.       exit 2
+-- NotFound                  a family, zone or node that does not exist. NOT_FOUND
+-- UnknownCall               a call that an older service does not know. exit 2
+-- Unavailable               something that ought to answer does not.    UNAVAILABLE
|   +-- StateUnavailable      ... Redis.
|   |   +-- StateUnreadable   ... a value in it, which is then as good as lost.
|   +-- DiskUnavailable       ... a disk: full, read-only or failing.
|   +-- Untrusted             ... whose certificate, or ours, is not accepted.
+-- StartError                a part that cannot start here.              exit 2
    +-- PortInUse
    +-- BinaryMissing
"""

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Final, Self, TypeVar

VALUE_CHARS_MAX: Final = 200
"""Characters of a value that an error shows: a caller that sent megabytes does not get them back."""
STATUS_BYTES_MAX: Final = 2000
"""Bytes of UTF-8 that a gRPC status says: it travels in a header, which may grow to three times that (percent-encoded),
and from 8 KiB on clients drop the status with its call."""
_PERMISSION: Final = "give this user permission to it, or name another"
SYSTEM_REMEDIES: Final[Mapping[int, str]] = {
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "name a place that can be written",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "name another path: a part of this one is a file, not a folder",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "name the file itself: its links lead in a circle",
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room on that disk, or raise this user's quota",
    errno.EIO: "fix that disk",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EADDRINUSE: "stop what listens there, or set another address",
    errno.EADDRNOTAVAIL: "use an address of this host",
    errno.ECONNREFUSED: "start what should listen there, or correct the address",
    errno.EHOSTUNREACH: "correct the address, or fix the network",
    errno.ENETUNREACH: "correct the address, or fix the network",
}
"""What fixes an error of the system, whatever met it."""
NO_NAME: Final = "correct the name of the host, or fix this machine's DNS"


def shown(value: object) -> str:
    """Text of a value as an error shows it, at most VALUE_CHARS_MAX characters of it."""
    if isinstance(value, str | bytes) and len(value) > VALUE_CHARS_MAX:
        return f"{value[:VALUE_CHARS_MAX]!r}... ({len(value)} {'bytes' if isinstance(value, bytes) else 'characters'})"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python prints; what is nested too deeply
        text = f"(a {type(value).__name__} that is too large)"
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}... ({len(text)} characters)"


def brief(text: str) -> str:
    """Text short enough for a status: both its ends where it is longer, for the remedy stands last."""
    if len(text) <= STATUS_BYTES_MAX // 4:  # no character has more than four bytes
        return text
    data = text.encode("utf-8", "replace")
    if len(data) <= STATUS_BYTES_MAX:
        return text
    half = STATUS_BYTES_MAX // 2 - 20
    return f"{data[:half].decode('utf-8', 'ignore')} ... {data[-half:].decode('utf-8', 'ignore')}"


class TrefoilError(Exception):
    """Error in one clear line. `field` and `value` name what is wrong, `remedy` what to do."""

    def __init__(self, message: str, *, field: str = "", value: object = None, remedy: str = "") -> None:
        self.message, self.field, self.value, self.remedy = message, field, value, remedy
        head = (
            f"{field} = {shown(value)}: {message}"
            if field and value is not None
            else f"{field}: {message}"
            if field
            else message
        )
        super().__init__(f"{head}. Remedy: {remedy}" if remedy else head)

    def with_cause(self, cause: str) -> Self:
        """This error with its cause, as another part reported it, added to the message."""
        return type(self)(f"{self.message}; {cause}", field=self.field, value=self.value, remedy=self.remedy)


class InvalidInput(TrefoilError):
    """Input of a caller that cannot be used."""


class SettingError(InvalidInput):
    """Invalid setting, scenario field or flag."""


class CatalogError(InvalidInput):
    """Invalid family.toml or profile.csv."""


class ProfileMissing(CatalogError):
    """Missing profile row of an operating point; the message names all of its keys."""


class TraceError(InvalidInput):
    """Invalid carbon or arrival trace; the message names file and line."""


class PlanError(InvalidInput):
    """Invalid plan: it breaks a rule of `trefoil.core.plan_check.check`."""


class SeriesMismatch(InvalidInput):
    """Mismatch of two intensities: of different zone, method or factors."""


class Infeasible(TrefoilError):
    """Infeasible objective: nothing in fleet and catalogue can meet it; the message says what is closest."""


class Fenced(TrefoilError):
    """Fenced write, by a holder whose epoch has been overtaken; the message names both epochs."""


class StaleRevision(Fenced):
    """Stale command, older than one already obeyed."""


class RoleFree(TrefoilError):
    """Free role that another process has held meanwhile: who stood by starts again, to know what that one did."""


class ClockApart(TrefoilError):
    """Clock of a service that differs from that of Redis by more than anything on its way explains."""


class NotFound(TrefoilError):
    """Unknown family, zone or node; the message names those that are served."""


class UnknownCall(TrefoilError):
    """Unknown call: the service that was asked is of an older version."""


class Unavailable(TrefoilError):
    """Unavailable service that ought to answer."""


class StateUnavailable(Unavailable):
    """Unavailable Redis: it does not answer, or refuses."""


class StateUnreadable(StateUnavailable):
    """Unreadable value in Redis: of another type, or not what its writer writes; `field` is its key."""


class DiskUnavailable(Unavailable):
    """Unavailable disk: a file cannot be written or read; nothing has come of what should have been kept in it."""


class Untrusted(Unavailable):
    """Untrusted service: its certificate, or ours, is not accepted; the message says why."""


class StartError(TrefoilError):
    """Failed start of a part on this machine."""


class PortInUse(StartError):
    """Port on which another process listens."""


class BinaryMissing(StartError):
    """Missing executable or shared library."""


ErrorT = TypeVar("ErrorT", bound=TrefoilError)


def system_words(error: Exception) -> str:
    """Words of the system for an error, without number and path; of another exception its own words."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def system_remedy(error: Exception, otherwise: str) -> str:
    """Remedy for an error of the system, else `otherwise`."""
    number = getattr(error, "errno", None) or 0
    return NO_NAME if number < 0 else SYSTEM_REMEDIES.get(number, otherwise)  # below 0: getaddrinfo's


def system_error(
    cls: type[ErrorT], error: Exception, did: str, target: object, *, field: str = "file", remedy: str, so: str = ""
) -> ErrorT:
    """Error of the system in one line.

    did: what failed: `be read`, `listen`. target: path or address. field: setting or flag that names it.
    remedy: for an error number that is not in `SYSTEM_REMEDIES`. so: consequence for the caller, empty to leave it out.
    """
    why = f"cannot {did} ({system_words(error)}){so and f': {so}'}"
    return cls(why, field=field, value=str(target), remedy=system_remedy(error, remedy))


def listen_error(error: OSError, address: str, field: str = "address") -> StartError:
    """Error of an address at which nothing can listen."""
    cls = PortInUse if error.errno == errno.EADDRINUSE else StartError
    return system_error(cls, error, "listen", address, field=field, remedy="use an address of this host")


@contextmanager
def in_one_line(folder: str = "") -> Iterator[None]:
    """Turn an error of the system that no part has turned into its own into one line. `folder`: in which all files are,
    named where the error names none.

    Raises:
        StartError: names the path, the system's words and a remedy. A broken pipe and a timeout keep their class.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno == errno.EPIPE:
            raise
        if not (target := error.filename2 or error.filename or folder):
            raise StartError(
                system_words(error), remedy=system_remedy(error, "see that this machine allows it")
            ) from error
        raise system_error(StartError, error, "be used", target, remedy="name one that is there") from error
    except RuntimeError as error:  # of Path.resolve, before Python 3.13
        if not str(error).startswith("Symlink loop"):
            raise
        raise StartError(str(error), remedy=SYSTEM_REMEDIES[errno.ELOOP]) from error


def neighbour(name: str, known: Iterable[str]) -> str:
    """Name that was probably meant, in any case: one that begins with it, else the one most like it; "" = none."""
    names, wanted = {other.lower(): other for other in sorted(known)}, name.lower()
    longer = [other for other in names if other.startswith(wanted)] if len(name) > 1 else []
    return next((names[other] for other in longer or get_close_matches(wanted, names, n=1)), "")


def one_of(known: Iterable[str], given: str = "", *, also: str = "", none: str = "none yet") -> str:
    """Remedy for a name that is not among those `known`: the one that was probably meant, and all of them.

    also: what else would do. none: what stands there where nothing is known.
    """
    names = list(filter(None, known))
    near = neighbour(given, names)
    every = f"use one of: {', '.join(names)}" if names else none
    return f"{f'did you mean {near}? Else ' if near else ''}{every}{also and f', or {also}'}"
