"""API key of another server, in a file that may change while the service runs."""

from pathlib import Path
from typing import Final

from trefoil.core.errors import SettingError
from trefoil.runtime.security.reread import Reread
from trefoil.runtime.security.secret_files import read_secret_file

HIDDEN: Final = "[key]"
"""Stands for the key where the server's words repeat it."""


class KeyFile:
    """Key of one server. What replaces it is read at the next use; while that cannot be read, the last key stays.

    `field`: setting that names the file. Raises SettingError: as `read_secret_file`, or it is not a key.
    """

    def __init__(self, path: Path, field: str) -> None:
        self._path, self._field = path, field
        self._key = Reread(field, self._read, lambda: (path,))
        self._sent = self._key.now

    def read(self) -> str:
        """The key as the file has it now."""
        self._sent = self._key.now
        return self._sent

    def hidden_in(self, text: str) -> str:
        """A text without the key that was read last."""
        return text.replace(self._sent, HIDDEN)

    def _read(self) -> str:
        key = read_secret_file(self._path, self._field)
        if not key.isascii() or not key.isprintable() or " " in key:
            why = "holds no key: a header takes printable ASCII without spaces"
            remedy = "put the server's API key there"
            raise SettingError(why, field=self._field, value=str(self._path), remedy=remedy)
        return key
