"""What an agent must not forget: written before each step, so that its successor finishes or rolls back.

One line of JSON per entry under `<state>/journal.jsonl`, each with the boot and driver-load id it was true for:
GPU instances and processes of another load are void, the plan and the epochs are not. The driver and the process list
stay the truth of what exists; the journal says which of it is ours, of which generation, and what it ought to serve.
A torn last line (power loss) is dropped. The file is compacted at each start and every few thousand lines.
"""

import asyncio
import fcntl
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from trefoil.core.common import Revision
from trefoil.core.errors import StartError
from trefoil.core.fleet import Hosted, SliceKey, SliceState, Step
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec

LINES_MAX: Final = 5000


@dataclass(frozen=True, slots=True)
class SliceMemory:
    """A slice that this agent made."""

    key: SliceKey
    generation: int
    state: SliceState
    tag: str
    hosted: tuple[Hosted, ...] = ()
    revision: Revision = Revision()
    credits: int = 0


@dataclass(slots=True)
class Memory:
    """Everything the journal holds. `unfinished`: steps that were begun and never ended."""

    plan: NodePlan | None = None
    highest_epoch: int = 0
    lease_epoch: int = 0
    generation: int = 0
    slices: dict[SliceKey, SliceMemory] = field(default_factory=dict)
    unfinished: dict[tuple[SliceKey, str], Step] = field(default_factory=dict)


class Journal:
    """Append-only; one process at a time (flock)."""

    def __init__(self, directory: Path, boot_id: str, driver_load_id: str) -> None:
        self._path = directory / "journal.jsonl"
        self._load = f"{boot_id}/{driver_load_id}"
        self._file: IO[str] | None = None
        self._lock: IO[str] | None = None
        self._lines = 0
        self.memory = Memory()

    def open(self) -> Memory:
        """Lock, read what is there, compact.

        Raises:
            StartError: another agent of this node runs on the same state.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self._path.parent / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise StartError(
                f"another power agent works in {self._path.parent}",
                remedy="stop it, or give this one its own state_dir",
            ) from error
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._replay(line)
        self._compact()
        return self.memory

    def close(self) -> None:
        """Release the lock."""
        for file in (self._file, self._lock):
            if file is not None:
                file.close()

    def driver_changed(self, driver_load_id: str) -> None:
        """The driver was loaded again: none of its instances exists any more."""
        self._load = f"{self._load.partition('/')[0]}/{driver_load_id}"
        self.memory.slices.clear()
        self.memory.unfinished.clear()
        self._compact()

    async def accept(self, plan: NodePlan) -> None:
        """Remember the plan durably before anything is done for it."""
        self.memory.plan = plan
        self.memory.highest_epoch = max(self.memory.highest_epoch, plan.revision.epoch)
        self._append({"plan": codec.to_plain(plan)})
        await self._sync()

    def hold_lease(self, epoch: int) -> None:
        """Remember our own epoch, the floor of the next one if Redis loses its data."""
        self.memory.lease_epoch = epoch
        self._append({"lease_epoch": epoch})

    def next_generation(self) -> int:
        """A number that no instance of this node ever had."""
        self.memory.generation += 1
        self._append({"generation": self.memory.generation})
        return self.memory.generation

    async def begin(self, step: Step) -> None:
        """Before the step."""
        self.memory.unfinished[step.slice, step.verb] = step
        self._append({"begin": codec.to_plain(step)})
        if step.verb in ("create_gi", "destroy_gi"):
            await self._sync()

    def end(self, step: Step) -> None:
        """After the step, whatever came of it (`state`: done or failed)."""
        self.memory.unfinished.pop((step.slice, step.verb), None)
        self._append({"end": codec.to_plain(step)})
        if self._lines > LINES_MAX:
            self._compact()

    def remember(self, memory: SliceMemory) -> None:
        """A slice is ours, in this state."""
        if self.memory.slices.get(memory.key) != memory:
            self.memory.slices[memory.key] = memory
            self._append({"slice": codec.to_plain(memory)})

    def forget(self, key: SliceKey) -> None:
        """A slice does not exist any more."""
        if self.memory.slices.pop(key, None) is not None:
            self._append({"forget": codec.to_plain(key)})

    def _replay(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            return  # torn by a crash in mid-write: it never counted
        memory, same_load = self.memory, entry.get("load") == self._load
        if "plan" in entry:
            memory.plan = codec.from_plain(NodePlan, entry["plan"], "plan")
            memory.highest_epoch = max(memory.highest_epoch, memory.plan.revision.epoch)
        elif "highest_epoch" in entry:
            memory.highest_epoch = max(memory.highest_epoch, entry["highest_epoch"])
        elif "lease_epoch" in entry:
            memory.lease_epoch = max(memory.lease_epoch, entry["lease_epoch"])
        elif "generation" in entry:
            memory.generation = max(memory.generation, entry["generation"])
        elif not same_load:
            return
        elif "slice" in entry:
            part = codec.from_plain(SliceMemory, entry["slice"], "slice")
            memory.slices[part.key] = part
        elif "forget" in entry:
            memory.slices.pop(codec.from_plain(SliceKey, entry["forget"], "forget"), None)
        elif "begin" in entry:
            step = codec.from_plain(Step, entry["begin"], "begin")
            memory.unfinished[step.slice, step.verb] = step
        elif "end" in entry:
            step = codec.from_plain(Step, entry["end"], "end")
            memory.unfinished.pop((step.slice, step.verb), None)

    def _compact(self) -> None:
        """Write what still matters to a new file and put it in place at once."""
        if self._file is not None:
            self._file.close()
        memory = self.memory
        entries: list[dict[str, Any]] = [
            {"highest_epoch": memory.highest_epoch},
            {"lease_epoch": memory.lease_epoch},
            {"generation": memory.generation},
        ]
        if memory.plan is not None:
            entries.append({"plan": codec.to_plain(memory.plan)})
        entries += [{"slice": codec.to_plain(part)} for part in memory.slices.values()]
        entries += [{"begin": codec.to_plain(step)} for step in memory.unfinished.values()]
        scratch = self._path.with_suffix(".new")
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(self._line(entry) for entry in entries)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._lines = len(entries)

    def _append(self, entry: dict[str, Any]) -> None:
        assert self._file is not None, "open() comes first"
        self._file.write(self._line(entry))
        self._file.flush()
        self._lines += 1

    def _line(self, entry: dict[str, Any]) -> str:
        return json.dumps({"load": self._load, **entry}, separators=(",", ":")) + "\n"

    async def _sync(self) -> None:
        assert self._file is not None
        await asyncio.to_thread(os.fsync, self._file.fileno())
