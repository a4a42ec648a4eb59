"""Files that are read again when they change: certificates, secrets, keys and tenants."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from trefoil.core.errors import TrefoilError

T = TypeVar("T")
Stamp = tuple[int, int, int]


class Reread(Generic[T]):
    """Value of files, read again at the first look after one of them changed. A change that cannot be used is logged
    once and named by `trouble`; the value before it stays in force until the files change again.

    `what` names the files in logs. `paths` are those that the last reading depended on.
    """

    def __init__(self, what: str, read: Callable[[], T], paths: Callable[[], Iterable[Path]]) -> None:
        """Read for the first time; raises what `read` raises."""
        self.what, self.trouble = what, ""
        self._read, self._paths = read, paths
        self._seen: dict[Path, Stamp | None] = {}
        self._value = self._settled()

    @property
    def now(self) -> T:
        """Value in force."""
        if self._seen == self._stamps():
            return self._value
        import structlog  # commands, which seldom come here, start without it

        before, trouble = self._value, self.trouble
        try:
            self._value = self._settled()
        except TrefoilError as error:
            self.trouble = str(error)
            if self.trouble != trouble:
                structlog.get_logger().warning(f"{self.what}: the change is not used", why=self.trouble)
        else:
            self.trouble = ""
            if trouble or self._value != before:
                structlog.get_logger().info(f"{self.what}: the change is in use")
        return self._value

    def _settled(self) -> T:
        """Read until every file that the value depends on was stamped before it was read."""
        while True:
            self._seen = self._stamps()
            value = self._read()
            if self._stamps().keys() <= self._seen.keys():
                return value

    def _stamps(self) -> dict[Path, Stamp | None]:
        return {path: _stamp(path) for path in self._paths()}


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # `read` names the reason
    return stat.st_ino, stat.st_ctime_ns, stat.st_size
