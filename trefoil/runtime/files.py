"""Files that are whole or as before, on a disk that may be full, read-only or failing: replaced, or appended by lines.
Files that others give are opened as plain ones of bounded size, whatever stands at their name (`open_plain`).

What comes of a file that cannot be written is for its owner to say; `FileTrouble` says it once, and when it is over.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from trefoil.core import errors

COLLAPSE_RANGE: Final = 0x08  # modes of fallocate(2)
PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
REMEDY: Final = "make room on that disk, or fix it or its permissions"
GOES_ON: Final = "; nothing needs to be started again"


class Gauges(Protocol):
    """Gauges of a service: trefoil.runtime.telemetry.Metrics."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""


class NotPlain(Exception):
    """A file that is not read: no regular file, too large, or outside of the folder that it has to lie in."""


@contextlib.contextmanager
def open_plain(path: Path, bytes_max: int, below: Path | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; `below`: folder that it has to be in once all links are followed.

    What stands at the name is looked at by a descriptor that opens nothing (O_PATH), and read by that same descriptor:
    a FIFO does not block, a device is not touched, and a link that is changed meanwhile leads nowhere else.

    Raises:
        NotPlain: why it is not read.
        OSError: there is none, or the disk refuses.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        found, own = os.fstat(place), f"/proc/self/fd/{place}"
        if below is not None and not (where := Path(os.readlink(own))).is_relative_to(below.resolve()):
            raise NotPlain(f"leads to {where}, which is not below {below}")
        if not stat.S_ISREG(found.st_mode):
            raise NotPlain("is not a regular file")
        if found.st_size > bytes_max:
            raise NotPlain(f"has {found.st_size} bytes, at most {bytes_max} are read")
        with open(own, "rb") as file:
            yield file
    finally:
        os.close(place)


def open_regular(path: Path, flags: int = os.O_RDONLY, bytes_max: int = 2**63) -> int:
    """Open a regular file of one's own, of at most so many bytes; returns its descriptor. A FIFO does not block.

    Raises:
        OSError: the disk refuses, or something else stands there.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > bytes_max:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"is not a regular file of at most {bytes_max} bytes", str(path))
    return descriptor


def read_plain(path: Path, bytes_max: int, below: Path | None = None) -> bytes:
    """Read a whole regular file. Raises as `open_plain`."""
    with open_plain(path, bytes_max, below) as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise NotPlain(f"has more than {bytes_max} bytes")
    return data


def replace_file(path: Path, content: str | bytes, sync: bool = True, mode: int = 0o644) -> None:
    """Replace a file in one step: written beside, synced, renamed. Blocks for the sync, which only the loss of power
    needs. `mode`: who may do what with it, at every moment.

    Raises:
        OSError: the file is as it was before, and nothing is left beside it.
    """
    replace_files({path: content}, sync, mode)


def replace_files(contents: Mapping[Path, str | bytes], sync: bool = True, mode: int = 0o644) -> None:
    """Replace files of one disk together: all are written beside and synced before the first is renamed.

    Raises:
        OSError: nothing was replaced, unless the disk failed between two renames; nothing is left beside them.
    """
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}.new") for path in contents}
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(beside[path], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                _write_all(descriptor, data)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for path in contents:
            os.replace(beside[path], path)
    except OSError:
        for left in beside.values():
            with contextlib.suppress(OSError):  # of a read-only disk: there is nothing to take away
                left.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in contents} if sync else ():
        _sync_folder(folder)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        written = os.write(descriptor, data)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]


def _sync_folder(folder: Path) -> None:
    """Make renames durable. They are done: a failure here could only be reported by calling them undone."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def in_place(path: Path, descriptor: int) -> bool:
    """Whether an open file is still what its path names: false where it was deleted, moved or replaced meanwhile."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the disk fails: what is written says so
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def rotate_log(path: Path, bytes_max: int) -> None:
    """Move what a log holds to `<path>.1` once it is larger than `bytes_max`, while its writers append to it.

    The bytes are copied, then one system call cuts exactly these off the front of the file: no line is lost, and no
    writer has to be told. It cuts whole blocks, so a few KiB stay, from the middle of a line on. A file system without
    that call (ext4 and XFS have it) gets a hole there: readers see NULs, the disk has the room. Where it can do neither
    (NFS before 4.2), what was written between copy and cut is lost. Of a log that is twice as large already, `.1` gets
    the last `2 * bytes_max` bytes: the rest would have been dropped by a rotation in between.

    Raises:
        OSError: the log cannot be read or moved, and is as it was. A full disk is none: it is cut without its copy.
    """
    try:
        log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size, block = os.fstat(log).st_size, os.fstatvfs(log).f_bsize
        end = max(0, size - 1) // block * block
        if size <= bytes_max or not end or size - (begin := os.lseek(log, 0, os.SEEK_DATA)) <= bytes_max:
            return
        _copy_out(log, max(begin, end - 2 * bytes_max), end, path.with_name(f"{path.name}.1"))
        if not (_fallocate(log, COLLAPSE_RANGE, end) or _fallocate(log, PUNCH_HOLE_KEEP_SIZE, end)):
            os.ftruncate(log, 0)
    finally:
        os.close(log)


def _copy_out(log: int, begin: int, end: int, path: Path) -> None:
    """Copy a part of a log over an older one. Where the disk is full, the rest is left out: services need the room."""
    mode = stat.S_IMODE(os.fstat(log).st_mode)
    copy = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        while begin < end and (sent := os.sendfile(copy, log, begin, end - begin)):
            begin += sent
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    finally:
        os.close(copy)


def _fallocate(file: int, mode: int, length: int) -> bool:
    """Whether the file system changed the first bytes of a file this way."""
    length_c = ctypes.c_longlong(length)
    return bool(ctypes.CDLL(None).fallocate64(file, mode, ctypes.c_longlong(0), length_c) == 0)


class LineFile:
    """File of lines, each appended by one system call: a SIGKILL leaves whole lines, and half a line is taken back."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path, self._mode = path, mode
        self._file: int | None = None
        self.size = 0

    def append(self, line: bytes) -> None:
        """Append a line (without its newline). A torn one of a predecessor is ended first; a file that was deleted or
        moved away meanwhile begins again.

        Raises:
            OSError: the line is not there.
        """
        if self._file is not None and not in_place(self.path, self._file):
            self.close()
        if self._file is None:
            self._open()
        assert self._file is not None
        data = line + b"\n"
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # then it is a torn line, which readers pass over and `_open` ends
                os.ftruncate(self._file, self.size)
            self.close()
            raise
        self.size += len(data)

    def restart(self) -> None:
        """Empty the file. Raises OSError."""
        self.close()
        self._open(os.O_TRUNC)

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _open(self, flags: int = 0) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | flags, self._mode)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                size += os.write(file, b"\n")
        except OSError:
            os.close(file)
            raise
        self._file, self.size = file, size


def disk_error(path: Path, error: OSError, verb: str, consequence: str) -> errors.DiskUnavailable:
    """Error of a file that the disk refuses to have read or written, and what comes of it."""
    found = errors.system_error(errors.DiskUnavailable, error, f"be {verb}", path, remedy=REMEDY, so=consequence)
    return errors.DiskUnavailable(found.message, field=found.field, value=found.value, remedy=found.remedy + GOES_ON)


class FileTrouble:
    """Trouble of one file of a service: logged once when it begins and once when it is over, and shown as a metric."""

    def __init__(self, name: str, consequence: str, gauges: Gauges | None = None) -> None:
        """name: as the metric's label `file`; consequence: what comes of it meanwhile, in words."""
        self._name, self._consequence, self._gauges = name, consequence, gauges
        self.why = ""
        """Why it cannot be written; empty when it can."""
        self._show()

    def begin(self, path: Path, error: OSError) -> errors.DiskUnavailable:
        """Note that the file cannot be written; returns the error for those who have to be refused for it."""
        refusal = disk_error(path, error, "written", self._consequence)
        if not self.why:
            import structlog

            structlog.get_logger().error("disk", file=self._name, why=str(refusal))
        self.why = str(refusal)
        self._show()
        return refusal

    def end(self) -> None:
        """Note that it can be written (again)."""
        if self.why:
            self.why = ""
            import structlog

            structlog.get_logger().info("disk: written again", file=self._name)
            self._show()

    def _show(self) -> None:
        if self._gauges is not None:
            self._gauges.set("trefoil_disk_trouble", float(bool(self.why)), file=self._name)
