"""Whatever a node runs and whatever is planned: doing the tasks in any allowed order ends in the plan."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_agent.slices.core.reconcile import SeenDevice, SeenSlice, Task, reconcile, refuse_plan
from tests.support.plans import CATALOG, LARGE, SMALL, key, planned
from trefoil.core.common import ProfileRow, Revision
from trefoil.core.device_types import A100_40GB, placements
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, Hosted, SliceKey, SliceState
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed

GPUS = ("node0/gpu0", "node0/gpu1")
TRAFFIC = (SliceState.READY, SliceState.SWAPPING)


def node_plan(*slices: PlannedSlice, number: int = 1) -> NodePlan:
    devices = [PlannedDevice(gpu, DeviceState.AWAKE, tuple(s for s in slices if s.key.device == gpu)) for gpu in GPUS]
    return sealed(NodePlan(node="node0", devices=tuple(devices)), Revision(1, number))


def seen(*slices: SeenSlice, foreign: tuple[SliceKey, ...] = (), **more) -> tuple[SeenDevice, ...]:
    return tuple(
        SeenDevice(
            gpu,
            A100_40GB,
            DeviceState.AWAKE,
            slices=tuple(s for s in slices if s.key.device == gpu),
            foreign=tuple(k for k in foreign if k.device == gpu),
            **more,
        )
        for gpu in GPUS
    )


def ready(part: PlannedSlice) -> SeenSlice:
    return SeenSlice(part.key, SliceState.READY, part.hosted, running=True, loaded=True)


@st.composite
def layouts(draw) -> tuple[PlannedSlice, ...]:
    """Some slices of a legal placement of each GPU, with a variant that fits."""
    chosen: list[PlannedSlice] = []
    for gpu in GPUS:
        for kind, start, _ in draw(st.sampled_from(placements(A100_40GB))):
            if draw(st.booleans()):
                variants = [SMALL] if kind == "1g.5gb" else [SMALL, LARGE]
                chosen.append(planned(kind, start, draw(st.sampled_from(variants)), gpu))
    return tuple(chosen)


@st.composite
def nodes(draw) -> tuple[SeenSlice, ...]:
    """A node in any state that a crash, a failure or a rollout can leave behind."""
    found = []
    for part in draw(layouts()):
        kind = draw(st.sampled_from(("ready", "instance", "no_compute", "starting", "failed", "draining", "drained")))
        if kind == "ready":
            found.append(ready(part))
        elif kind == "instance":
            found.append(SeenSlice(part.key, SliceState.PENDING, part.hosted))
        elif kind == "no_compute":
            found.append(SeenSlice(part.key, SliceState.PENDING, has_compute=False))
        elif kind == "starting":
            found.append(
                SeenSlice(part.key, SliceState.STARTING, part.hosted, running=True, loaded=draw(st.booleans()))
            )
        elif kind == "failed":
            found.append(SeenSlice(part.key, SliceState.FAILED, part.hosted, running=draw(st.booleans())))
        else:
            done = kind == "drained"
            found.append(SeenSlice(part.key, SliceState.DRAINING, part.hosted, running=True, drained=done))
    return tuple(found)


class Model:
    """A driver, a node process and Tritons that refuse what the real ones refuse."""

    def __init__(self, slices: tuple[SeenSlice, ...]) -> None:
        self.slices = {part.key: part for part in slices}
        self.touched: set[SliceKey] = set()

    def change(self, key: SliceKey, **fields) -> None:
        self.slices[key] = dataclasses.replace(self.slices[key], **fields)

    def do(self, task: Task) -> None:
        self.touched.add(task.slice)
        getattr(self, task.verb)(task)

    def create_gi(self, task: Task) -> None:
        for other in self.slices.values():
            same = other.key == task.slice
            assert not other.has_instance or not (same or other.key.overlaps(task.slice)), f"{task} over {other.key}"
        self.slices[task.slice] = SeenSlice(task.slice, SliceState.PENDING, has_compute=False)

    def create_ci(self, task: Task) -> None:
        assert self.slices[task.slice].has_instance
        self.change(task.slice, has_compute=True)

    def start(self, task: Task) -> None:
        part = self.slices[task.slice]
        assert part.has_compute
        assert not part.running
        self.change(task.slice, running=True, state=SliceState.STARTING, hosted=task.hosted, loaded=False)

    def load(self, task: Task) -> None:
        part = self.slices[task.slice]
        assert part.running
        state = SliceState.SWAPPING if part.state in TRAFFIC else SliceState.STARTING
        self.change(task.slice, hosted=task.hosted, loaded=True, state=state)

    def warm_up(self, task: Task) -> None:
        assert self.slices[task.slice].loaded
        self.change(task.slice, state=SliceState.READY)

    def drain(self, task: Task) -> None:
        assert self.slices[task.slice].state in (*TRAFFIC, SliceState.DRAINING)
        self.change(task.slice, state=SliceState.DRAINING, drained=True)

    def stop(self, task: Task) -> None:
        part = self.slices[task.slice]
        assert part.running
        assert part.state not in TRAFFIC, "requests may be on it"
        assert part.state != SliceState.DRAINING or part.drained
        self.change(task.slice, running=False, state=SliceState.GONE, loaded=False)

    def destroy_ci(self, task: Task) -> None:
        assert not self.slices[task.slice].running
        self.change(task.slice, has_compute=False)

    def destroy_gi(self, task: Task) -> None:
        part = self.slices[task.slice]
        assert not part.has_compute
        del self.slices[task.slice]

    def serves(self) -> set[tuple[SliceKey, tuple]]:
        return {(p.key, p.hosted) for p in self.slices.values() if p.state == SliceState.READY and p.running}


def carry_out(model: Model, tasks: tuple[Task, ...], chance: random.Random) -> None:
    """All tasks, in a random order that respects `after`."""
    done: set[int] = set()
    while len(done) < len(tasks):
        open_now = [i for i, t in enumerate(tasks) if i not in done and set(t.after) <= done]
        assert open_now, "tasks wait for each other"
        index = chance.choice(open_now)
        model.do(tasks[index])
        done.add(index)


@settings(deadline=None)  # a busy machine
@given(before=nodes(), after=layouts(), chance=st.randoms(use_true_random=False))
def test_any_allowed_order_of_the_tasks_reaches_the_plan_without_overlap(before, after, chance):
    model, plan = Model(before), node_plan(*after)
    carry_out(model, reconcile(seen(*before), plan, CATALOG), chance)
    assert model.serves() == {(part.key, part.hosted) for part in after}
    assert set(model.slices) == {part.key for part in after}
    assert reconcile(seen(*model.slices.values()), plan, CATALOG) == ()


@settings(deadline=None)  # a busy machine
@given(before=nodes(), after=layouts(), chance=st.randoms(use_true_random=False))
def test_asked_again_after_each_task_it_still_reaches_the_plan(before, after, chance):
    """This is how the agent uses it, and what a crash between any two tasks amounts to."""
    model, plan = Model(before), node_plan(*after)
    for _ in range(200):
        tasks = reconcile(seen(*model.slices.values()), plan, CATALOG)
        if not tasks:
            break
        model.do(chance.choice([task for task in tasks if not task.after]))
    assert model.serves() == {(part.key, part.hosted) for part in after}


@given(before=layouts(), after=layouts(), chance=st.randoms(use_true_random=False))
def test_a_slice_that_may_stay_is_not_touched(before, after, chance):
    model = Model(tuple(ready(part) for part in before))
    carry_out(model, reconcile(seen(*map(ready, before)), node_plan(*after), CATALOG), chance)
    assert not model.touched & {part.key for part in set(before) & set(after)}


@given(layout=layouts())
def test_a_plan_that_runs_already_needs_nothing(layout):
    assert reconcile(seen(*map(ready, layout)), node_plan(*layout), CATALOG) == ()


def verbs(tasks: tuple[Task, ...]) -> list[str]:
    return [task.verb for task in tasks]


def test_another_variant_is_loaded_in_place():
    before = ready(planned("3g.20gb", 0, SMALL))
    tasks = reconcile(seen(before), node_plan(planned("3g.20gb", 0, LARGE)), CATALOG)
    assert verbs(tasks) == ["load", "warm_up"]
    assert "toy-s -> toy-l" in tasks[0].why


def test_a_family_is_loaded_and_unloaded_beside_its_neighbours():
    other = dataclasses.replace(CATALOG.families[0], name="other", sequence=True)
    catalog = dataclasses.replace(CATALOG, families=(*CATALOG.families, other))
    guest = Hosted("other", SMALL.name, SMALL.version, 0, 1, 1, 8)
    alone = planned("3g.20gb", 0, LARGE)
    shared = dataclasses.replace(alone, hosted=(*alone.hosted, guest))
    tasks = reconcile(seen(ready(alone)), node_plan(shared), catalog)
    assert verbs(tasks) == ["load", "warm_up"]  # a family with sequences that comes breaks none
    assert tasks[0].hosted == shared.hosted
    assert verbs(reconcile(seen(ready(shared)), node_plan(alone), catalog))[0] == "drain"  # one that goes would
    other = dataclasses.replace(other, sequence=False)
    catalog = dataclasses.replace(catalog, families=(*CATALOG.families, other))
    assert verbs(reconcile(seen(ready(shared)), node_plan(alone), catalog)) == ["load", "warm_up"]


def test_a_slice_with_sequences_drains_instead_of_swapping_under_them():
    before, after = ready(planned("3g.20gb", 0, SMALL)), node_plan(planned("3g.20gb", 0, LARGE))
    families = tuple(dataclasses.replace(family, sequence=True) for family in CATALOG.families)
    tasks = reconcile(seen(before), after, dataclasses.replace(CATALOG, families=families))
    assert verbs(tasks) == ["drain", "stop", "start", "load", "warm_up"]
    assert "sequences have to end first" in tasks[0].why


@pytest.mark.parametrize("lost", [Hosted("gone", "s", 1), Hosted("toy", "version-9", 9)])
def test_what_the_repository_has_lost_drains_and_goes(lost):
    after = planned("1g.5gb", 0, SMALL)
    before = ready(dataclasses.replace(after, hosted=(lost,)))
    tasks = reconcile(seen(before), node_plan(after), CATALOG)
    assert verbs(tasks) == ["drain", "stop", "start", "load", "warm_up"]
    assert "is not in the model repository any more" in tasks[0].why


def test_variants_that_do_not_fit_beside_each_other_drain_and_start_again():
    before = ready(planned("1g.5gb", 0, LARGE))  # 400 + 100 + 4,000 MiB of 4,864 do fit; 400 + 4,000 + 4,000 would not
    assert verbs(reconcile(seen(before), node_plan(planned("1g.5gb", 0, SMALL)), CATALOG)) == ["load", "warm_up"]
    huge = dataclasses.replace(LARGE, name="toy-xl", version=3)
    catalog = dataclasses.replace(
        CATALOG, families=(dataclasses.replace(CATALOG.families[0], variants=(SMALL, LARGE, huge)),)
    )
    tasks = reconcile(seen(before), node_plan(planned("1g.5gb", 0, huge)), catalog)
    assert verbs(tasks) == ["drain", "stop", "start", "load", "warm_up"]


def test_of_two_stages_on_a_slice_one_leaves_while_the_other_serves():
    of = ("A100-SXM4-40GB", "1g.5gb", "toy", LARGE.name)
    rows = [ProfileRow(*of, stage, 1, 1410, (), 9.0, 9.0, 9.0, 50.0, 5.0, 100.0, 2_000) for stage in (1, 2)]
    catalog = dataclasses.replace(CATALOG, rows=tuple(rows))
    one, two = (dataclasses.replace(planned("1g.5gb", 0, LARGE).hosted[0], stage=n, stages=2) for n in (0, 1))
    both, alone = PlannedSlice(key("1g.5gb"), (one, two)), PlannedSlice(key("1g.5gb"), (one,))
    for before, after in ((both, alone), (alone, both)):  # 400 + 2 x 2,000 MiB of 4,864; whole, each has 4,000
        refuse_plan(node_plan(after), "node0", seen(), catalog)
        assert verbs(reconcile(seen(ready(before)), node_plan(after), catalog)) == ["load", "warm_up"]


def test_a_neighbour_starts_while_another_slice_drains():
    before = ready(planned("4g.20gb", 0))
    tasks = reconcile(seen(before), node_plan(planned("3g.20gb", 4), planned("2g.10gb", 0)), CATALOG)
    free = [task for task in tasks if not task.after]
    assert {(task.verb, task.slice) for task in free} == {("drain", key("4g.20gb")), ("create_gi", key("3g.20gb", 4))}


def test_a_lost_device_is_left_alone():
    devices = tuple(dataclasses.replace(d, state=DeviceState.LOST) for d in seen(ready(planned("7g.40gb"))))
    assert reconcile(devices, node_plan(planned("3g.20gb", 4)), CATALOG) == ()


def broken_plans():
    good = node_plan(planned("4g.20gb", 0))
    slices = good.devices[0].slices
    device = good.devices[0]

    def with_device(**fields):
        return sealed(dataclasses.replace(good, devices=(dataclasses.replace(device, **fields),)), good.revision)

    return {
        "node = 'node9'": sealed(dataclasses.replace(good, node="node9"), good.revision),
        "digest = 'wrong'": dataclasses.replace(good, digest="wrong"),
        "overlap": with_device(slices=(*slices, planned("3g.20gb", 0))),
        "starts at one of": with_device(slices=(planned("4g.20gb", 4),)),
        "clock_mhz = 211": with_device(clock_max_mhz=211),
        "'ASLEEP'": with_device(target=DeviceState.ASLEEP),
        "target = 'UNSPECIFIED'": with_device(target=DeviceState.UNSPECIFIED, slices=()),
        "another device": with_device(slices=(planned("4g.20gb", 0, device="node0/gpu1"),)),
        "planned twice": sealed(dataclasses.replace(good, devices=(device, device)), good.revision),
        "no node reports": with_device(device="node0/gpu7", slices=()),
        "no variant": with_device(
            slices=(dataclasses.replace(slices[0], hosted=(dataclasses.replace(slices[0].hosted[0], variant="x"),)),)
        ),
    }


@pytest.mark.parametrize(("text", "plan"), broken_plans().items(), ids=list(broken_plans()))
def test_an_illegal_plan_is_refused_by_field_and_value(text, plan):
    with pytest.raises(PlanError) as error:
        refuse_plan(plan, "node0", seen(), CATALOG)
    assert text in str(error.value)


def test_a_place_that_a_foreign_instance_holds_is_refused_by_name():
    foreign = (key("1g.5gb", 2),)
    with pytest.raises(PlanError, match=r"node0-gpu0-1g.5gb-2, which this agent did not make.*Remedy: destroy"):
        refuse_plan(node_plan(planned("4g.20gb", 0)), "node0", seen(foreign=foreign), CATALOG)
    refuse_plan(node_plan(planned("3g.20gb", 4)), "node0", seen(foreign=foreign), CATALOG)


def test_mig_mode_off_is_refused_with_the_command_that_mends_it():
    with pytest.raises(PlanError, match="nvidia-smi -i GPU-1f -mig 1"):
        refuse_plan(node_plan(planned("4g.20gb", 0)), "node0", seen(mig_on=False, uuid="GPU-1f"), CATALOG)


def test_what_the_hardware_does_anyway_may_be_asked_for():
    good = node_plan(planned("4g.20gb", 0))
    device = dataclasses.replace(good.devices[0], clock_min_mhz=1410, clock_max_mhz=1410)
    plan = sealed(dataclasses.replace(good, devices=(device,)), good.revision)
    refuse_plan(plan, "node0", seen(), CATALOG)
