"""A controller whose disk is full, read-only or failing: what cannot be kept is refused whole, and all continues again.

The store on a disk that fails at every single call; the loop, its operators and its lease in virtual time on one that
refuses; and a real small disk.
"""

import itertools
from dataclasses import replace

import pytest
import structlog

from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from protos.controller.v1 import controller_pb2 as pb
from tests.support.failing_disk import ERRORS, FailingDisk, fill, small_disk
from tests.support.plans import plan_of, planned
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.support.virtual.system import System, history
from trefoil.core.errors import DiskUnavailable
from trefoil.core.objective import Budget, Objective
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

PLANS = [plan_of(planned("3g.20gb", 4)), plan_of(planned("1g.5gb", 0))]
FREE = {"mode": "ACT", "frozen": False, "pinned": False}
PINNED = FREE | {"pinned": True}


def found(folder, names=("control", "plans")):
    """What a controller that starts now knows."""
    store = DiskStore(folder, 10)
    return {name: store.load_plain(name) if name == "control" else list(store.load_all(name, Plan)) for name in names}


@pytest.mark.parametrize("code", ERRORS)
def test_what_belongs_together_is_kept_together_or_not_at_all_wherever_the_disk_fails(tmp_path, monkeypatch, code):
    disk = FailingDisk(monkeypatch, code)
    for at in itertools.count():
        store = DiskStore(tmp_path / str(at), 10)
        store.save_together({"control": FREE, "plans": PLANS[:1]})
        disk.fail(at, 5)
        refused = ""
        try:
            store.save_together({"control": PINNED, "plans": PLANS})
        except DiskUnavailable as error:
            refused = str(error)
        disk.mend()
        assert store.trouble == refused
        if refused:
            assert "the plan in force stays" in refused
            store.check()
        assert not store.trouble
        wanted = {"control": FREE, "plans": PLANS[:1]} if refused else {"control": PINNED, "plans": PLANS}
        assert found(tmp_path / str(at)) == wanted
        if not refused and disk.calls <= at:
            break
    assert at > 7  # each of both was opened, written, synced and renamed


def test_what_may_wait_is_written_when_there_is_room_the_newest_alone(tmp_path, monkeypatch):
    store, disk = DiskStore(tmp_path, 10), FailingDisk(monkeypatch)
    disk.fail()
    with structlog.testing.capture_logs() as log:
        for number in range(50):
            store.save_later("counts", {"replans": {"load": number}})
        with pytest.raises(DiskUnavailable):
            store.check()
        disk.mend()
        store.check()
    assert store.load_plain("counts") == {"replans": {"load": 49}}
    assert [line["event"] for line in log] == ["disk", "disk: written again"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts.json", "decisions"]


def test_there_is_room_again_when_as_much_fits_as_was_refused(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        store = DiskStore(folder, 10)
        store.save("plans", PLANS[:1])
        fill(folder).unlink()
        (folder / "other").write_bytes(bytes(40_000))
        with pytest.raises(DiskUnavailable, match="No space left on device"):
            store.save("plans", ["x" * 30_000])
        with pytest.raises(DiskUnavailable):
            store.check()
        assert list(store.load_all("plans", Plan)) == PLANS[:1]
        (folder / "other").unlink()
        store.check()
        assert not store.trouble


def test_a_file_that_cannot_be_read_is_neither_taken_for_lost_nor_set_aside(tmp_path, monkeypatch):
    store = DiskStore(tmp_path, 10)
    store.save("plans", PLANS)
    with monkeypatch.context() as patched:
        patched.setattr(
            "trefoil.runtime.state_files.read_plain", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "I/O error"))
        )
        with pytest.raises(DiskUnavailable, match="cannot be read"):
            store.load_all("plans", Plan)
    assert list(store.load_all("plans", Plan)) == PLANS


def test_a_decision_and_its_plan_are_kept_together(tmp_path, monkeypatch):
    disk, kept = FailingDisk(monkeypatch), 0
    store = DiskStore(tmp_path, 100)
    for at in range(12):
        record = DecisionRecord(f"1.{at:06d}", PLANS[0].revision, "load", "exact", "{}", 1, "why", {}, 0.0)
        disk.fail(at, 3)
        try:
            store.save_decision(record, PLANS[0])
            kept += 1
        except DiskUnavailable:
            assert record.id not in store.decision_ids()
        disk.mend()
        store.check()
    assert 0 < kept < 12
    assert all(store.decision(name)[1] == PLANS[0] for name in store.decision_ids())


async def test_without_an_epoch_on_disk_the_role_is_left_to_others_and_taken_when_there_is_room(tmp_path, monkeypatch):
    clock = ManualClock(1000.0)
    state = state_on(Server(clock), "default", clock)
    store, disk = DiskStore(tmp_path, 10), FailingDisk(monkeypatch)
    leader = Leadership(state, store, clock, Metrics("controller"), lambda: [7])
    for fails_from in (0, 4):  # before the role is taken, and just after
        disk.fail(fails_from)
        with pytest.raises(DiskUnavailable):
            await leader._step()
        assert leader.epoch == 0
        assert await state.holder("controller") is None
    disk.mend()
    await leader._step()
    assert leader.epoch >= 9  # above the agents' and the one that was given back
    assert store.load_plain("epoch") == {"epoch": leader.epoch}
    disk.fail()
    await clock.advance(1.0)
    await leader._step()
    assert leader.epoch  # who leads already, leads on


# --- the loop and its operators ---------------------------------------------------------------------------------------


def asked(system: System, what) -> str:
    """The answer to an operator: "" or why not; while the disk refuses, with what is then in force."""
    place, said = system.controller, []

    async def ask() -> None:
        try:
            await what(place.service)
            said.append("")
        except DiskUnavailable as error:
            said.append(str(error) or "refused")

    place.process.start(system.loop, ask())
    return said


def in_force(system: System):
    core = system.controller.service._loop.core
    plans = [plan.revision for plan in core.plans]
    return core.control, plans, dict(core.objectives), core.max_watts, core.explorer.run, core.budgets


def slower(service) -> Objective:
    return replace(next(iter(service._loop.core.objectives.values())), slo_ms=300.0, number=0)


KEPT = ("control", "plans", "objectives", "fleet_objective")
OPERATORS = {
    "freeze": lambda s: s.Freeze(pb.FreezeRequest(frozen=True), None),
    "mode": lambda s: s.SetMode(pb.SetModeRequest(mode=2), None),
    "pin": lambda s: s.Pin(pb.PinRequest(plan=codec.to_proto(s._loop.core.current)), None),
    "rollback": lambda s: s.Rollback(pb.RollbackRequest(), None),
    "replan": lambda s: s.Replan(pb.ReplanRequest(why="a test"), None),
    "objective": lambda s: s.SetObjectives(
        pb.SetObjectivesRequest(objectives=[{"objective": codec.to_proto(slower(s))}]), None
    ),
    "apply": lambda s: s.Apply(
        pb.ApplyRequest(
            objectives=[codec.to_proto(slower(s))],
            max_watts=5000.0,
            mode="ACT_MODE_ADVISE",
            budgets=[codec.to_proto(Budget("acme", grams_per_day=5.0))],
        ),
        None,
    ),
    "cap": lambda s: s.SetObjectives(pb.SetObjectivesRequest(max_watts=5000.0), None),
}


@pytest.mark.parametrize("what", OPERATORS)
def test_a_change_that_cannot_be_kept_is_refused_whole_and_done_when_there_is_room(what):
    seen = {}

    def faults(system: System) -> None:
        files = system.controller.files

        def full() -> None:
            files.refuses = lambda: True
            seen["before"], seen["disk"] = in_force(system), dict(files)
            seen["refused"] = asked(system, OPERATORS[what])

        def later() -> None:
            seen["after"] = in_force(system)
            seen["kept"] = {name: files[name] for name in KEPT if name in files}
            seen["explained"] = system.controller.service._disk.trouble
            files.refuses = lambda: False
            seen["accepted"] = asked(system, OPERATORS[what])

        system.loop.call_later(4.0, lambda: asked(system, OPERATORS["replan"]))
        system.loop.call_later(12.0, full)
        system.loop.call_later(16.0, later)

    broken, system = history(3, faults)
    assert not broken
    assert seen["refused"][0], "it was accepted"
    assert seen["after"] == seen["before"]
    assert seen["kept"] == {name: seen["disk"][name] for name in seen["kept"]}
    assert seen["explained"]
    assert seen["accepted"] == [""]
    assert {end for request in system.requests for end in request.ends} == {"OK"}


def test_a_file_among_the_decisions_that_is_none_is_left_alone(tmp_path):
    store = DiskStore(tmp_path, 10)
    (tmp_path / "decisions").mkdir(exist_ok=True)
    (tmp_path / "decisions" / "1.x.json").write_text("{}")
    assert store.decision_ids() == []
