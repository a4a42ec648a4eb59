"""Secrets in files that only their owner and group may read. A running service follows a file that changes."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, SecretStr

from trefoil.core import errors
from trefoil.runtime.security.reread import Reread

SECRET_BYTES_MAX: Final = 4096
OVERLAP: Final = 2
"""Lines of a token's file while the token is being replaced: the first is sent, both are accepted."""
Check = Callable[[str, str], None]
"""Refuses a new secret of a running service by SettingError; gets the one of its start, then the new one."""


class FileSecret(SecretStr):
    """Secret of a file: always its value in force, also after the file has changed."""

    def __init__(self, path: Path, field: str, lines_max: int = 1, check: Check | None = None) -> None:
        """Read the file; raises SettingError as `read_secret_lines`."""
        self.path, self._field, self._lines_max, self._check = path, field, lines_max, check
        self._first = ""
        self.file: Reread[Sequence[str]] = Reread(field, self._read, lambda: (path,))
        self._first = self.file.now[0]

    @property
    def _secret_value(self) -> str:  # type: ignore[override]
        return self.file.now[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and self.get_secret_value() == other.get_secret_value()

    __hash__ = SecretStr.__hash__

    def _read(self) -> Sequence[str]:
        lines = read_secret_lines(self.path, self._field, self._lines_max)
        if self._check is not None and self._first:
            self._check(self._first, lines[0])
        return lines


def accepted(secret: SecretStr) -> Sequence[str]:
    """Values that count as this secret: both lines of its file while it is being replaced."""
    return secret.file.now if isinstance(secret, FileSecret) else (secret.get_secret_value(),)


def secret_files(settings: BaseModel) -> list[Reread[Sequence[str]]]:
    """Files of the secrets that settings name, also those of tables in them."""
    found: list[Reread[Sequence[str]]] = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        for each in value if isinstance(value, tuple) else (value,):
            found += [each.file] if isinstance(each, FileSecret) else []
            found += secret_files(each) if isinstance(each, BaseModel) else []
    return found


def only_password_differs(before: str, url: str) -> None:
    """Check that a URL of Redis differs from the one before in user and password alone.

    Raises:
        errors.SettingError: it has another scheme, host, port, path or options; shows none of the two.
    """
    try:
        same = _without_password(before) == _without_password(url)
    except ValueError:  # brackets around what is not an IPv6 address
        same = False
    if not same:
        remedy = "write the same URL with the new password, or restart the service"
        raise errors.SettingError("more than the password has changed", field="redis_url", remedy=remedy)


def _without_password(url: str) -> tuple[object, ...]:
    parts = urlsplit(url)
    options = [option for option in parse_qsl(parts.query) if not option[0].endswith(("username", "password"))]
    return parts.scheme, parts.netloc.rpartition("@")[2], parts.path, options


def read_secret_file(path: Path, field: str, lines_max: int = 1) -> str:
    """Read a secret, the first line of a file that only its owner and group may read.

    `field` names the setting in errors.

    Raises:
        errors.SettingError: as `read_secret_lines`.
    """
    return read_secret_lines(path, field, lines_max)[0]


def read_secret_lines(path: Path, field: str, lines_max: int = 1) -> Sequence[str]:
    """Read secrets, one a line, from a file that only its owner and group may read.

    Raises:
        errors.SettingError: it cannot be read, is empty or no secret, or others may read it; never shows what it holds.
    """

    def refuse(why: str, remedy: str) -> errors.SettingError:
        return errors.SettingError(why, field=field, value=str(path), remedy=remedy)

    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # as of a pipe
            kind = os.fstat(file.fileno()).st_mode
            data = file.read(SECRET_BYTES_MAX + 1) if stat.S_ISREG(kind) else b""
    except OSError as error:
        remedy = "name a text file that this user may read"
        raise errors.system_error(errors.SettingError, error, "be read", path, field=field, remedy=remedy) from error
    if not stat.S_ISREG(kind):
        raise refuse("is not a file", "name a text file")
    if kind & stat.S_IRWXO:
        raise refuse(f"others may read or change it (mode {stat.S_IMODE(kind):04o})", f"chmod o= {path}")
    try:
        lines = data.decode().strip().splitlines()
    except UnicodeDecodeError:
        lines = []
    if not 1 <= len(lines) <= lines_max or not all(lines) or len(data) > SECRET_BYTES_MAX:
        length = "one line of text" if lines_max == 1 else f"at most {lines_max} lines of text, none of them empty"
        why = f"holds no secret: {length}, at most {SECRET_BYTES_MAX} bytes"
        raise refuse(why, "put the secret there, nothing else")
    return lines
