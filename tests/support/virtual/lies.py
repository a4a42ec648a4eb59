"""One wrong but well-formed value in any key of Redis or in any state file, at any moment: a fault of whole systems.

A lie is a value that stood there with one field replaced, an older value of its key, the value of another key, or one
of `WHOLE`: a plan without routes, a node that has lost its devices, joules without end; or nothing: the key or file is
gone. Two thirds are newer than the truth as well, because readers go by what is newest. Nothing is signed again: who
lies does not have the key. In some histories clocks step by hours, and the controller starts again on one of them.
"""

import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from controller.role.state_shapes import SHAPES
from tests.support.unswept import unswept
from tests.support.virtual.lies_judged import HEAL_S, JUDGED_S, judge, judge_counted
from tests.support.virtual.loop import virtual_loop
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.redis import Stream
from tests.support.virtual.system import PLACES, SERIES, System, installed
from trefoil.cli.operate.status import STREAMS, VALUES
from trefoil.core.carbon import CarbonForecast, CarbonReading, Quality
from trefoil.core.common import KeptFile, Lease, Revision
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow, ScaleSignal, TableAck
from trefoil.core.energy import EnergySample
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.core.fleet import DeviceState, NodeStatus, SliceState
from trefoil.core.objective import Objective
from trefoil.core.outside.plausible import EPOCH_MAX
from trefoil.core.plan import Plan, Rollout, RolloutState
from trefoil.runtime import codec

LIES_S = (1.5, 14.0)  # between these, lies are told
REPEAT_S = 0.4
LIKELY = ("plan", "load:", "energy:", "node:", "ack:", "epoch", "lease:", "carbon:now:", "accounted", "totals", "kept:")
"""Kinds of keys that are drawn three times as often as the others: what is decided by them takes effect at once."""
SIGNED = 0.8  # of the histories have a plan key, as `trefoil up` gives one to its services
TRIES = 20
INTEGERS = (0, 1, -1, 2**31 - 1, 2**32 - 1, 2**53 - 1, 2**62, 2**63 - 1)
NUMBERS = (0.0, -1.0, 1e-300, 0.5, 1e9, 1e300, math.inf, math.nan)
TEXTS = (
    "", "nobody", "node0", "node1/gpu0", "node0/gpu9", "dispatcher0.1", FAMILY, "another", "controller", "weighted",
    "os:_exit", "tests.support.virtual.planner:Drawn", "1.1.2", "x" * 300,
    "triton://nobody", "http://[::1", "node0:99999999",
)  # fmt: skip
AHEAD = (1, 3, 1000, 10**6, 2**40, 2**62)
OWN = (b"0", b"7", b"1000", b"9" * 12, b"9" * 18, b"-1", b"1:1", b"1e300")
NAMED_S = 0.5  # within which a worker says what it refuses
LOST, STEPPED = 0.15, 0.2  # of the lies take a key or file away; of the histories have clocks that step
STEPS_S = (-26 * 3600.0, -3 * 3600.0, -3600.0, -40.0, 3600.0, 3 * 3600.0)
KILLED = 0.25  # of the is in Redis are followed by the end of the controller
Rng = np.random.Generator


# --- one field --------------------------------------------------------------------------------------------------------


def lie_of(value: Any, rng: Rng) -> Any:
    """The value with one field of it, at any depth, replaced by another of its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        name = names[int(rng.integers(len(names)))]
        return _rebuilt(value, name, lie_of(getattr(value, name), rng))
    for kinds, lie in LIES:
        if isinstance(value, kinds):
            return lie(value, rng)
    return value


def newer(value: Any, rng: Rng) -> Any:
    """The value under a revision, epoch or number above its own."""
    for name in ("revision", "table", "applied", "written", "epoch", "number", "seq", "observed_at_s", "ends_at_s"):
        if not hasattr(value, name) or rng.random() < 0.2:
            continue
        own, above = getattr(value, name), AHEAD[int(rng.integers(len(AHEAD)))]
        part = "epoch" if rng.random() < 0.7 else "number"
        field = _rebuilt(own, part, getattr(own, part) + above) if isinstance(own, Revision) else own + above
        value = _rebuilt(value, name, field)
    return value


def _rebuilt(value: Any, name: str, field: Any) -> Any:
    """A copy with that field, past what its class would refuse: so a foreign writer would have written it."""
    copy = object.__new__(type(value))
    for each in dataclasses.fields(value):
        object.__setattr__(copy, each.name, field if each.name == name else getattr(value, each.name))
    return copy


def _choice(options: Sequence[Any]) -> Callable[[Any, Rng], Any]:
    return lambda _, rng: options[int(rng.integers(len(options)))]


def _of_sequence(value: Sequence[Any], rng: Rng) -> Any:
    made: list[Any] = list(value)
    kind = int(rng.integers(4))
    if kind == 0 or not made:
        made = []
    elif kind == 1:
        made = made + made
    elif kind == 2:
        del made[int(rng.integers(len(made)))]
    else:
        at = int(rng.integers(len(made)))
        made[at] = lie_of(made[at], rng)
    return type(value)(made) if isinstance(value, tuple | list) else tuple(made)


def _of_mapping(value: Mapping[Any, Any], rng: Rng) -> Any:
    if not value or rng.random() < 0.3:
        return {}
    key = list(value)[int(rng.integers(len(value)))]
    return {**value, key: lie_of(value[key], rng)}


def _of_float(value: float, rng: Rng) -> float:
    near = (-value, value + 0.5, value + 3600.0, value - 3600.0, 2 * value, 1e3 * value)
    options = (*NUMBERS, *near)
    return options[int(rng.integers(len(options)))]


def _of_int(value: int, rng: Rng) -> int:
    options = (*INTEGERS, value + 1, value - 1, value + 1000)
    return options[int(rng.integers(len(options)))]


LIES: tuple[tuple[Any, Callable[[Any, Rng], Any]], ...] = (
    (Enum, lambda value, rng: list(type(value))[int(rng.integers(len(type(value))))]),
    (bool, lambda value, _: not value),
    (int, _of_int),
    (float, _of_float),
    (str, _choice(TEXTS)),
    (bytes, _choice((b"", b"\x00" * 32, b"x" * 300))),
    (Mapping, _of_mapping),
    ((tuple, list, frozenset), _of_sequence),
)


# --- whole values that mean harm --------------------------------------------------------------------------------------


def _plans(plan: Plan, _rng: Rng) -> Iterator[Plan]:
    yield replace(plan, routes=())
    yield Plan(plan.revision)
    for change in (
        {"draining": True}, {"weight": 0.0}, {"credits": 0}, {"credits": 2**31 - 1}, {"variant": "another"},
        {"slice": replace(plan.routes[0].targets[0].slice, device="node7/gpu0")} if plan.routes else {"stage": 3},
    ):  # fmt: skip
        targets = [tuple(replace(target, **change) for target in route.targets) for route in plan.routes]
        yield replace(plan, routes=tuple(replace(r, targets=t) for r, t in zip(plan.routes, targets, strict=True)))
    for changes in ({"router": "os:_exit"}, {"queue": "nonsense"}, {"queue_requests_max": 0}, {"family": "another"}):
        yield replace(plan, routes=tuple(replace(route, **changes) for route in plan.routes))


def _nodes(node: NodeStatus, _rng: Rng) -> Iterator[NodeStatus]:
    yield replace(node, devices=())
    yield replace(node, highest_epoch_seen=node.highest_epoch_seen + 1000)
    yield replace(node, highest_epoch_seen=10**12 - 1)
    yield replace(node, observed_at_s=node.observed_at_s + 86_400.0)
    yield replace(node, observed_at_s=1.0)
    for name, value in (
        ("state", DeviceState.LOST), ("slices", ()), ("cordon", "a lie"), ("closed", "a lie"), ("type", "H100"),
    ):  # fmt: skip
        yield replace(node, devices=tuple(_rebuilt(device, name, value) for device in node.devices))
    for name, value in (
        ("state", SliceState.FAILED), ("state", SliceState.READY), ("grpc_target", "127.0.0.1:1"),
        ("grpc_target", "triton://nobody"), ("generation", 99), ("hosted", ()),
    ):  # fmt: skip
        slices = [tuple(_rebuilt(each, name, value) for each in device.slices) for device in node.devices]
        yield replace(node, devices=tuple(replace(d, slices=s) for d, s in zip(node.devices, slices, strict=True)))


def _acks(ack: TableAck, _rng: Rng) -> Iterator[TableAck]:
    yield replace(ack, table=Revision(10**12 - 1, 1))
    yield replace(ack, table=Revision())
    yield replace(ack, slices=())
    yield replace(ack, slices=tuple(replace(load, ejected=True) for load in ack.slices))
    yield replace(ack, slices=tuple(replace(load, in_flight=2**31 - 1) for load in ack.slices))
    yield replace(ack, leaving=True)
    yield replace(ack, counts=("nobody:1", "nobody:2"))
    yield replace(ack, refused="a lie", refused_plan=ack.table)
    yield replace(ack, observed_at_s=ack.observed_at_s + 86_400.0)


def _windows(window: LoadWindow, _rng: Rng) -> Iterator[LoadWindow]:
    following = replace(window, seq=window.seq + 1, starts_at_s=window.ends_at_s, ends_at_s=window.ends_at_s + 0.5)
    for cells in (
        (), (LoadCell(LoadKey(FAMILY), arrived=10**5),), (LoadCell(LoadKey(FAMILY), arrived=2**62),),
        (LoadCell(LoadKey("another"), arrived=10),),
    ):  # fmt: skip
        yield replace(following, cells=cells)
    yield replace(following, seq=2**62)
    yield replace(window, seq=2**62)
    yield replace(following, ends_at_s=window.ends_at_s + 86_000.0)


def _samples(sample: EnergySample, _rng: Rng) -> Iterator[EnergySample]:
    length_s = sample.ends_at_s - sample.starts_at_s
    following = replace(sample, seq=sample.seq + 1, starts_at_s=sample.ends_at_s, ends_at_s=sample.ends_at_s + length_s)
    for joules in (1e9, 1e3, 300.0, 0.0):
        yield replace(following, counter_j=joules, idle_j=joules, unallocated_j=0.0, slices=())
    yield replace(following, counter_j=1e9)
    yield replace(following, seq=2**62)
    yield replace(sample, seq=2**62, counter_j=1e9, idle_j=1e9)
    yield replace(following, ends_at_s=sample.ends_at_s + 80_000.0, counter_j=1e7, idle_j=1e7)


def _readings(reading: CarbonReading, _rng: Rng) -> Iterator[CarbonReading]:
    for intensity in (0.0, 1e6, 1e300, 50.0):
        yield replace(reading, intensity_g_per_kwh=intensity)
    yield replace(reading, starts_at_s=reading.starts_at_s + 86_400.0, ends_at_s=reading.ends_at_s + 86_400.0)
    yield replace(reading, ends_at_s=reading.ends_at_s + 1e9, observed_at_s=reading.observed_at_s + 86_400.0)


def _rollouts(rollout: Rollout, _rng: Rng) -> Iterator[Rollout]:
    for state in RolloutState:
        yield replace(rollout, state=state)
    yield replace(rollout, target=Revision(10**12 - 1, 1), state=RolloutState.DONE)


def _files(file: KeptFile, _rng: Rng) -> Iterator[KeptFile]:
    for text in ("[]", "{}", '{"version": 99}', '{"epoch": 9007199254740991}'):
        yield replace(file, json=text)


def _objectives(objective: Objective, _rng: Rng) -> Iterator[Objective]:
    yield replace(objective, slo_ms=1e-9, number=objective.number + 1)
    yield replace(objective, min_accuracy=1.0, number=objective.number + 1)


def _leases(lease: Lease, _rng: Rng) -> Iterator[Lease]:
    yield replace(lease, holder="nobody:1")
    yield replace(lease, holder="nobody:1", epoch=lease.epoch + 1)
    yield replace(lease, epoch=10**12 - 1, expires_at_s=lease.expires_at_s + 1e6)


WHOLE: Mapping[type, Callable[[Any, Rng], Iterator[Any]]] = {
    Plan: _plans,
    NodeStatus: _nodes,
    TableAck: _acks,
    LoadWindow: _windows,
    EnergySample: _samples,
    CarbonReading: _readings,
    Rollout: _rollouts,
    KeptFile: _files,
    Objective: _objectives,
    Lease: _leases,
}


# --- in Redis ---------------------------------------------------------------------------------------------------------


def _type_of(table: Mapping[str, type], short: str) -> type | None:
    """Type of a key's values, by the table that `trefoil state dump` decodes by."""
    return next((t for p, t in table.items() if short == p or (p.endswith(":") and short.startswith(p))), None)


def _kind(short: str) -> str:
    """Kind of a key, by the first words of its name."""
    return next((p for p in (*VALUES, *STREAMS) if short.startswith(p)), short.split(":")[0])


def _unwritten(system: System) -> Mapping[str, Any]:
    """Values at keys that readers read and nobody writes here, or of parts that do not exist."""
    now_s = system.walls["redis"].now_s()
    node = replace(system.nodes["node0"].status(), node="node7", agent_target="node7:1", observed_at_s=now_s)
    reading = CarbonReading(SERIES, now_s, now_s + 7.0, 10.0, Quality.MEASURED, observed_at_s=now_s)
    keys = system.keys
    return {
        keys.node("node7"): node,
        keys.ack("nobody", 7): TableAck("nobody", 7, Revision(system.led_epoch(), 1), observed_at_s=now_s),
        keys.scale_signal("node0/gpu0"): ScaleSignal("node0", "node0/gpu0", (FAMILY,), "a lie", now_s),
        keys.carbon_history(SERIES): reading,
        keys.carbon_forecast(SERIES): CarbonForecast(SERIES, "nobody", now_s),
        keys.load("nobody", 7): LoadWindow("nobody", 7, 1, now_s - 1, now_s, cells=(LoadCell(LoadKey(FAMILY)),)),
        keys.demand(FAMILY): LoadWindow(
            starts_at_s=now_s + 100.0, ends_at_s=now_s + 101.0, cells=(LoadCell(LoadKey(FAMILY), arrived=900),)
        ),
        keys.energy("node7"): EnergySample("node7", "node7/gpu0", 1, now_s - 1, now_s, 1e9, idle_j=1e9),
        keys.objective("another"): Objective("another", slo_ms=1.0, number=9),
        keys.kept("objectives"): KeptFile("objectives", Revision(system.led_epoch() + 1, 9), "[]"),
    }


class Liar:
    """Who writes one wrong value: where, and which, is drawn."""

    def __init__(self, system: System, rng: Rng) -> None:
        self._system, self._rng = system, rng
        self.key = ""
        self._lie: Callable[[], None] | None = None

    def tell(self) -> None:
        """A lie at one of the keys; told again, it is the same one."""
        system = self._system
        if self._lie is None:
            names = system.server.names(system.keys.prefix)
            places: dict[str, list[str]] = {}  # of which each kind is as likely, however many keys it has
            for name in names:
                places.setdefault(_kind(name.removeprefix(system.keys.prefix)), []).append(name)
            unwritten = _unwritten(system)
            if not names or self._rng.random() < 0.1:
                self.key = list(unwritten)[int(self._rng.integers(len(unwritten)))]
                system.unwritten.add(self.key)
                self._lie = self._of_value(self.key, unwritten[self.key])
            else:
                kinds = [kind for kind in sorted(places) for _ in range(3 if kind in LIKELY else 1)]
                kind = kinds[int(self._rng.integers(len(kinds)))]
                self.key = places[kind][int(self._rng.integers(len(places[kind])))]
                self._lie = self._drawn(self.key)
        if self._lie is not None:
            self._lie()
            system.server.publish(system.keys.changed(), self.key)

    def _drawn(self, key: str) -> Callable[[], None] | None:
        system, rng = self._system, self._rng
        short, value = key.removeprefix(system.keys.prefix), system.server.value(key)
        if rng.random() < LOST:
            return self._of_bytes(key, b"")
        if isinstance(value, dict):
            return self._of_hash(key, value)
        if isinstance(value, Stream):
            kind, entries = _type_of(STREAMS, short), value.entries
            held = [entry[b"d"] for _, entry in entries[-20:]] if kind is not None else []
        else:
            kind, held = _type_of(VALUES, short), [value] if isinstance(value, bytes) else []
        if kind is None:
            return self._of_bytes(key, OWN[int(rng.integers(len(OWN)))]) if isinstance(value, bytes) else None
        if not held:
            return None
        others = [*system.server.formers(key), *held] if rng.random() < 0.5 else self._others(key, kind)
        draw = rng.random()
        if draw < 0.2 and others:  # replayed, or of another key of this type
            data = others[int(rng.integers(len(others)))]
            return self._of_bytes(key, data) if draw < 0.15 else self._of_value(key, _decoded(kind, data))
        return self._of_value(key, _decoded(kind, held[-1] if rng.random() < 0.7 else held[0]))

    def _others(self, key: str, kind: type) -> list[bytes]:
        server, prefix = self._system.server, self._system.keys.prefix
        names = [n for n in server.names(prefix) if n != key and _type_of(VALUES, n.removeprefix(prefix)) is kind]
        return [value for name in names if isinstance(value := server.value(name), bytes)]

    def _of_value(self, key: str, value: Any) -> Callable[[], None] | None:
        """A are in place of a value, or after it in a stream."""
        rng = self._rng
        for _ in range(TRIES):
            try:
                lie, wholes = value, WHOLE.get(type(value))
                if wholes is not None and rng.random() < 0.5:
                    options = list(wholes(value, rng))
                    lie = options[int(rng.integers(len(options)))]
                elif rng.random() < 0.85:
                    lie = lie_of(value, rng)
                data = codec.encode(newer(lie, rng) if rng.random() < 2 / 3 else lie)
                said = f"{_decoded(type(value), data)!r:.300}"
            except (InvalidInput, ValueError, TypeError, OverflowError, AttributeError, AssertionError):
                continue  # nobody can write that
            return self._of_bytes(key, data, said)
        return None

    def _of_bytes(self, key: str, data: bytes, said: str = "") -> Callable[[], None]:
        system, forever = self._system, self._rng.random() < 0.5
        short = key.removeprefix(system.keys.prefix)
        in_stream = _type_of(STREAMS, short) is not None

        def write() -> None:
            system.note(f"LIE at {key}: {said or repr(data)[:300]}")
            system.lies.append((system.loop.time(), short))
            if not data or in_stream:
                system.server.append(key, {b"d": data}, 500) if data else system.server.delete(key)
                return
            left_s = system.server.ttl_s(key)
            kept = left_s is not None and math.isfinite(left_s) and not forever
            system.server.set(key, data, max(1, int(1e3 * left_s)) if kept and left_s is not None else 0)
            if short.startswith("kept:") and system.plan_key_file is None:
                system.promises.excuse(2 * HEAL_S)  # nobody signs what the next leader continues from
            if key == system.keys.plan() and system.plan_key_file is not None:
                system.loop.call_later(NAMED_S, _judge_named, system, data)

        return write

    def _of_hash(self, key: str, value: Mapping[bytes, bytes]) -> Callable[[], None]:
        rng = self._rng
        name = list(value)[int(rng.integers(len(value)))] if value and rng.random() < 0.8 else b"another"
        ids = (b"0-0", b"1-0", b"9" * 13 + b"-0", b"9" * 18 + b"-0")
        numbers = (b"0", b"-1", b"1e12", b"1e300", b"nan", b"inf")
        options = ids if b"-" in value.get(name, b"") else numbers
        fields = {name: options[int(rng.integers(len(options)))]}

        def write() -> None:
            self._system.note(f"LIE at {key}: {fields!r}")
            self._system.lies.append((self._system.loop.time(), key.removeprefix(self._system.keys.prefix)))
            self._system.server.set_totals(key, fields)

        return write


def _decoded(kind: type, data: bytes) -> Any:
    return codec.decode(kind, data)


# --- in files ---------------------------------------------------------------------------------------------------------


def in_a_file(system: System, rng: Rng) -> None:
    """A are in a state file of the controller or of a worker, which then most often dies and starts again."""
    place = [system.controller, *system.workers][int(rng.choice(3, p=(0.6, 0.2, 0.2)))]
    folder = system.folder / ("controller" if place is system.controller else f"{place.name}/dispatcher")
    paths = sorted(path for path in folder.glob("*.json*") if path.suffix in (".json", ".jsonl"))
    if not paths:
        return
    path = paths[int(rng.integers(len(paths)))]
    listening = sum(worker.local is not None for worker in system.workers)
    restarted = rng.random() < 0.7 and (place is system.controller or listening > 1)
    if restarted:
        place.kill()
        system.loop.call_later(float(rng.uniform(0.3, 2.0)), place.start)
    system.faults[path.stem] += 1
    text = path.read_text()
    lied = (
        "" if rng.random() < LOST else _lines(text, rng) if path.suffix == ".jsonl" else _document(path.stem, text, rng)
    )
    system.note(f"LIE in the file {path.name}: {lied:.300}")
    system.lies.append((system.loop.time(), path.name))
    path.write_text(lied) if lied else path.unlink()
    if not lied and place is system.controller:
        system.unwritten.add(system.keys.kept(path.stem))  # its copy: what is gone is not copied again


def _document(name: str, text: str, rng: Rng) -> str:
    if name in SHAPES and rng.random() < 0.7:
        for _ in range(TRIES):
            try:
                value = lie_of(codec.from_plain(SHAPES[name], json.loads(text)), rng)
                plain = codec.to_plain(newer(value, rng) if rng.random() < 0.5 else value)
                codec.from_plain(SHAPES[name], plain)
                return json.dumps(plain)
            except (TrefoilError, ValueError, TypeError, OverflowError, AttributeError, AssertionError):
                continue
    return json.dumps(lie_of(json.loads(text), rng))


def _lines(text: str, rng: Rng) -> str:
    first, *rest = text.splitlines()
    if rest and rng.random() < 0.5:
        at = int(rng.integers(len(rest)))
        rest[at] = _of_line(NodeStatus, rest[at], rng)
    else:
        first = _of_line(Plan, first, rng)
    return "\n".join([first, *rest, ""])


def _of_line(kind: type, line: str, rng: Rng) -> str:
    value = codec.from_json(kind, line)
    for _ in range(TRIES):
        try:
            options = list(WHOLE[kind](value, rng))
            lie = lie_of(value, rng) if rng.random() < 0.5 else options[int(rng.integers(len(options)))]
            return codec.to_json(newer(lie, rng) if rng.random() < 0.5 else lie)
        except (TrefoilError, ValueError, TypeError, OverflowError, AttributeError, AssertionError):
            continue
    return line


# --- a history --------------------------------------------------------------------------------------------------------


def drawn(system: System) -> float:
    """Two to six lies at drawn moments; returns when the last of what is drawn happens, in seconds of the history."""
    rng = np.random.default_rng([system.seed, 13])
    last_s = 0.0
    for _ in range(int(rng.integers(2, 7))):
        at_s = float(rng.uniform(*LIES_S))
        last_s = max(last_s, at_s)
        own = np.random.default_rng([system.seed, 14, int(rng.integers(2**31))])
        if rng.random() < 0.2:
            system.faults["in a file"] += 1
            system.loop.call_later(at_s, in_a_file, system, own)
            continue
        system.faults["in Redis"] += 1
        if own.random() < KILLED:  # what comes next reads the lie at its start
            system.loop.call_later(at_s + float(own.uniform(0.0, 3.0)), _restart, system, float(own.uniform(0.3, 2.0)))
        liar = Liar(system, own)
        for again in range(5 if rng.random() < 0.1 else 1):
            last_s = max(last_s, at_s + REPEAT_S * again)
            system.loop.call_later(at_s + REPEAT_S * again, liar.tell)
    if rng.random() < STEPPED:
        system.faults["clocks"] += 1
        at_s = float(rng.uniform(*LIES_S))
        last_s = max(last_s, at_s)
        system.loop.call_later(at_s, _restart, system, float(rng.uniform(0.3, 2.0)), rng)
    return last_s


def _restart(system: System, after_s: float, rng: Rng | None = None) -> None:
    """The controller ends and starts again, by `rng` on clocks that have stepped."""
    places = [p for p in PLACES[:-1] if p == "controller" or rng.random() < 0.5] if rng is not None else []
    step_s = float(rng.choice(STEPS_S)) if rng is not None else 0.0
    system.note(f"the controller is killed; clocks of {places} step by {step_s:g} s")
    system.step_clocks(places, step_s)
    system.controller.kill()
    system.loop.call_later(after_s, system.controller.start)


def _judge_named(system: System, lie: bytes) -> None:
    """A plan that nobody signed stands there still: every worker says that it refuses it."""
    true = system.promises.last_put(system.keys.plan())
    if system.server.value(system.keys.plan()) != lie or (true and codec.decode(Plan, lie) == codec.decode(Plan, true)):
        return  # -0.0 for 0.0 is not a lie
    if codec.decode(Plan, lie).revision.epoch > EPOCH_MAX:
        return  # no reader takes it for a plan; the controller's status names the key
    of_late = {name for at_s, name in system.lies if at_s > system.loop.time() - NAMED_S + 1e-6}
    if "plan" in of_late:
        return  # told anew since
    for worker in system.workers:
        local = worker.local
        if local is None or local.routing.plan is None or local.routing.loads() == ():
            continue
        if system.faults["table"] and local.routing.table.revision == codec.decode(Plan, lie).revision:
            continue  # an older plan that is signed, obeyed without a table that says what was obeyed before
        key = system.keys.ack(*local.id)
        if key.removeprefix(system.keys.prefix) in of_late:
            continue
        stood = system.server.value(key)
        if isinstance(stood, bytes) and not codec.decode(TableAck, stood).refused:
            system.promises.broken(f"{worker.name} does not say that it refuses {codec.decode(Plan, lie).revision}")


def history(seed: int) -> tuple[list[str], System]:
    """Play one history with lies; what was broken, and the system as it ended."""
    with unswept(), virtual_loop() as loop, tempfile.TemporaryDirectory(prefix="lies") as folder:
        system = System(loop, seed, Path(folder))
        if np.random.default_rng([seed, 12]).random() < SIGNED:
            system.plan_key_file = Path(folder) / "plan.key"
            system.plan_key_file.write_text("0123456789abcdef" * 4)
            system.plan_key_file.chmod(0o600)
        loop.set_exception_handler(lambda _, found: system.promises.broken(f"an exception: {found}"))
        with installed(system, real_bytes=True):
            last_s = drawn(system)
            loop.call_later(last_s + HEAL_S + JUDGED_S, judge_counted, system)  # clients send until then
            system.play(lambda _: None, last_s + HEAL_S + JUDGED_S + 3.0)
            judge(system, last_s)
            return system.promises.found, system
