"""Proof of whose a running Triton is, for an agent whose journal does not know it. Pure.

Data: what the runtime lists of a process (launch tag, command, GPU), what the driver shows of a slice.
Decision: whether the process is the Triton of that slice, started by an agent of this node; else why it is not. What
it serves is asked of the Triton afterwards, and it counts as READY only once it has answered an inference.
What a process says of itself is trusted for its own slice alone: names, ports and paths are computed here and compared,
and none that a process names is ever written to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from trefoil.core.device_types import WHOLE, find_slice_type
from trefoil.core.fleet import DeviceKind, DeviceType, SliceKey

GENERATION_MAX: Final = 10**12
SLICES: Final = "slices"  # folder of all slices' repositories in a state directory


@dataclass(frozen=True, slots=True)
class Running:
    """A Triton that lives, as its runtime lists it."""

    tag: str
    owner: str  # "<cluster>/<node>"; empty: an agent of before this was written
    argv: tuple[str, ...]
    gpu_uuid: str

    def option(self, name: str) -> str:
        """Value of an option of its command; empty where it has none, or several."""
        values = [word.partition("=")[2] for word in self.argv if word.startswith(f"--{name}=")]
        return values[0] if len(values) == 1 else ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the Triton of one slice must be. `tls`: whether it takes certificates."""

    key: SliceKey
    owner: str
    gpu_uuid: str
    grpc_port: int
    tls: bool


def split_tag(tag: str) -> tuple[str, int]:
    """Slice name and generation of a launch tag; ("", 0) where it is none."""
    name, mark, number = tag.rpartition(".g")
    generation = int(number) if number.isdecimal() and len(number) <= len(str(GENERATION_MAX)) else 0
    return (name, generation) if mark and 0 < generation <= GENERATION_MAX else ("", 0)


def objection(running: Running, expected: Expected) -> str:
    """Why a Triton is not proven to be that of a slice; "" where it is."""
    key = expected.key
    if split_tag(running.tag)[0] != key.name:
        return f"its tag {running.tag} is not of {key.name}"
    if running.owner not in ("", expected.owner):
        return f"started by {running.owner}, this is {expected.owner}"
    if not running.argv:
        return "its command is not known"
    wanted = {
        "id": key.name,
        "grpc-port": str(expected.grpc_port),
        "metrics-port": str(expected.grpc_port + 1),
    }
    for name, value in wanted.items():
        if running.option(name) != value:
            return f"its command says --{name}={running.option(name) or '(none)'}, the slice has {value}"
    if PurePath(running.option("model-repository")).parts[-2:] != (SLICES, key.name):
        return f"its model repository {running.option('model-repository') or '(none)'} is not that of the slice"
    if (running.option("grpc-use-ssl") == "true") != expected.tls:
        return "it speaks clear text, here Tritons use TLS" if expected.tls else "it uses TLS, and here Tritons do not"
    if running.gpu_uuid != expected.gpu_uuid:
        return f"it runs on {running.gpu_uuid or 'no GPU'}, the slice is {expected.gpu_uuid or 'of the CPUs'}"
    return ""


def restricted_key(argv: Sequence[str]) -> str:
    """Key that opens what is the agent's alone, by a Triton's command; "" where it is open."""
    given = [word for word in argv if word.startswith("--grpc-restricted-protocol=")]
    return given[0].rpartition("=")[2] if len(given) == 1 and given[0].count("=") > 1 else ""


def uncut_keys(device: str, kind: DeviceType, names: Sequence[str]) -> Iterator[SliceKey]:
    """Keys of slices, by their names, of a device on which nothing is created: a whole GPU, or CPUs."""
    prefix = f"{device.replace('/', '-')}-"
    for name in sorted(set(names)):
        if not name.startswith(prefix):
            continue
        text, _, start = name.removeprefix(prefix).rpartition("-")
        named = WHOLE if kind.kind == DeviceKind.WHOLE_GPU else text.replace("-", ":", 1)
        found = find_slice_type(kind, named)
        if found is None:
            continue
        key = SliceKey(device, named, int(start) if start.isdecimal() else -1, found.memory_slices)
        if key.name == name and key.start in found.starts:
            yield key
