"""Names in a model repository: checked, resolved and opened here; the repository is not trusted.

Names of families, models, variants and files follow one pattern. A file is a regular one of bounded size, and lies
below its repository once all links are followed: links within a repository are fine, links out of it are refused. The
folder of a family, and `_shared`, may be links that an operator has set; then their files are below where they lead.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from trefoil.core.errors import CatalogError
from trefoil.runtime.files import NotPlain, open_plain, read_plain

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
STAGE_NAME: Final = re.compile(NAME[:-1] + r"(@[0-9]{1,4}of[0-9]{1,4})?$")
FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,254}")
CONFIG_BYTES_MAX: Final = 2**20
TOML_BYTES_MAX: Final = 2**17  # 256 variants of 400 bytes
PROFILE_BYTES_MAX: Final = 2**24
ONNX_BYTES_MAX: Final = 2**31  # of the graph, as protobuf bounds it; larger weights are external data
FILE_BYTES_MAX: Final = 2**38
PART_BYTES: Final = 2**20  # of a file that is not read at once
BATCH_MAX: Final = 2**16
FILES_MAX: Final = 256  # of one version, or of one kind in a folder
FOLDERS_DEEP_MAX: Final = 8  # in a version's folder
COMPILED: Final = "__pycache__"
FAMILIES_MAX: Final = 1024
VERSION_MAX: Final = 999_999_999
VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")
LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"
REMEDY: Final = "put a regular file there, below the repository"


def check_name(name: str, field: str) -> str:
    """Check the name of a family, model or variant; returns it.

    Raises:
        CatalogError: it could be a path, or is too long.
    """
    if not STAGE_NAME.fullmatch(name):
        remedy = "use letters, digits, '.', '_' and '-', at most 128, the first a letter or digit"
        raise CatalogError("is not a name", field=field, value=name, remedy=remedy)
    return name


def check_file_name(name: str, field: str) -> str:
    """Check the name of a file in its folder; returns it.

    Raises:
        CatalogError: it could lead elsewhere.
    """
    if not FILE_NAME.fullmatch(name):
        raise CatalogError("is not a file name", field=field, value=name, remedy="name a file there")
    return name


def boundary(repository: Path, name: str) -> Path:
    """Folder below which all files of a family (or of `_shared`) have to lie."""
    folder = repository / name
    return folder.resolve() if folder.is_symlink() else repository.resolve()


@contextmanager
def opened(path: Path, below: Path | None, bytes_max: int) -> Iterator[BinaryIO]:
    """Open a file of a repository for reading.

    Raises:
        CatalogError: it is none that is read, or Git LFS has left a pointer to it there; names it.
        OSError: there is none, or it cannot be read.
    """
    try:
        with open_plain(path, bytes_max, below) as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CatalogError(
                    "is a pointer of Git LFS, not the file", field="file", value=str(path), remedy="git lfs pull there"
                )
            file.seek(0)
            yield file
    except NotPlain as error:
        raise CatalogError(str(error), field="file", value=str(path), remedy=REMEDY) from error


def read_text(path: Path, below: Path | None, bytes_max: int) -> str:
    """Read a text of a repository. Raises as `opened`, and UnicodeDecodeError."""
    try:
        return read_plain(path, bytes_max, below).decode("utf-8-sig")
    except NotPlain as error:
        raise CatalogError(str(error), field="file", value=str(path), remedy=REMEDY) from error


def parts_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """First `size` bytes of a file, part by part: one that grows while it is read has no end."""
    while part := file.read(min(PART_BYTES, size)):
        size -= len(part)
        yield part


def resolved(path: Path, below: Path) -> Path:
    """Place of a file, all links followed. Raises as `opened`."""
    with opened(path, below, FILE_BYTES_MAX) as file:
        return Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))


def check_files(folder: Path, below: Path, apart: Sequence[str] = ()) -> tuple[Path, ...]:
    """Check all files of a version's folder and of the folders in it. Left out are hidden ones, what Python compiled,
    and files of these names beside the model.

    Raises:
        CatalogError: one leads out, is not a regular file, has no name of a file, or there are too many.
        OSError: they cannot be listed.
    """
    found = []
    for path in _files_below(folder, apart, folder):
        found.append(path)
        if len(found) > FILES_MAX:
            raise CatalogError(
                f"has more than {FILES_MAX} files", field="folder", value=str(folder), remedy="remove the others"
            )
    for path in found:
        resolved(path, below)
    return tuple(sorted(path.absolute() for path in found))


def _files_below(folder: Path, apart: Sequence[str], top: Path) -> Iterator[Path]:
    if len(folder.parts) - len(top.parts) > FOLDERS_DEEP_MAX:
        remedy = f"at most {FOLDERS_DEEP_MAX} folders inside each other"
        raise CatalogError("is too deep", field="folder", value=str(folder), remedy=remedy)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name[0] == "." or entry.name == COMPILED or (entry.name in apart and folder == top):
                continue
            check_file_name(entry.name, f"{folder}: file")
            if entry.is_dir():
                yield from _files_below(folder / entry.name, apart, top)
            else:
                yield folder / entry.name


def names_below(folder: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Files of a version by their names from its folder: `model.onnx`, `weights/part0`."""
    return {str(file.relative_to(folder.absolute())): file for file in files}


def check_place(place: str, field: str) -> str:
    """Check the place of a file in its folder, as in `weights/part0`; returns it without `./`.

    Raises:
        CatalogError: it could lead elsewhere.
    """
    parts = PurePosixPath(place).parts
    for part in parts or (place,):
        if not FILE_NAME.fullmatch(part):
            raise CatalogError("is not a file beside the model", field=field, value=place, remedy="name a file there")
    return "/".join(parts)
