"""Files of the controller on its own disk: each is written beside and renamed, a broken one is set aside."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import structlog

from trefoil.core import errors
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.runtime import codec

T = TypeVar("T")


class DiskStore:
    """Store of JSON files in the controller's folder: written beside and renamed, a broken one is set aside."""

    def __init__(self, root: Path, decisions_max: int) -> None:
        self._root, self._decisions_max = root, decisions_max
        self._log = structlog.get_logger()
        try:
            (root / "decisions").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.StartError(
                f"cannot be created ({error.strerror})", field="state_dir", value=str(root), remedy="make it writable"
            ) from error

    def save(self, name: str, obj: Any) -> None:
        """Save one core dataclass, or plain JSON, under a name."""
        plain = codec.to_plain(obj)
        self._write(self._root / f"{name}.json", json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False))

    def save_all(self, name: str, objects: Iterable[Any]) -> None:
        """Save a list of core dataclasses under a name."""
        self.save(name, list(objects))

    def load(self, name: str, cls: type[T]) -> T | None:
        """Load what was saved under a name, None if nothing (readable) was."""
        tree = self._read(name)
        return None if tree is None else self._rebuilt(name, cls, tree)

    def load_all(self, name: str, cls: type[T]) -> tuple[T, ...]:
        """Load the list that was saved, empty if nothing (readable) was."""
        tree = self._read(name)
        found = [] if not isinstance(tree, list) else [self._rebuilt(name, cls, item) for item in tree]
        return tuple(item for item in found if item is not None)

    def load_plain(self, name: str) -> Mapping[str, Any]:
        """Load plain JSON, empty if nothing (readable) was saved."""
        tree = self._read(name)
        return tree if isinstance(tree, dict) else {}

    def save_decision(self, record: Any, plan: Any | None) -> None:
        """Save a decision record, and the plan it led to beside it; the oldest beyond `decisions_max` go."""
        self.save(f"decisions/{record.id}", record)
        if plan is not None:
            self.save(f"decisions/{record.id}.plan", plan)
        ids = self.decision_ids()
        for old in ids[: max(0, len(ids) - self._decisions_max)]:
            for suffix in (".json", ".plan.json"):
                (self._root / "decisions" / f"{old}{suffix}").unlink(missing_ok=True)

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
        return sorted(n for n in names if not n.endswith(".plan"))

    def _read(self, name: str) -> Any:
        path = self._root / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._set_aside(path, str(error))
            return None

    def _rebuilt(self, name: str, cls: type[T], tree: Any) -> T | None:
        try:
            return codec.from_plain(cls, tree, name)  # type: ignore[no-any-return]
        except errors.InvalidInput as error:
            self._set_aside(self._root / f"{name}.json", str(error))
            return None

    def _set_aside(self, path: Path, why: str) -> None:
        self._log.warning("unreadable file set aside; going on without it", path=str(path), error=why)
        try:
            path.replace(path.with_suffix(".broken"))
        except OSError as error:
            self._log.warning("cannot set it aside", path=str(path), error=str(error))

    def _write(self, path: Path, text: str) -> None:
        """Never leaves half a file; a full disk is reported and does not stop control."""
        beside = path.with_suffix(".tmp")
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            self._log.error("cannot write; a restart will not know this", path=str(path), error=str(error))
