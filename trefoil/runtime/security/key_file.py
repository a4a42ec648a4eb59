"""API key of another server, in a file that may change while the service runs."""

import os
from pathlib import Path

import structlog

from trefoil.core.errors import SettingError
from trefoil.runtime.config import read_secret_file

LOG = structlog.get_logger()
HIDDEN = "[key]"
"""Stands for the key where the server's words repeat it."""


class KeyFile:
    """Key of one server. What replaces it is read at the next use; while that cannot be read, the last key stays.

    `field`: setting that names the file. Raises SettingError: as `read_secret_file`, or it is no key.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path, self._field = path, field
        self._stamp = self._stamp_now()
        self._key = self._read()

    def read(self) -> str:
        """The key as the file has it now."""
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._key = self._read()
            except SettingError as error:
                LOG.warning("the last key of a server stays: its file is not taken", why=str(error))
        return self._key

    def hidden_in(self, text: str) -> str:
        """A text without the key."""
        return text.replace(self._key, HIDDEN)

    def _read(self) -> str:
        key = read_secret_file(self._path, self._field)
        if not key.isascii() or not key.isprintable() or " " in key:
            why, remedy = (
                "holds no key: a header takes printable ASCII without spaces",
                "put the server's API key there",
            )
            raise SettingError(why, field=self._field, value=str(self._path), remedy=remedy)
        return key

    def _stamp_now(self) -> tuple[int, ...]:
        try:
            seen = os.stat(self._path)
        except OSError:
            return ()
        return seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_mode
