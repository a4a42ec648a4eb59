"""State files: what a service keeps on its disk, read back by one reader. docs/state.md lists them.

A file that is missing begins empty. One that cannot be understood (torn, binary, of another shape, not a regular file,
too large) is set aside as NAME.bad with one warning. Its owner continues as docs/state.md says for it. One of a newer
version is left untouched and refused by name. One that the disk does not give is neither: it may be whole.

Version 1 is not written: an object with a number above VERSION under "version" is of a newer Trefoil.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from trefoil.core import errors
from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.outside.plausible import EPOCH_MAX
from trefoil.core.plan import DecisionRecord, NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.files import NotPlain, read_plain

T = TypeVar("T")
VERSION: Final = 1
BYTES_MAX: Final = 256 * 2**20  # the largest, an agent's energy log of ten minutes of 16 devices, has some 30 MiB
IDENTITIES: Final[Mapping[type, str]] = {
    Objective: "family", Plan: "revision", NodePlan: "node", NodeStatus: "node", DecisionRecord: "id",
}  # fmt: skip
STRANGE: Final = (errors.InvalidInput, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
BAD: Final = ".bad"
BAD_KEPT: Final = 3  # of each file; later ones replace the last of them


class Counters(Protocol):
    """Counters of a service: trefoil.runtime.telemetry.Metrics."""

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter."""


def read_state(path: Path, parse: Callable[[Any], T], metrics: Counters | None = None) -> T | None:
    """Read the value that `parse` makes of the file's JSON; None: there is none, or it was set aside.

    Raises:
        errors.StartError: it is of a newer version.
        OSError: the disk does not give it.
    """
    data = read_bytes(path, metrics)
    if data is None:
        return None
    try:
        return _parsed(path, data, parse)
    except STRANGE as error:
        set_aside(path, str(error), metrics)
        return None


def read_lines(path: Path, parse: Callable[[Any], T], metrics: Counters | None = None) -> tuple[list[T], int]:
    """Read what stands on each line, and how many lines are passed over: those that a crash or a failing disk has torn,
    or that hold something else. A file of which no line can be read is set aside.

    Raises: as `read_state`.
    """
    found, strange, why = list[T](), 0, ""
    for line in (read_bytes(path, metrics) or b"").split(b"\n"):
        try:
            if line.strip():
                found.append(_parsed(path, line, parse))
        except STRANGE as error:
            strange, why = strange + 1, why or str(error)
    if strange and not found:
        set_aside(path, why, metrics)
    return found, strange


def _parsed(path: Path, data: bytes, parse: Callable[[Any], T]) -> T:
    tree = codec.parse_json(data)
    refuse_newer(path, tree)
    return parse(tree)


def of_shape(cls: Any, tree: Any) -> Any:
    """Value of an annotated type, which says whose it is: an empty list or object stands for what was lost. What other
    services read has to be what its message can carry.

    Raises:
        errors.InvalidInput: it is something else.
    """
    found = codec.from_plain(cls, tree, getattr(cls, "__name__", "value"))
    for one in found if isinstance(found, tuple) else (found,):
        name = IDENTITIES.get(type(one))
        if name is not None and getattr(one, name) in ("", Revision()):
            raise errors.InvalidInput("missing", field=f"{type(one).__name__}.{name}")
        if type(one) in codec.MESSAGES:
            _require_message(one)
    if found == ():
        raise errors.InvalidInput("an empty list, which is never written")
    return found


def _require_message(value: Any) -> None:
    """Require that a value can be sent: JSON holds numbers that no message does, and that no reader would accept."""
    try:
        codec.decode(type(value), codec.encode(value))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise errors.InvalidInput(f"cannot be sent: {error!s:.200}", field=type(value).__name__) from error


def as_epoch(tree: object) -> int:
    """Number of an epoch. Raises TypeError, ValueError: it cannot be one."""
    if type(tree) is not int:
        raise TypeError("no whole number")
    if not 0 <= tree <= EPOCH_MAX:
        raise ValueError(f"{tree} is not from 0 to {EPOCH_MAX}")
    return tree


def read_bytes(path: Path, metrics: Counters | None = None) -> bytes | None:
    """Read a state file; None: there is none, or what stands there is no file that is read, and was set aside.

    Raises:
        OSError: the disk does not give it.
    """
    try:
        return read_plain(path, BYTES_MAX)
    except FileNotFoundError:
        return None
    except NotPlain as error:
        set_aside(path, str(error), metrics)
        return None


def refuse_newer(path: Path, tree: Any) -> None:
    """Refuse what a newer version has written.

    Raises:
        errors.StartError: names file, version and remedy.
    """
    version = tree.get("version") if isinstance(tree, dict) else None
    if isinstance(version, int | float) and version > VERSION:
        raise errors.StartError(
            f"written by a newer Trefoil: version {version:.15g}, this one reads up to {VERSION}; it is left as it is",
            field="file", value=str(path), remedy="start the newer Trefoil, or move the file away to begin without it",
        )  # fmt: skip


def set_aside(path: Path, why: str, metrics: Counters | None = None) -> str:
    """Set a file aside as NAME.bad, NAME.bad.1, ...; returns its name there, "" where the disk refuses."""
    import structlog

    log = structlog.get_logger()
    names = [path.with_name(f"{path.name}{BAD}{f'.{n}' if n else ''}") for n in range(BAD_KEPT)]
    place = next((name for name in names if not name.exists()), names[-1])
    if metrics is not None:
        metrics.inc("trefoil_state_files_set_aside_total", file=path.name)
    try:
        replaced = place.exists()
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        path.replace(place)
    except OSError as error:
        log.warning("unreadable state file cannot be set aside", path=str(path), why=why, error=str(error))
        return ""
    log.warning("unreadable state file set aside", path=str(path), as_=place.name, why=why, replaced=replaced)
    return place.name


def names_set_aside(folder: Path) -> list[str]:
    """Names of the files of a folder that stand aside."""
    return sorted({path.name.rpartition(BAD)[0] for path in folder.glob(f"*{BAD}*")})
