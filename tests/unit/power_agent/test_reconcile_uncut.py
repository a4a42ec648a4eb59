"""Whole GPUs and CPUs: nothing is created or destroyed, nothing starts in a place before what ran there has ended."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_agent.slices.cordons import without_devices
from power_agent.slices.core.reconcile import (
    SeenDevice,
    SeenSlice,
    Task,
    reconcile,
    refuse_cordoned,
    refuse_plan,
)
from tests.support.plans import CATALOG, LARGE, SMALL
from trefoil.core.catalog import Variant
from trefoil.core.common import Revision
from trefoil.core.device_types import T4, WHOLE, device_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed

GPU, CPU, CORES, TENTHS = "node0/gpu0", "node0/cpu", 4, 10
TYPES = {GPU: T4, CPU: device_type(f"cpu:{CORES}")}


def part(device: str, kind: str, start: int, size: int, variant: Variant = SMALL) -> PlannedSlice:
    return PlannedSlice(
        SliceKey(device, kind, start, size), (Hosted("toy", variant.name, variant.version, 0, 1, 1, 8),), 2
    )


def whole(variant: Variant = SMALL) -> PlannedSlice:
    return part(GPU, WHOLE, 0, 1, variant)


def cores(start: int, width: int) -> PlannedSlice:
    return part(CPU, f"cpu:{width}", start, width)


def quota(start: int, tenths: int) -> PlannedSlice:
    return part(CPU, f"quota:{tenths // TENTHS}.{tenths % TENTHS}", start, tenths)


def node_plan(*slices: PlannedSlice, number: int = 1) -> NodePlan:
    devices = [PlannedDevice(d, DeviceState.AWAKE, tuple(s for s in slices if s.key.device == d)) for d in TYPES]
    return sealed(NodePlan(node="node0", devices=tuple(devices)), Revision(1, number))


def seen(*slices: SeenSlice, **more) -> tuple[SeenDevice, ...]:
    return tuple(
        SeenDevice(
            d, kind, DeviceState.AWAKE, mig_on=False, slices=tuple(s for s in slices if s.key.device == d), **more
        )
        for d, kind in TYPES.items()
    )


@st.composite
def layouts(draw) -> tuple[PlannedSlice, ...]:
    """The GPU or not; and a CPU cut one way, with gaps."""
    chosen = [whole(draw(st.sampled_from([SMALL, LARGE])))] if draw(st.booleans()) else []
    unit, make = draw(st.sampled_from([(1, cores), (TENTHS, quota)]))
    at = 0
    while at < CORES * unit:
        width = draw(st.integers(1, CORES * unit - at))
        if draw(st.booleans()) and (unit == 1 or width > 1):  # a tenth of a core has too little memory for a Triton
            chosen.append(make(at, width))
        at += width
    return tuple(chosen)


@st.composite
def nodes(draw) -> tuple[SeenSlice, ...]:
    found = []
    for one in draw(layouts()):
        state = draw(st.sampled_from([SliceState.READY, SliceState.STARTING, SliceState.DRAINING, SliceState.FAILED]))
        running = state != SliceState.FAILED or draw(st.booleans())
        ready = state == SliceState.READY
        found.append(
            SeenSlice(one.key, state, one.hosted, has_instance=False, has_compute=False, running=running, loaded=ready)
        )
    return tuple(found)


def apart(one: SliceKey, other: SliceKey) -> bool:
    """Cores and tenths of cores are different measures of the same CPUs."""
    scale = {True: TENTHS, False: 1}
    a, b = (scale[k.slice_type.startswith("cpu:")] for k in (one, other))
    return (
        one.device != other.device
        or (one.start + one.size) * a <= other.start * b
        or (other.start + other.size) * b <= one.start * a
    )


class Model:
    """Processes in places; refuses two in one place."""

    def __init__(self, slices: tuple[SeenSlice, ...]) -> None:
        self.slices = {one.key: one for one in slices}

    def do(self, task: Task) -> None:
        before = self.slices.get(task.slice, SeenSlice(task.slice, SliceState.PENDING, (), False, False))
        changes: dict[str, object]
        match task.verb:
            case "start":
                running = [k for k, s in self.slices.items() if s.running]
                assert all(apart(task.slice, k) for k in running), f"{task} beside {running}"
                changes = {"running": True, "state": SliceState.STARTING, "hosted": task.hosted, "loaded": False}
            case "load":
                assert before.running
                state = SliceState.SWAPPING if before.state == SliceState.READY else SliceState.STARTING
                changes = {"loaded": True, "hosted": task.hosted, "state": state}
            case "warm_up":
                changes = {"state": SliceState.READY}
            case "drain":
                changes = {"state": SliceState.DRAINING, "drained": True}
            case "stop":
                assert before.state != SliceState.READY
                changes = {"running": False, "loaded": False, "state": SliceState.GONE}
            case verb:
                raise AssertionError(f"{verb}: nothing can be cut here")
        self.slices[task.slice] = dataclasses.replace(before, **changes)

    def prune(self, plan: NodePlan) -> None:
        """As the agent forgets what is gone."""
        wanted = {p.key for d in plan.devices for p in d.slices}
        self.slices = {k: s for k, s in self.slices.items() if s.running or k in wanted}


@given(before=nodes(), after=layouts(), chance=st.randoms(use_true_random=False))
def test_whatever_ran_and_is_planned_it_ends_in_the_plan(before, after, chance: random.Random):
    model, plan = Model(before), node_plan(*after)
    refuse_plan(plan, "node0", seen(), CATALOG)
    for _ in range(200):
        model.prune(plan)
        tasks = reconcile(seen(*model.slices.values()), plan, CATALOG)
        if not tasks:
            break
        model.do(chance.choice([task for task in tasks if not task.after]))
    serves = {(s.key, s.hosted) for s in model.slices.values() if s.state == SliceState.READY and s.running}
    assert serves == {(one.key, one.hosted) for one in after}
    assert set(model.slices) == {one.key for one in after}


def test_a_plan_without_change_has_no_steps():
    parts = whole(), cores(0, 2)
    ready = [SeenSlice(p.key, SliceState.READY, p.hosted, False, False, running=True, loaded=True) for p in parts]
    assert reconcile(seen(*ready), node_plan(*parts), CATALOG) == ()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((cores(0, 1), quota(20, 5)), "cut all of its slices one way"),
        ((cores(0, 2), cores(1, 1)), "overlap"),
        ((quota(0, 15), quota(10, 5)), "overlap"),
        ((cores(3, 2),), "starts at one of"),
        ((quota(76, 5),), "starts at one of"),  # places of quotas reach to twice the cores
        ((part(CPU, "quota:4.1", 0, 41),), "no slice type"),
        ((part(GPU, "1g.5gb", 0, 1),), "no slice type 'whole'|no slice type"),
        ((part(GPU, WHOLE, 0, 2),), "starts at one of"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_with_a_remedy(parts, words):
    with pytest.raises(PlanError, match=words):
        refuse_plan(node_plan(*parts), "node0", seen(), CATALOG)


def test_cpus_that_only_get_metered_take_no_slice():
    closed = tuple(dataclasses.replace(d, closed="set cpu = serve") for d in seen())
    with pytest.raises(PlanError, match="cpu = serve"):
        refuse_plan(node_plan(cores(0, 1)), "node0", closed, CATALOG)
    refuse_plan(node_plan(), "node0", closed, CATALOG)


# --- out of service ---------------------------------------------------------------------------------------------------


def test_what_has_to_leave_drains_whatever_the_plan_says_and_the_reason_is_told():
    one = whole()
    ready = SeenSlice(one.key, SliceState.READY, one.hosted, False, False, running=True, loaded=True)
    plan = node_plan(one, cores(0, 1))
    evicted = tuple(
        dataclasses.replace(d, cordon="a fan is broken", evicted=True) if d.device == GPU else d for d in seen(ready)
    )
    tasks = reconcile(evicted, plan, CATALOG)
    assert [(t.verb, t.why) for t in tasks if t.slice == one.key] == [
        ("drain", "out of service: a fan is broken"),
        ("stop", "out of service: a fan is broken"),
    ]
    assert {t.slice for t in tasks if t.slice != one.key} == {cores(0, 1).key}, "the rest of the plan goes on"
    assert without_devices(plan, {GPU}).devices[0].slices == ()
    assert without_devices(plan, {"node0/gpu7"}) is plan


def test_only_what_is_new_is_refused_on_a_device_out_of_service():
    one = whole()
    ready = SeenSlice(one.key, SliceState.READY, one.hosted, False, False, running=True, loaded=True)
    cordoned = tuple(dataclasses.replace(d, cordon="a fan is broken") for d in seen(ready))
    refuse_cordoned(node_plan(one), cordoned)
    with pytest.raises(PlanError, match=r"node0/cpu.slices = 'node0-cpu-cpu-1-0'.*a fan is broken.*--release"):
        refuse_cordoned(node_plan(one, cores(0, 1)), cordoned)
    with pytest.raises(PlanError, match="a fan is broken"):
        refuse_cordoned(node_plan(one), tuple(dataclasses.replace(d, evicted=True) for d in cordoned))
