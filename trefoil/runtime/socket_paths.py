"""Where Unix sockets go: the kernel's path of one is short, a state directory's may be long."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

SOCKET_PATH_MAX: Final = 100  # sun_path holds 107 bytes; a little is left for suffixes


def socket_folder(inside: Path, name: str, of: Path) -> Path:
    """`inside`, where the path of a socket `name` in it is short enough; else a folder under the temporary one that
    belongs to `of` alone. It is not made."""
    return inside if len(os.fsencode(inside / name)) <= SOCKET_PATH_MAX else temporary_folder(of)


def temporary_folder(of: Path) -> Path:
    """The folder of this user's under the temporary one that belongs to `of` alone."""
    digest = hashlib.sha256(os.fsencode(of)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"trefoil-{os.getuid()}-{digest}"
