"""Path of a rollout: from the running slices to a target plan, never below the capacity that the load needs.

Source: CONTRACTS section 4 (rollout step order); surge and batches: Kubernetes' rolling update.
Data: running slices (observed, never remembered), the target, requests per second that each family needs now.
Decision: a sequence of steps. A step is published as one revision, routes first. When every dispatcher has taken them
and the slices that leave are idle, the complete desired state of each node follows. Then the awaited slices turn READY.
Formulation: a hop leads to a waypoint in at most three steps:
  1 start   Keep the routes. Start what fits in addition to what runs, swap to variants that are no slower; wait READY.
  2 shift   Shift routes to what stays and what is new; slices that leave drain. Stop them, start what they blocked,
            swap to slower variants (their shares are cut before they slow down); wait READY.
  3 settle  Set the routes of the waypoint.
Before the first slice leaves, and until the target's routes, devices run at the highest clock of their ranges. A hop is
legal when every step of it routes at least min(need, capacity at first, capacity at last) of each family. If that is
less than the need, because one of them cannot carry it within the SLO, the rule also holds for sustained rates.
The first legal way is taken. All units hop together, else as many at a time as is legal (a unit: slices that go, with
those that need their place). Else what comes on a slice is loaded in addition to what goes: a split family serves whole
or in stages, never in both. Else a sleeping device carries the target of a device while that one is rebuilt (surge).
Else what runs first swaps to faster variants, the most accurate that make room. Else HALTED.
Deviations: none. Stateless: after a crash or a newer plan the steps are computed again from the running slices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from operator import attrgetter
from typing import Final, NamedTuple

from controller.rollout.core.interim_routes import (
    NEED_TOLERANCE,
    RolloutInputs,
    capacity_of,
    interim_routes,
    routed_capacity,
    serving_routes,
    with_draining_targets,
)
from trefoil.core.fleet import DeviceState, SliceKey, same_variants
from trefoil.core.plan import Plan, PlannedDevice, PlannedSlice, Route

Devices = Mapping[str, PlannedDevice]
_LIMITS: Final = attrgetter(*(f.name for f in fields(PlannedDevice) if f.name != "slices"))
UNITS_MAX: Final = 48  # a larger fleet is changed in bundles: the search for a legal order is quadratic


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Fleet as it stands now. `ready` serves; `present` occupies its place (also starting, draining, failed).

    Devices in `fixed` may not be touched (lost, or their node is stale); those in `closed` take in nothing new.
    """

    devices: Devices
    ready: Mapping[SliceKey, PlannedSlice]
    present: frozenset[SliceKey]
    routes: tuple[Route, ...]
    fixed: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a rollout: one revision. `drained` must be idle before `devices` are applied, then `ready` must serve."""

    name: str
    routes: tuple[Route, ...]
    devices: Devices
    drained: frozenset[SliceKey]
    ready: Mapping[SliceKey, PlannedSlice]


@dataclass(frozen=True, slots=True)
class RolloutPath:
    """Path of steps to the target, or `halted` with the reason in `why` and no steps.

    `blocked` says what of the target cannot be touched now: the steps lead past it, and it is to be tried again.
    `misses_slo` says what is missing, on the way, of the capacity within the SLO.
    """

    steps: tuple[Step, ...]
    why: str
    halted: bool = False
    floor_per_s: Mapping[str, float] | None = None
    blocked: str = ""
    misses_slo: str = ""

    @property
    def moving(self) -> tuple[SliceKey, ...]:
        """Slices that are started, swapped or stopped on the way."""
        keys = {key for step in self.steps for key in (*step.ready, *step.drained)}
        return tuple(sorted(keys))

    @property
    def reconfigures(self) -> bool:
        """Whether any node has something to do, or only the shares change."""
        return any(step.ready or step.drained for step in self.steps) or any(s.name == "sleep" for s in self.steps)


def plan_path(snapshot: FleetSnapshot, target: Plan, inputs: RolloutInputs) -> RolloutPath:
    """Plan the steps from what stands to the target. Devices that the target does not name are left as they are."""
    floor = dict(inputs.needs)
    planned = {d.device: d for node in target.nodes for d in node.devices}
    snapshot = replace(
        snapshot, devices={n: _standing_or_coming(snapshot, d, planned) for n, d in snapshot.devices.items()}
    )
    touchable = {n: d for n, d in planned.items() if n in snapshot.devices and n not in snapshot.fixed}
    goal: dict[str, PlannedDevice] = {**snapshot.devices, **touchable}
    moved = [name for name in sorted(goal) if _differs(snapshot, name, goal[name])]
    blocked = _blocked(snapshot, planned)
    if not moved:
        (settle,) = _PathBuilder(snapshot, target, goal, inputs).settled(blocked)
        settle = replace(settle, devices=goal)  # alike, but for what no slice is restarted for
        return RolloutPath(
            (settle,), "only the shares change: nothing to start or stop", floor_per_s=floor, blocked=blocked
        )
    refused = ""
    for name, waypoints in _waypoint_choices(snapshot, goal, moved, inputs):
        path = _PathBuilder(snapshot, target, goal, inputs)
        if all(path.batches(waypoint) for waypoint in waypoints):
            steps = _at_full_clocks(snapshot, tuple(path.settled(blocked)))
            return RolloutPath(steps, name, floor_per_s=floor, blocked=blocked)
        refused = refused or path.refused
    return RolloutPath((), f"no order of steps keeps the capacity that the load needs: {refused}", True, floor)


def _at_full_clocks(snapshot: FleetSnapshot, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps with governors at rest until the last one: what carries the load of slices that leave has, before they
    do, the clock that its capacity was counted at."""
    if not any(step.drained or step.ready for step in steps):
        return steps
    *way, last = (replace(step, devices=_ungoverned(step.devices)) for step in steps)
    governed = any(device.governed and device.slices for device in snapshot.devices.values())
    if governed and steps[0].name != "start":
        routes = serving_routes(snapshot.routes, snapshot.ready)
        way.insert(0, Step("clocks", routes, _ungoverned(snapshot.devices), frozenset(), {}))
    return (*way, replace(last, devices=steps[-1].devices))


def _ungoverned(devices: Devices) -> Devices:
    return {name: replace(device, governor="") if device.governed else device for name, device in devices.items()}


def _blocked(snapshot: FleetSnapshot, planned: Devices) -> str:
    """Devices that the target wants otherwise than they stand, and that may not be touched now."""
    names = [n for n in sorted(planned) if n in snapshot.fixed and n in snapshot.devices]
    differ = [name for name in names if _differs(snapshot, name, planned[name])]
    return f"{', '.join(differ)} cannot be changed now: lost, or nothing is heard of its agent" if differ else ""


def _standing_or_coming(snapshot: FleetSnapshot, device: PlannedDevice, planned: Devices) -> PlannedDevice:
    """What serves on a device, and what is on its way there and still wanted."""
    parts = {k: p for k, p in snapshot.ready.items() if k.device == device.device}
    if device.device in planned:
        wanted = planned[device.device].slices
        parts |= {p.key: p for p in wanted if p.key in snapshot.present and p.key not in parts}
    return replace(device, slices=tuple(parts[k] for k in sorted(parts)))


def _differs(snapshot: FleetSnapshot, name: str, goal: PlannedDevice) -> bool:
    if not _differ_in_slices_only(snapshot.devices[name], goal):
        return True
    wanted = {part.key: part for part in goal.slices}
    here = {key for key in snapshot.present if key.device == name}
    return here != set(wanted) or any(not _same(snapshot.ready.get(key), p) for key, p in wanted.items())


def _differ_in_slices_only(a: PlannedDevice, b: PlannedDevice) -> bool:
    """Whether two desired states differ in their slices at most."""
    return _LIMITS(a) == _LIMITS(b)


def _same(a: PlannedSlice | None, b: PlannedSlice | None) -> bool:
    """Whether two slices serve the same variants."""
    return same_variants(a.hosted if a else (), b.hosted if b else ())


def _gone(old: PlannedSlice, new: PlannedSlice) -> PlannedSlice:
    """What a slice serves of families, or stages of them, that it is to serve no longer."""
    kept = {h.model for h in new.hosted}
    return replace(old, hosted=tuple(h for h in old.hosted if h.model not in kept))


def _staying(old: PlannedSlice, new: PlannedSlice) -> PlannedSlice:
    """What a slice serves all the while that it is changed."""
    before = {h.model for h in old.hosted}
    return replace(new, hosted=tuple(h for h in new.hosted if h.model in before))


def _waypoint_choices(
    snapshot: FleetSnapshot, goal: Devices, moved: list[str], inputs: RolloutInputs
) -> Iterator[tuple[str, list[Devices]]]:
    """Waypoints that end in the goal, cheapest first."""
    yield "in the fewest steps that keep the capacity", [goal]
    if both := _beside(snapshot.devices, goal, inputs):
        yield "what comes is loaded beside what goes", [both, goal]
    surges = list(_surges(snapshot, goal, moved, inputs))
    for helped, spare in surges:
        surged = {**snapshot.devices, spare.device: spare}
        yield f"a sleeping device carries {helped} while it is rebuilt", [surged, {**goal, spare.device: spare}, goal]
    before: tuple[Devices, ...] = ()
    for steps in count(1):
        light_now, light_goal, *light = (
            _lighter(devices, inputs, snapshot.fixed, steps)
            for devices in (snapshot.devices, goal, *({spare.device: spare} for _, spare in surges))
        )
        if before == (light_now, light_goal, *light):
            return
        before = (light_now, light_goal, *light)
        yield "what runs has faster variants while devices are rebuilt", [light_now, goal]
        yield "all that serves has faster variants while devices are rebuilt", [light_now, light_goal, goal]
        for (helped, _), helper in zip(surges, light, strict=True):
            yield (
                f"faster variants, and a sleeping device carries {helped} while it is rebuilt",
                [{**light_now, **helper}, {**light_goal, **helper}, goal],
            )


def _beside(now: Devices, goal: Devices, inputs: RolloutInputs) -> Devices:
    """Running slices, plus new families on them where they fit, plus new slices on free places. Nothing if another way
    offers the same."""
    found, helps = dict[str, PlannedDevice](), False
    for name, device in now.items():
        before, parts = {part.key: part for part in device.slices}, list[PlannedSlice]()
        for new in goal[name].slices:
            old = before.get(new.key)
            if old is None and not any(new.key.overlaps(key) for key in before):
                parts.append(new)
            elif old is not None and inputs.swappable(old, new):
                stays = _gone(old, new).hosted
                parts.append(replace(new, hosted=(*stays, *new.hosted)))
                helps |= bool(stays and _gone(new, old).hosted)
        found[name] = _merged(device, goal[name], frozenset(part.key for part in parts), parts)
    return found if helps else {}


def _surges(
    snapshot: FleetSnapshot, goal: Devices, moved: list[str], inputs: RolloutInputs
) -> Iterator[tuple[str, PlannedDevice]]:
    """For a device that is rebuilt, a device that sleeps before and after, with the target's slices of the first."""
    busy = {key.device for key in snapshot.present} | snapshot.fixed | snapshot.closed
    spare = [name for name in sorted(goal) if name not in busy and not goal[name].slices]
    for helped in moved:
        if helped not in busy or not goal[helped].slices:
            continue
        for name in spare:
            if inputs.same_type(helped, name):
                copy = tuple(replace(p, key=replace(p.key, device=name)) for p in goal[helped].slices)
                yield helped, replace(goal[helped], device=name, slices=copy)
                break


def _lighter(devices: Devices, inputs: RolloutInputs, fixed: frozenset[str], steps: int) -> Devices:
    """The same slices with faster variants."""
    return {
        name: device if name in fixed else replace(device, slices=tuple(inputs.faster(p, steps) for p in device.slices))
        for name, device in devices.items()
    }


@dataclass(frozen=True, slots=True)
class Exchange:
    """Slices that go, with the slices that need their place: the smallest change that can be made by itself."""

    drops: frozenset[SliceKey]
    adds: tuple[PlannedSlice, ...]


def _units(now: Devices, goal: Devices) -> list[Exchange]:
    """Everything that differs, in at most UNITS_MAX bundles."""
    units = []
    for name in sorted(goal):
        here, there = ({p.key: p for p in devices[name].slices} for devices in (now, goal))
        groups: list[set[SliceKey]] = []
        for key in sorted({*here, *there}):
            if not _same(here.get(key), there.get(key)):
                touching = [g for g in groups if any(key.overlaps(other) for other in g)]
                groups = [*(g for g in groups if g not in touching), {key}.union(*touching)]
        units += [
            Exchange(frozenset(g & here.keys()), tuple(there[k] for k in sorted(g & there.keys()))) for g in groups
        ]
    size = -(-len(units) // UNITS_MAX)
    bundles = [units[i : i + size] for i in range(0, len(units), size)] if units else []
    return [Exchange(frozenset().union(*(u.drops for u in b)), tuple(p for u in b for p in u.adds)) for b in bundles]


def _nothing_changed(now: Devices, goal: Devices) -> Devices:
    """What stands after no unit at all."""
    found = {}
    for name, device in now.items():
        awake = device.slices and goal[name].slices and device.target == DeviceState.AWAKE
        kept = awake and _differ_in_slices_only(device, goal[name])
        found[name] = device if kept else _merged(device, goal[name], frozenset(), ())
    return found


def _merged(
    device: PlannedDevice, goal: PlannedDevice, drops: frozenset[SliceKey], adds: Sequence[PlannedSlice]
) -> PlannedDevice:
    parts = {p.key: p for p in (*(p for p in device.slices if p.key not in drops), *adds)}
    base = goal if goal.slices or not parts else device
    target = DeviceState.AWAKE if parts else base.target
    return replace(base, target=target, slices=tuple(parts[k] for k in sorted(parts)))


def _with_unit(now: Devices, goal: Devices, before: Devices, chosen: list[Exchange], unit: Exchange) -> Devices:
    """What stands after one more unit; `before`: after the chosen ones."""
    names = {key.device for key in unit.drops} | {part.key.device for part in unit.adds}
    units = [*chosen, unit]
    drops = frozenset[SliceKey]().union(*(u.drops for u in units))
    waypoint = dict(before)
    for name in names:
        if name in now:
            adds = [part for u in units for part in u.adds if part.key.device == name]
            waypoint[name] = _merged(now[name], goal[name], drops, adds)
    return waypoint


class _Change(NamedTuple):
    """What a hop does: what stands after it, what it starts, what serves meanwhile, what it stops and changes late."""

    wanted: dict[SliceKey, PlannedSlice]
    started: dict[SliceKey, PlannedSlice]
    shifted: dict[SliceKey, PlannedSlice]
    leaving: set[SliceKey]
    goes: frozenset[SliceKey]
    late: set[SliceKey]
    slower: set[SliceKey]


class _PathBuilder:
    """Steps taken so far, and what would stand after them."""

    def __init__(self, snapshot: FleetSnapshot, target: Plan, goal: Devices, inputs: RolloutInputs) -> None:
        self._target, self._inputs = target, inputs
        self._devices: dict[str, PlannedDevice] = dict(snapshot.devices)
        self._ready: dict[SliceKey, PlannedSlice] = dict(snapshot.ready)
        self._present: set[SliceKey] = set(snapshot.present)
        self._routes = serving_routes(snapshot.routes, self._ready)
        self._steps: list[Step] = []
        after = [p for d in goal.values() for p in d.slices]
        strict = self._floor(inputs, after)
        self._laws = [(inputs, strict)]
        if short := {family: need for family, need in inputs.needs.items() if strict[family] < need}:
            sustained = replace(inputs, needs=short, capacity=inputs.sustained)
            self._laws.append((sustained, self._floor(sustained, after)))
        self.refused = ""

    def _floor(self, inputs: RolloutInputs, after: Sequence[PlannedSlice]) -> dict[str, float]:
        """What each family's slices have to carry on the way, by one law of capacity [1/s]."""
        before = routed_capacity(self._routes, self._ready, inputs)
        return {
            family: min(need, before.get(family, 0.0), capacity_of(family, after, inputs))
            for family, need in inputs.needs.items()
        }

    def settled(self, blocked: str) -> Iterator[Step]:
        """The steps; the last one routes exactly as the target says, or over what serves where not all of it stands."""
        yield from self._steps
        routes = (
            interim_routes(self._target, self._ready, self._inputs, self._routes) if blocked else self._target.routes
        )
        yield Step("settle", routes, dict(self._devices), frozenset(), {})

    def batches(self, goal: Devices) -> bool:
        """Hop to the goal, all at once if that is legal, else as many units at a time as is legal."""
        if self.hop(goal):
            return True
        remaining = _units(self._devices, goal)
        while remaining:
            chosen: list[Exchange] = []
            waypoint = _nothing_changed(self._devices, goal)
            for unit in remaining:
                further = _with_unit(self._devices, goal, waypoint, chosen, unit)
                if self._change(further) is not None:
                    chosen.append(unit)
                    waypoint = further
            if not chosen:
                return False
            self.hop(waypoint)
            remaining = [unit for unit in remaining if unit not in chosen]
        return self.hop(goal)

    def hop(self, waypoint: Devices) -> bool:
        """Take the steps to a waypoint if they are legal; else say in `refused` why not."""
        steps = self._try(waypoint)
        if steps is None:
            return False
        self._steps += steps
        wanted = {part.key: part for d in waypoint.values() for part in d.slices}
        self._devices, self._ready, self._present = dict(waypoint), wanted, set(wanted)
        if steps:
            self._routes = interim_routes(self._target, wanted, self._inputs, self._routes)
        return True

    def _try(self, waypoint: Devices) -> list[Step] | None:
        """The steps of one hop, None when they would route too little."""
        change = self._change(waypoint)
        if change is None:
            return None
        wanted, started, shifted, leaving, goes, late, slower = change
        steps = []
        devices: Devices = self._devices
        if started:
            devices = self._started_beside(waypoint, wanted, started)
            steps.append(Step("start", self._routes, devices, frozenset(), started))
        if (
            leaving
            or late
            or any(not _differ_in_slices_only(devices[name], device) for name, device in waypoint.items())
        ):
            routes = interim_routes(
                self._target, shifted, self._inputs, self._routes, slow={k: wanted[k] for k in slower}
            )
            left = {k: self._ready[k] for k in goes} | {k: _gone(self._ready[k], wanted[k]) for k in slower}
            routes = tuple(with_draining_targets(route, left) for route in routes)
            ready = {k: wanted[k] for k in late}
            steps.append(Step("shift" if goes or late else "sleep", routes, dict(waypoint), goes, ready))
        return steps

    def _change(self, waypoint: Devices) -> _Change | None:
        """What one hop changes, None when it would route too little."""
        wanted: dict[SliceKey, PlannedSlice] = {}
        changed, missing = set(), set()
        for device in waypoint.values():
            for part in device.slices:
                wanted[part.key] = part
                snapshot = self._ready.get(part.key)
                if snapshot is None:
                    missing.add(part.key)
                elif snapshot is not part and not _same(snapshot, part):
                    changed.add(part.key)
        leaving = self._present - wanted.keys()
        rebuilt = {k for k in changed if not self._inputs.swappable(self._ready[k], wanted[k])}
        # A slice that shrinks its throughput gets its smaller share first, one that grows gets its larger share last.
        slower = {k for k in changed - rebuilt if self._slower(self._ready[k], wanted[k])}
        early = {k for k in missing if not any(k.overlaps(other) for other in leaving)}
        late = (missing - early) | slower | rebuilt
        started = {**{k: wanted[k] for k in early}, **{k: wanted[k] for k in changed - rebuilt - slower}}
        kept = {k: p for k, p in self._ready.items() if k in wanted and k not in rebuilt}
        shifted = {**kept, **started}
        goes = frozenset(k for k in (leaving | rebuilt) if k in self._ready)
        slowed = {k: _staying(p, wanted[k]) if k in slower else p for k, p in shifted.items()} if slower else shifted
        if not self._enough(shifted, slowed, wanted):
            return None
        return _Change(wanted, started, shifted, leaving, goes, late, slower)

    def _slower(self, old: PlannedSlice, new: PlannedSlice) -> bool:
        """Whether it will serve a family more slowly, or not at all."""
        return bool(_gone(old, new).hosted) or any(
            capacity_of(h.family, [new], self._inputs) < capacity_of(h.family, [old], self._inputs) for h in new.hosted
        )

    def _started_beside(
        self, waypoint: Devices, wanted: Mapping[SliceKey, PlannedSlice], started: Mapping[SliceKey, PlannedSlice]
    ) -> Devices:
        """What runs and what fits beside it, per device; nothing that serves is stopped."""
        beside: dict[str, PlannedDevice] = {}
        for name, goal in waypoint.items():
            parts = {k: p for k, p in self._ready.items() if k.device == name}
            parts |= {k: p for k, p in started.items() if k.device == name}
            base = goal if any(k in wanted for k in parts) else self._devices[name]
            target = DeviceState.AWAKE if parts else base.target
            beside[name] = replace(base, target=target, slices=tuple(parts[k] for k in sorted(parts)))
        return beside

    def _enough(self, *routed: Mapping[SliceKey, PlannedSlice]) -> bool:
        """Whether each of these sets of slices carries what the load needs, or at least what it ever did."""
        distinct = {id(parts): parts for parts in routed}.values()
        for inputs, floors in self._laws:
            for family, floor in sorted(floors.items()):
                during = min(capacity_of(family, parts.values(), inputs) for parts in distinct)
                if during < floor - NEED_TOLERANCE:
                    self.refused = f"{family} would have {during:.1f}/s of the {floor:.1f}/s it needs"
                    return False
        return True
