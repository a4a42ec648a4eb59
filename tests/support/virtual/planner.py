"""A planner that draws a legal plan for the load: other partitions and variants each time, and never too little."""

import asyncio
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.random import Generator

from tests.support.planning import ACCURACY, SERVICE_MS, SHAPES
from tests.support.virtual.loop import VirtualLoop
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB, slice_type
from trefoil.core.errors import Infeasible
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.plan import Expected, NodePlan, Plan, PlannedDevice, PlannedSlice, Route, RouteTarget
from trefoil.core.plan_check import sealed

FAMILY = "digits"
LAYOUTS = (
    (("7g.40gb", 0),),
    (("4g.20gb", 0), ("3g.20gb", 4)),
    (("3g.20gb", 0), ("3g.20gb", 4)),
    (("2g.10gb", 0), ("2g.10gb", 2), ("3g.20gb", 4)),
)
VARIANTS = tuple(ACCURACY)
RESERVE = 0.6  # of a slice's throughput that the planner counts on
DRAWS = 20
CANDIDATES = 3  # of one exploration


def throughput_per_s(kind: str, variant: str) -> float:
    """Of one slice, as its profile says."""
    return 1000.0 / SERVICE_MS[variant][SHAPES.index(kind)]


@functools.cache  # some hundreds: what is the same object is compared and looked up without a look into it
def _part(device: str, kind: str, start: int, version: int) -> PlannedSlice:
    key = SliceKey(device, kind, start, slice_type(A100_40GB, kind).memory_slices)
    return PlannedSlice(key, (Hosted(FAMILY, VARIANTS[version - 1], version, 0, 1, 1, 1),), 2)


class Drawn:
    """Made without arguments, as a user's planner is."""

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Takes a while: much can happen meanwhile."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        if loop.planner_takes_s is None:
            raise Infeasible("the planner failed")
        loop.spend(loop.planner_takes_s)
        return self.decide(view, rng)

    def decide(self, view: PlanView, rng: Generator) -> Decision:
        """The first of some drawn plans that carries the load, else the largest, which says so."""
        need = next((d.rate_p90_per_s for d in view.demand if d.family == FAMILY), 0.0)
        best: tuple[float, Plan] | None = None
        for _ in range(DRAWS):
            plan = self._drawn(view, rng)
            if plan is None:
                return Decision(None, "no device", view.now_s + 2.0, "no_device: none can be used")
            carries = plan.expected[FAMILY].capacity_per_s
            if best is None or carries > best[0]:
                best = carries, plan
            if carries >= need:
                return Decision(plan, f"drawn for {need:.1f}/s", math.inf)
        assert best is not None
        return Decision(replace(best[1], degraded=f"capacity: {best[0]:.1f}/s of {need:.1f}/s"), "drawn", math.inf)

    def _drawn(self, view: PlanView, rng: Generator) -> Plan | None:
        nodes: list[NodePlan] = []
        parts: list[PlannedSlice] = []
        for node in view.fleet.nodes:
            devices = []
            for device in node.devices:
                if node.node in view.fleet.stale or not device.usable:
                    continue
                if parts and rng.random() < 0.25:
                    devices.append(PlannedDevice(device.device, DeviceState.ASLEEP))
                    continue
                mine = self._parts(device.device, rng)
                parts += mine
                devices.append(PlannedDevice(device.device, DeviceState.AWAKE, mine))
            nodes.append(sealed(NodePlan(node=node.node, devices=tuple(devices)), Revision()))
        return self._routed(tuple(nodes), parts) if parts else None

    def _parts(self, device: str, rng: Generator) -> tuple[PlannedSlice, ...]:
        layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
        return tuple([_part(device, *place, int(rng.integers(len(VARIANTS))) + 1) for place in layout])

    def _routed(self, nodes: tuple[NodePlan, ...], parts: Sequence[PlannedSlice]) -> Plan:
        speeds = [throughput_per_s(part.key.slice_type, part.hosted[0].variant) for part in parts]
        whole = sum(speeds)
        targets = tuple(
            RouteTarget(part.key, part.hosted[0].variant, 0, speed / whole, 2)
            for part, speed in zip(parts, speeds, strict=True)
        )
        accuracy = sum(ACCURACY[t.variant] * t.weight for t in targets)
        expected = Expected(1e-4, 3.0, 50.0, accuracy, RESERVE * whole)
        route = Route(FAMILY, "weighted", "fifo", targets=targets, queue_requests_max=200)
        return Plan(planner="drawn", nodes=nodes, routes=(route,), expected={FAMILY: expected}, why="drawn")


class Exploring(Drawn):
    """Has some drawn plans measured first, and remembers how many were."""

    def __init__(self) -> None:
        self.measured = 0

    def asks(self, view: PlanView) -> bool:
        """Always."""
        return True

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """A candidate, or what it decides after the last one."""
        decision = self.plan(view, rng)
        if decision.plan is None or decision.plan.degraded or self.measured == CANDIDATES:
            self.measured = 0
            return decision
        return Candidate(replace(decision.plan, exploration=True), "drawn", measure_s=1.5, requests_min=4)

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Count it."""
        self.measured += 1

    def memory(self) -> Mapping[str, Any]:
        """How many candidates were measured."""
        return {"measured": self.measured}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.measured = int(memory.get("measured", 0))
