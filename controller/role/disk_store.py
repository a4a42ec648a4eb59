"""Files of the controller on its own disk: replaced in one step, a broken one is set aside.

What has to be on the disk before it takes effect (plans, objectives, mode, routes, epoch, decisions) is saved by `save`
and `save_together`, which raise. What may be lost with a warning (budgets, counts, what a planner remembers) goes
through `save_later`, which waits in memory for room. `check` tests by writing whether there is room again.
What another controller needs to continue from here is noted in `uncopied`, until it is copied to Redis
(`kept_files.py`). Files that cannot be understood are set aside (`trefoil.runtime.state_files`) and noted in
`lost.json`: the copies in Redis bring them back, and `set_aside` reports the fate of each.
"""

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from controller.role.state_shapes import SHAPES
from trefoil.core import errors
from trefoil.core.plan import DecisionRecord, Plan, decision_order
from trefoil.runtime import codec
from trefoil.runtime.files import FileTrouble, disk_error, replace_files
from trefoil.runtime.state_files import BAD, STRANGE, names_set_aside, of_shape, read_state
from trefoil.runtime.telemetry import Metrics

T = TypeVar("T")
TRIAL: Final = "trial"
DECISION_ID: Final = re.compile(r"[0-9]+\.[0-9]+")
LOST_FILE: Final = "lost"
OWN: Final = frozenset({TRIAL, LOST_FILE, "epoch", "led", "accounting"})
"""What is of this disk alone: Redis knows epochs and what is accounted itself."""
CONSEQUENCE: Final = "the plan in force stays, nothing new is decided or accepted"
LOST: Final = "lost, unless Redis has a copy"
RESTORED: Final = "restored from the copy in Redis"
FORGOTTEN: Final = "what it held is forgotten"


class DiskStore:
    """Store of JSON files in the controller's folder."""

    def __init__(self, root: Path, decisions_max: int, metrics: Metrics | None = None) -> None:
        self._root, self._decisions_max = root, decisions_max
        self._trouble, self._metrics = FileTrouble("state_dir", CONSEQUENCE, metrics), metrics
        self._waiting: dict[str, str] = {}
        self._refused_chars = 0
        self._lock = threading.Lock()  # of what is noted: plans and decisions are saved in threads
        self.uncopied: dict[str, str] = {}
        """Text of files that have changed since they were copied to Redis, by name."""
        try:
            (root / "decisions").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "make it writable"
            raise errors.system_error(
                errors.StartError, error, "be made", root, field="state_dir", remedy=remedy
            ) from error

    @property
    def trouble(self) -> str:
        """Trouble of this disk: why nothing new can be kept; empty when all is kept."""
        return self._trouble.why

    def save(self, name: str, obj: Any) -> None:
        """Save one core dataclass, or plain JSON, under a name. Raises as `save_together`."""
        self.save_together({name: obj})

    def save_all(self, name: str, objects: Iterable[Any]) -> None:
        """Save a list of core dataclasses under a name. Raises as `save_together`."""
        self.save(name, list(objects))

    def save_together(self, values: Mapping[str, Any]) -> None:
        """Save values, all or none.

        Raises:
            errors.DiskUnavailable: the disk holds what it held before.
        """
        texts = {name: _text(value) for name, value in values.items()}
        before = {name: self._present_text(name) for name in texts} if len(texts) > 1 else {}
        try:
            self._replace(texts)
        except errors.DiskUnavailable:
            self._refused_chars = sum(map(len, texts.values()))
            for name, text in before.items():  # where it failed between two of them
                if text is None:
                    self._forget(name)
                elif self._present_text(name) != text:
                    self._waiting[name] = text
            raise

    def save_later(self, name: str, obj: Any) -> None:
        """Save a value that may be lost with a word: where the disk refuses, the newest waits until it does not."""
        with contextlib.suppress(errors.DiskUnavailable):  # said by `_replace`
            self._waiting[name] = _text(obj)
            self._replace({name: self._waiting[name]})

    def check(self) -> None:
        """Check that there is room again, where there was none: write what waits, and as much as was refused.

        Raises:
            errors.DiskUnavailable: there is not.
        """
        if self.trouble:
            self._replace({**self._waiting, TRIAL: " " * self._refused_chars})
            self._forget(TRIAL)

    def _replace(self, texts: Mapping[str, str]) -> None:
        paths = {self._path(name): text for name, text in texts.items()}
        try:
            replace_files(paths)
        except OSError as error:
            raise self._trouble.begin(next(iter(paths)), error) from error
        with self._lock:
            for name in texts:
                self._waiting.pop(name, None)
            self.uncopied |= {name: text for name, text in texts.items() if _is_copied(name)}
            if not self._waiting:
                self._trouble.end()

    def _forget(self, name: str) -> None:
        with contextlib.suppress(OSError):  # a disk that lets nothing be deleted lets nothing be written: said then
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._root / f"{name}.json"

    def _present_text(self, name: str) -> str | None:
        try:
            return self._path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def copy_all(self) -> None:
        """Note every file that others need as not copied."""
        names = [path.stem for path in self._root.glob("*.json") if _is_copied(path.stem)]
        with self._lock:
            self.uncopied = {name: text for name in sorted(names) if (text := self._present_text(name)) is not None}

    def copied(self, name: str, text: str) -> None:
        """Note that this text of a file was copied to Redis."""
        with self._lock:
            if self.uncopied.get(name) == text:
                del self.uncopied[name]

    def replace_all(self, texts: Mapping[str, str], keep: Collection[str] = ()) -> None:
        """Replace all files that others need by those that another controller left, but for those to keep.

        Raises:
            errors.DiskUnavailable: the disk does not take them.
        """
        self._replace(texts)
        for path in self._root.glob("*.json"):
            if _is_copied(path.stem) and path.stem not in texts and path.stem not in keep:
                self._forget(path.stem)

    def check_shapes(self) -> None:
        """Check every file, so that what cannot be understood is set aside, and restored, before anything is begun.

        Raises:
            errors.DiskUnavailable: the disk does not give one.
            errors.StartError: one is of a newer version.
        """
        for name in SHAPES:
            self._read(name)

    def fits(self, name: str, text: str) -> bool:
        """Whether a text can be the content of a file that is copied."""
        try:
            of_shape(SHAPES[name], codec.parse_json(text))
        except STRANGE:
            return False
        return True

    def restore(self, texts: Mapping[str, str]) -> list[str]:
        """Restore those of the files that were lost; returns which. Raises as `save_together`."""
        fates = dict(self.load_plain(LOST_FILE))
        found = {name: text for name, text in texts.items() if fates.get(name) == LOST}
        if found:
            self._replace({**found, LOST_FILE: _text(fates | dict.fromkeys(found, RESTORED))})
        return list(found)

    def lost(self) -> set[str]:
        """Names of files that were set aside, and that a copy can still bring back."""
        return {name for name, fate in self.load_plain(LOST_FILE).items() if fate == LOST}

    def forget_lost(self) -> None:
        """Forget what is still lost: from here on this disk is what counts."""
        fates = self.load_plain(LOST_FILE)
        if LOST in fates.values():
            self.save_later(LOST_FILE, {n: FORGOTTEN if fate == LOST else fate for n, fate in fates.items()})

    def set_aside(self) -> list[str]:
        """Files that were set aside, a line each, for as long as they lie there."""
        names = [path.removesuffix(".json") for path in names_set_aside(self._root)]
        fates = self.load_plain(LOST_FILE) if names else {}
        return [
            f"{name}.json could not be understood and stands aside as {name}.json{BAD}: {fates.get(name, FORGOTTEN)}. "
            "Remedy: check what operators had set, then remove that file"
            for name in names
        ]

    def load(self, name: str, cls: type[T]) -> T | None:
        """Load what was saved under a name, None if nothing (readable) was."""
        found: T | None = self._read(name, cls)
        return found

    def load_all(self, name: str, cls: type[T]) -> tuple[T, ...]:
        """Load the list that was saved, empty if nothing (readable) was."""
        found: tuple[T, ...] = self._read(name, tuple[cls, ...]) or ()  # type: ignore[valid-type]
        return found

    def load_plain(self, name: str) -> Mapping[str, Any]:
        """Load plain JSON of its shape, empty if nothing (readable) was saved."""
        found: Mapping[str, Any] | None = self._read(name)
        return found or {}

    def save_decision(self, record: Any, plan: Any | None) -> None:
        """Save a decision record, and the plan it led to beside it; the oldest beyond `decisions_max` go.
        Raises as `save_together`.
        """
        name = f"decisions/{record.id}"
        self.save_together({name: record} | ({f"{name}.plan": plan} if plan is not None else {}))
        ids = self.decision_ids()
        for old in ids[: max(0, len(ids) - self._decisions_max)]:
            for suffix in ("", ".plan"):
                self._forget(f"decisions/{old}{suffix}")

    def decision(self, name: str) -> tuple[DecisionRecord, Plan | None] | None:
        """Decision record that is kept ("" = the newest), and the plan that the planner made; None: there is none."""
        ids = self.decision_ids()
        name = name or (ids[-1] if ids else "")
        if name not in ids:  # also keeps a name from leaving the folder
            return None
        record = self.load(f"decisions/{name}", DecisionRecord)
        return None if record is None else (record, self.load(f"decisions/{name}.plan", Plan))

    def decision_ids(self) -> list[str]:
        """Ids of all decisions on disk, oldest first."""
        names = [p.name.removesuffix(".json") for p in (self._root / "decisions").glob("*.json")]
        return sorted((name for name in names if DECISION_ID.fullmatch(name)), key=decision_order)

    def _read(self, name: str, cls: Any = None) -> Any:
        path = self._path(name)
        stood = os.path.lexists(path)
        try:
            found = read_state(path, partial(_of_its_shape, name, cls), self._metrics)
        except OSError as error:  # what is on it may be whole: not to be taken for lost, and not to be set aside
            raise disk_error(path, error, "read", "without it nothing can be known of what was in force") from error
        if found is None and stood and "/" not in name and name != LOST_FILE:
            self.save_later(LOST_FILE, {**self.load_plain(LOST_FILE), name: LOST})
        return found


def _of_its_shape(name: str, cls: Any, tree: Any) -> Any:
    """What was asked for; plain JSON where no class was."""
    found = of_shape(cls or SHAPES[name], tree)
    return tree if cls is None else found


def _is_copied(name: str) -> bool:
    return name not in OWN and "/" not in name


def _text(value: Any) -> str:
    return codec.json_text(value, indent=1)
