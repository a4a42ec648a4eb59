"""Journal state: all that an agent must not forget, and how it is read back from its journal's lines. Pure.

`journal` writes the lines. Of each entry the boot and the driver load it was true for are kept: GPU instances
and what runs on them are void after another load, processes on CPUs after another boot. The plan, the epochs, the
generation, cordons and overrides of device settings hold forever. Whether a lock survived a reload is not asked,
because resetting one that is gone does no harm.
"""

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trefoil.core.common import Revision
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import Hosted, SliceKey, SliceState, Step
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec
from trefoil.runtime.state_files import as_epoch

CRC_DIGITS: Final = 8
CPU_SUFFIX: Final = "/cpu"
VERSION: Final = 1
"""Of the journal's format: one more when what is written now would be misread by an agent of before."""


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """Record of a slice that this agent made."""

    key: SliceKey
    generation: int
    state: SliceState
    tag: str
    hosted: tuple[Hosted, ...] = ()
    revision: Revision = Revision()
    credits: int = 0


@dataclass(frozen=True, slots=True)
class Cordon:
    """Cordon: a device is out of service until it is released. `at_s`: UTC seconds of the command."""

    device: str
    why: str
    at_s: float = 0.0
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Override:
    """Override: a device setting that was changed, or was about to be, and must be put back.

    `setting` "clock": the locked range [MHz]. "power_limit": the one that was in force before, and the one that is set
    [W]. `load` is the boot and driver load that it was written under.
    """

    device: str
    setting: str
    low: float
    high: float
    load: str = ""


@dataclass(slots=True)
class JournalState:
    """State that the journal holds. `unfinished`: steps that were begun and never ended."""

    plan: NodePlan | None = None
    highest_epoch: int = 0
    lease_epoch: int = 0
    generation: int = 0
    slices: dict[SliceKey, SliceRecord] = field(default_factory=dict)
    unfinished: dict[tuple[SliceKey, str], Step] = field(default_factory=dict)
    cordons: dict[str, Cordon] = field(default_factory=dict)
    overrides: dict[tuple[str, str], Override] = field(default_factory=dict)
    devices: dict[str, tuple[str, str]] = field(default_factory=dict)  # type and UUID: a lost GPU tells neither
    damaged: int = 0  # lines that could not be read, a torn last one included
    lines: int = field(default=0, compare=False)  # that could be read
    owner: str = ""  # "<cluster>/<node>" of the agent that wrote it; empty: of a version that did not say
    version: int = VERSION  # of the format that it was written in
    tags: set[str] = field(default_factory=set, compare=False)
    """Of every Triton that the file that was read names, also of another driver load."""

    def apply(self, entry: dict[str, Any]) -> None:
        """Apply one entry. Unknown kinds are of a newer agent and change nothing.

        Raises:
            TrefoilError, KeyError, TypeError, ValueError: not what an agent writes.
        """
        match entry:
            case {"journal": value}:
                self.owner, self.version = str(value["owner"]), int(value["version"])
            case {"plan": value}:
                plan = codec.from_plain(NodePlan, value, "plan")
                if plan.digest not in ("", plan.content_digest):
                    raise ValueError("a plan that is not the one that its digest says")
                self.highest_epoch = max(self.highest_epoch, as_epoch(plan.revision.epoch))
                self.plan = plan
            case {"highest_epoch": value}:
                self.highest_epoch = max(self.highest_epoch, as_epoch(value))
            case {"fence": value}:
                self.highest_epoch = as_epoch(value)
                if self.plan is not None and self.plan.revision.epoch > self.highest_epoch:
                    self.plan = replace(self.plan, revision=Revision(self.highest_epoch))
            case {"lease_epoch": value}:
                self.lease_epoch = max(self.lease_epoch, as_epoch(value))
            case {"generation": value}:
                self.generation = max(self.generation, as_epoch(value))
            case {"cordon": value}:
                cordon = codec.from_plain(Cordon, value, "cordon")
                self.cordons[cordon.device] = cordon
            case {"release": value}:
                self.cordons.pop(str(value), None)
            case {"device": value}:
                name, kind, uuid = value
                self.devices[str(name)] = (str(kind), str(uuid))
            case {"override": value}:
                override = codec.from_plain(Override, value, "override")
                self.overrides[override.device, override.setting] = override
            case {"restored": value}:
                device, setting = value
                self.overrides.pop((str(device), str(setting)), None)
            case {"slice": value}:
                part = codec.from_plain(SliceRecord, value, "slice")
                as_epoch(part.generation)
                self.slices[part.key] = part
            case {"forget": value}:
                self.slices.pop(codec.from_plain(SliceKey, value, "forget"), None)
            case {"begin": value}:
                step = codec.from_plain(Step, value, "begin")
                self.unfinished[step.slice, step.verb] = step
            case {"end": value}:
                step = codec.from_plain(Step, value, "end")
                self.unfinished.pop((step.slice, step.verb), None)

    def entries(self) -> list[dict[str, Any]]:
        """Entries, the fewest, that bring this state back."""
        entries: list[dict[str, Any]] = [
            {"journal": {"version": VERSION, "owner": self.owner}},
            {"highest_epoch": self.highest_epoch},
            {"lease_epoch": self.lease_epoch},
            {"generation": self.generation},
        ]
        if self.plan is not None:
            entries.append({"plan": codec.to_plain(self.plan)})
        entries += [{"device": [name, *known]} for name, known in self.devices.items()]
        entries += [{"cordon": codec.to_plain(cordon)} for cordon in self.cordons.values()]
        entries += [{"override": codec.to_plain(override)} for override in self.overrides.values()]
        entries += [{"slice": codec.to_plain(part)} for part in self.slices.values()]
        entries += [{"begin": codec.to_plain(step)} for step in self.unfinished.values()]
        return entries

    def drop_gpu_slices(self) -> None:
        """Drop all GPU slices: the driver was loaded again, none of its instances exists; processes on CPUs do."""
        self.slices = {key: part for key, part in self.slices.items() if on_cpu(key)}
        self.unfinished = {name: step for name, step in self.unfinished.items() if on_cpu(name[0])}


_SLICE_OF: Final = {"slice": "key", "begin": "slice", "end": "slice", "forget": ""}  # kinds that are about one slice


def on_cpu(key: SliceKey) -> bool:
    """Whether a slice is of the CPUs, which no driver load concerns."""
    return key.device.endswith(CPU_SUFFIX)


def encode(entry: dict[str, Any], load: str) -> bytes:
    """Encode an entry as one line: JSON, a tab, its checksum. `load` is "<boot id>/<driver load id>"."""
    text = json.dumps({"load": load, **entry}, separators=(",", ":")).encode()
    return b"%s\t%08x\n" % (text, zlib.crc32(text))


def replay(data: bytes, load: str) -> JournalState:
    """Replay a journal, whatever a crash, a full disk or a flipped bit has made of it. Never raises.

    A line that is torn, has a wrong checksum or makes no sense is counted in `damaged` and otherwise passed over: each
    of the others says by itself what is true.
    """
    state = JournalState()
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            entry = _decode(line)
            state.lines += 1
            if "slice" in entry:
                state.tags.add(str(entry["slice"]["tag"]))
            if not _is_void(entry, load):
                state.apply(entry)
        except (TrefoilError, KeyError, TypeError, ValueError, RecursionError):
            state.damaged += 1
    return state


def _decode(line: bytes) -> dict[str, Any]:
    text, _, checksum = line.partition(b"\t")
    if len(checksum) == CRC_DIGITS and int(checksum, 16) != zlib.crc32(text):
        raise ValueError("wrong checksum")
    entry = codec.parse_json(text)  # a line that was cut off inside its checksum is whole all the same
    if not isinstance(entry, dict):
        raise TypeError("no entry")
    return entry


def _is_void(entry: dict[str, Any], load: str) -> bool:
    """Whether an entry speaks of a slice of another boot or driver load."""
    written = str(entry.get("load"))
    if written == load:
        return False
    for kind, name in _SLICE_OF.items():
        if kind in entry:
            value = entry[kind][name] if name else entry[kind]
            same_boot = written.partition("/")[0] == load.partition("/")[0]
            return not (same_boot and on_cpu(codec.from_plain(SliceKey, value, kind)))
    return False
