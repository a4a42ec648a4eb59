"""Paths of Unix sockets: the kernel's are short, a state directory's may be long."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

SOCKET_PATH_MAX: Final = 100  # sun_path holds 107 bytes; a little is left for suffixes


def socket_folder(inside: Path, name: str, of: Path) -> Path:
    """Folder for a socket `name`: `inside` if its path is short enough there, else the temporary one of `of`."""
    return inside if len(os.fsencode(inside / name)) <= SOCKET_PATH_MAX else temporary_folder(of)


def temporary_folder(of: Path) -> Path:
    """Folder of this user's under the temporary one that belongs to `of` alone."""
    digest = hashlib.sha256(os.fsencode(of)).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"trefoil-{os.getuid()}-{digest}"
