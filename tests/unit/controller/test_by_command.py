"""A command wins over the settings until it is reset; what differs is shown; the rest follows the settings."""

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.__main__ import starting_objectives
from controller.loop import declared
from controller.loop.control_loop import load_by_command, load_saved_state
from controller.loop.core.decision import ControlState
from controller.loop.core.saved_state import differences, overrides
from controller.role.by_command import ByCommand
from controller.role.disk_store import DiskStore
from controller.settings import ControllerSettings, ObjectiveSettings, _percentile
from protos.controller.v1 import controller_pb2 as pb
from tests.support.virtual import system as virtual
from tests.support.virtual.planner import FAMILY
from tests.support.virtual.system import System, history
from trefoil.core.errors import InvalidInput, StaleRevision, TrefoilError
from trefoil.core.objective import ActMode, Budget, Objective, ObjectiveMode
from trefoil.runtime import codec
from trefoil.runtime.config import to_toml

ONE = virtual.SETTINGS["objectives"][0]
FIRST = {"objectives": (ONE,), "mode": "act", "max_watts": 0.0}
EDITED = {
    "objectives": (ONE | {"slo": {"latency_ms": 450.0}, "params": {"mine": 2.0}},),
    "mode": "observe",
    "max_watts": 7000.0,
}
AGAIN = {"objectives": (ONE | {"slo": {"latency_ms": 500.0}},), "mode": "act", "max_watts": 8000.0}
WARNING = "commands win over the settings"


def changed(objective: Any, **change: Any) -> pb.SetObjectivesRequest:
    return pb.SetObjectivesRequest(objectives=[pb.ObjectiveChange(objective=objective, **change)])


class Operator:
    """Edits the settings of a controller, restarts it, and commands; what it answers is kept by name."""

    def __init__(self, system: System, edit: Callable[[str, Any], None]) -> None:
        self.system, self.seen, self._edit, self._at_s = system, dict[str, Any](), edit, 6.0

    def does(self, work: Callable[[], None], after_s: float = 1.0) -> None:
        self.system.loop.call_later(self._at_s, work)
        self._at_s += after_s

    def asks(self, name: str, method: str, request: Any) -> None:
        async def ask() -> None:
            service = self.system.controller.service
            try:
                self.seen[name] = await getattr(service, method)(request, None)
            except TrefoilError as error:
                self.seen[name] = error

        self.does(lambda: self.system.controller.process.start(self.system.loop, ask()))

    def sets(self, slo_ms: float) -> None:
        def ask() -> None:
            stored = self.system.controller.service._loop.core.objectives[FAMILY]
            wanted = codec.to_proto(stored)
            wanted.slo_ms = slo_ms
            call = self.system.controller.service.SetObjectives(changed(wanted), None)
            self.system.controller.process.start(self.system.loop, call)

        self.does(ask, 2.0)

    def restarts(self, settings: dict[str, Any]) -> None:
        self.does(self.system.controller.kill)
        self.does(lambda: self.edit(settings), 0.1)
        self.does(self.system.controller.start, 4.0)

    def edit(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            self._edit(name, value)

    def looks(self, name: str) -> None:
        self.asks(name, "GetPlan", pb.GetPlanRequest())
        self.asks(f"{name} objectives", "GetObjectives", pb.GetObjectivesRequest())


def played(monkeypatch: pytest.MonkeyPatch, work: Callable[[Operator], None]) -> tuple[dict[str, Any], System]:
    for name, value in FIRST.items():
        monkeypatch.setitem(virtual.SETTINGS, name, value)  # type: ignore[arg-type]
    operators = []

    def faults(system: System) -> None:
        operators.append(Operator(system, lambda name, value: monkeypatch.setitem(virtual.SETTINGS, name, value)))
        work(operators[0])

    _, system = history(3, faults)
    return operators[0].seen, system


def in_force(seen: dict[str, Any], name: str) -> tuple[float, int, float, str]:
    """SLO, number, watt cap and mode."""
    (objective,) = seen[f"{name} objectives"].objectives
    return objective.slo_ms, objective.number, seen[f"{name} objectives"].max_watts, ActMode(seen[name].mode).name


def test_commands_win_over_edited_settings_until_reset_and_what_differs_is_shown(monkeypatch):
    def work(operator: Operator) -> None:
        operator.looks("begun")
        operator.sets(300.0)
        operator.asks("cap", "SetObjectives", pb.SetObjectivesRequest(max_watts=5000.0))
        operator.asks("mode", "SetMode", pb.SetModeRequest(mode=int(ActMode.ADVISE)))
        operator.asks("frozen", "Freeze", pb.FreezeRequest(frozen=True))
        operator.restarts(EDITED)
        operator.looks("held")
        both = changed(codec.to_proto(Objective(FAMILY)), reset=True)
        both.reset_max_watts = True
        operator.asks("both", "SetObjectives", both)
        operator.asks("mode", "SetMode", pb.SetModeRequest(reset=True))
        operator.asks("thawed", "Freeze", pb.FreezeRequest())
        operator.looks("reset")
        operator.restarts(AGAIN)
        operator.looks("again")

    seen, system = played(monkeypatch, work)
    assert list(seen["begun"].overrides) == []
    assert in_force(seen, "held") == (300.0, 2, 5000.0, "ADVISE")
    lines = [
        f"{FAMILY}.slo.latency_ms = 300 by command, 450 in the settings",
        f"{FAMILY}.params.mine = none by command, 2 in the settings",
        "max_watts = 5000 by command, 7000 in the settings",
        "mode = advise by command, observe in the settings",
        "frozen = true by command, false in the settings",
    ]
    assert list(seen["held"].overrides) == lines
    assert [note for note in system.log if WARNING in note and str(lines) in note], "logged at the start"
    assert len([note for note in system.log if WARNING in note]) == 1
    assert in_force(seen, "reset") == (450.0, 3, 7000.0, "OBSERVE")
    assert list(seen["reset"].overrides) == []
    assert in_force(seen, "again") == (500.0, 4, 8000.0, "ACT"), "settings apply again, under a later number"


def test_what_no_command_has_changed_follows_the_settings(monkeypatch):
    def work(operator: Operator) -> None:
        operator.sets(300.0)
        operator.asks("frozen", "Freeze", pb.FreezeRequest(frozen=True))
        operator.restarts(EDITED | {"objectives": (ONE,)})
        operator.looks("held")

    seen, _ = played(monkeypatch, work)
    assert in_force(seen, "held") == (300.0, 2, 7000.0, "OBSERVE"), "neither cap nor mode was commanded"
    assert seen["held"].frozen


def test_a_reset_that_cannot_be_done_is_refused(monkeypatch):
    def work(operator: Operator) -> None:
        operator.asks("ghost", "SetObjectives", changed(codec.to_proto(Objective("ghost")), reset=True))
        operator.asks("mode", "SetMode", pb.SetModeRequest(mode=int(ActMode.ACT), reset=True))
        operator.asks("cap", "SetObjectives", pb.SetObjectivesRequest(max_watts=9.0, reset_max_watts=True))

    seen, _ = played(monkeypatch, work)
    assert all(isinstance(error, InvalidInput) for error in seen.values())
    assert "family = 'ghost': the settings have no objective of it. Remedy: use one of: digits" in str(seen["ghost"])


def test_a_stopped_family_is_out_of_service_until_it_is_started_also_after_a_restart(monkeypatch):
    def work(operator: Operator) -> None:
        objective = codec.to_proto(Objective(FAMILY, slo_ms=300.0))
        operator.asks("begun", "GetPlan", pb.GetPlanRequest())
        for _ in range(2):
            operator.asks("stopped", "StopFamily", pb.StopFamilyRequest(family=FAMILY))
        operator.does(lambda: None, 6.0)
        operator.looks("out")
        operator.asks("ghost", "StopFamily", pb.StopFamilyRequest(family="ghost"))
        operator.asks("set", "SetObjectives", changed(objective))
        operator.asks("pinned", "Rollback", pb.RollbackRequest())
        operator.restarts(FIRST)
        operator.looks("still")
        operator.does(lambda: seen.update(nodes=hosted(operator.system)))
        for _ in range(2):
            operator.asks("started", "StartFamily", pb.StartFamilyRequest(family=FAMILY))
        operator.does(lambda: None, 6.0)
        operator.looks("back")

    seen: dict[str, Any] = {}
    found, _ = played(monkeypatch, work)
    seen |= found
    assert [route.family for route in seen["begun"].plan.routes] == [FAMILY]
    assert seen["stopped"].held == ""
    line = f"{FAMILY}: out of service by command; back by trefoil family start {FAMILY}"
    for name in ("out", "still"):
        plan = seen[name].plan
        assert (list(plan.routes), [d for n in plan.nodes for d in n.devices if d.slices]) == ([], []), name
        assert list(seen[name].overrides) == [line]
        assert list(seen[f"{name} objectives"].objectives) == []
    assert seen["nodes"] == [], "its slices are freed"
    for name, words in (
        ("ghost", "family = 'ghost': no objective of this family. Remedy: use one of: digits"),
        ("set", f"family = 'digits': out of service by command. Remedy: trefoil family start {FAMILY}"),
        ("pinned", "family = 'digits': out of service by command"),
    ):
        assert words in str(seen[name]), name
    assert [route.family for route in seen["back"].plan.routes] == [FAMILY]
    assert list(seen["back"].overrides) == []
    assert in_force(seen, "back") == (400.0, 1, 0.0, "ACT")


def hosted(system: System) -> list[str]:
    """Slices that stand on any node."""
    statuses = [node.status() for node in system.nodes.values()]
    return [part.key.name for status in statuses for device in status.devices for part in device.slices]


def settings(**changes: Any) -> ControllerSettings:
    return ControllerSettings(**{**FIRST, **changes})


def test_a_disk_without_the_marks_counts_what_a_command_may_have_written(tmp_path: Path):
    disk = DiskStore(tmp_path, 10)
    accepted = starting_objectives(settings(), {}, (), virtual.CATALOG)[FAMILY]
    disk.save("objectives", [accepted])
    assert load_by_command(disk, settings()) == ByCommand()
    disk.save("control", {"mode": "ADVISE", "frozen": False, "pinned": False})
    (tmp_path / "objectives.json").write_text(json.dumps([codec.to_plain(accepted) | {"number": 2}]))
    assert load_by_command(disk, settings()) == ByCommand((FAMILY,), mode=True)
    assert load_saved_state(disk, settings(), {}).control.mode == ActMode.ADVISE


def test_a_lost_or_older_file_of_marks_takes_no_family_out_of_service(tmp_path: Path):
    disk = DiskStore(tmp_path, 10)
    own = Objective("own", slo_ms=10.0, number=1)
    stored = starting_objectives(settings(), {}, (), virtual.CATALOG) | {"own": own}
    disk.save("objectives", list(stored.values()))
    marks = load_by_command(disk, settings())
    assert marks == ByCommand(("own",))
    assert starting_objectives(settings(), stored, marks.families, virtual.CATALOG) == stored
    disk.save("by_command", ByCommand())
    assert load_by_command(disk, settings()) == ByCommand()


def test_a_mark_whose_file_was_lost_holds_nothing_against_the_settings(tmp_path: Path):
    disk = DiskStore(tmp_path, 10)
    disk.save("by_command", ByCommand((FAMILY,), mode=True, max_watts=True))
    left = load_saved_state(disk, settings(mode="observe", max_watts=70.0), {})
    assert (left.control.mode, left.max_watts, left.by_command) == (ActMode.OBSERVE, 70.0, ByCommand())


def test_objectives_of_unchanged_settings_keep_their_number(tmp_path: Path):
    accepted = starting_objectives(settings(), {}, (), virtual.CATALOG)
    assert starting_objectives(settings(), accepted, (), virtual.CATALOG) == accepted
    edited = settings(objectives=(ONE | {"slo": {"latency_ms": 500.0}},))
    assert starting_objectives(edited, accepted, (), virtual.CATALOG)[FAMILY].number == 2
    assert starting_objectives(edited, accepted, (FAMILY,), virtual.CATALOG) == accepted


def test_a_family_that_the_settings_name_no_more_goes_out_of_service_unless_a_command_set_it():
    own = Objective("own", slo_ms=10.0, number=1)
    stored = starting_objectives(settings(), {}, (), virtual.CATALOG) | {"own": own}
    assert list(starting_objectives(settings(), stored, (), virtual.CATALOG)) == [FAMILY]
    assert starting_objectives(settings(), stored, ("own",), virtual.CATALOG) == stored
    assert starting_objectives(settings(objectives=()), stored, ("own",), virtual.CATALOG) == {"own": own}


def test_a_family_that_the_settings_do_not_name_is_shown():
    stored = {"digits": Objective("digits", slo_ms=10.0)}
    assert overrides(ControllerSettings(), stored, ControlState(), 0.0) == ["digits: in force, not in the settings"]


def test_declared_settings_are_in_force_as_their_files_change_and_commands_are_refused(monkeypatch):
    def work(operator: Operator) -> None:
        operator.does(lambda: operator.edit({"objectives": ()}), 1.9)  # half written, for less than a period
        operator.does(lambda: operator.edit(EDITED), 5.0)
        operator.looks("edited")
        both = changed(codec.to_proto(Objective(FAMILY, slo_ms=300.0)))
        operator.asks("objective", "SetObjectives", both)
        operator.asks("mode", "SetMode", pb.SetModeRequest(mode=int(ActMode.ACT)))
        operator.asks("stop", "StopFamily", pb.StopFamilyRequest(family=FAMILY))
        wrong = ONE | {"slo": {"latency_ms": 0.001}, "family": "nothing"}
        operator.does(lambda: operator.edit({"objectives": (wrong,), "max_watts": 1.0}), 5.0)
        operator.looks("wrong")
        operator.does(lambda: operator.edit(AGAIN | {"policy": "base"}), 5.0)
        operator.looks("again")

    monkeypatch.setitem(virtual.SETTINGS, "declared", True)
    monkeypatch.setattr(declared, "PERIOD_S", 2.0)
    seen, system = played(monkeypatch, work)
    assert in_force(seen, "edited") == (450.0, 2, 7000.0, "OBSERVE")
    assert list(seen["edited"].overrides) == []
    assert not [note for note in system.log if "out of service" in note]
    for name, what in (("objective", "objectives"), ("mode", "mode"), ("stop", "objectives")):
        assert str(seen[name]) == (
            f"declared = '{what}': the settings declare it. Remedy: change controller.toml: it is taken within 4 s"
        )
    assert in_force(seen, "wrong") == (450.0, 2, 7000.0, "OBSERVE"), "a wrong file changes nothing"
    assert "family = 'nothing'" in " ".join(seen["wrong"].overrides)
    assert in_force(seen, "again") == (500.0, 3, 8000.0, "ACT")
    assert list(seen["again"].overrides) == ["policy (in controller.toml): changed. Remedy: restart the controller"]


def test_what_a_file_declares_is_in_force_all_or_none(monkeypatch):
    stated = codec.to_proto(ObjectiveSettings.model_validate(ONE | {"slo": {"latency_ms": 450.0}}).stated())
    acme = codec.to_proto(Budget("acme", grams_per_day=5.0, time_zone="UTC"))
    mars = codec.to_proto(Budget("mars", grams_per_day=5.0, time_zone="Mars/Olympus"))

    def declare(**values: Any) -> pb.ApplyRequest:
        wanted = {"objectives": [stated], "budgets": [acme], "max_watts": 7000.0, "mode": "ACT_MODE_OBSERVE"}
        return pb.ApplyRequest(**{**wanted, **values})

    def work(operator: Operator) -> None:
        ghost = codec.to_proto(Objective("ghost", slo_ms=1.0))
        operator.asks("would", "Apply", declare(dry_run=True))
        operator.asks("ghost", "Apply", declare(objectives=[stated, ghost]))
        operator.asks("twice", "Apply", declare(objectives=[stated, stated]))
        operator.asks("cap", "Apply", declare(max_watts=-1.0))
        operator.asks("zone", "Apply", declare(budgets=[acme, mars]))
        operator.asks("budget twice", "Apply", declare(budgets=[acme, acme]))
        operator.asks("all", "Apply", declare(objectives=[], prune=True))
        operator.looks("before")
        operator.asks("does", "Apply", declare())
        operator.asks("does nothing", "Apply", declare())
        operator.asks("budgets", "GetBudgets", pb.GetBudgetsRequest())
        operator.asks("cleared", "Apply", declare(budgets=[], prune=True, dry_run=True))
        operator.looks("after")
        operator.asks("stopped", "StopFamily", pb.StopFamilyRequest(family=FAMILY))
        operator.asks("serves", "Apply", declare(mode="ACT_MODE_ACT"))
        operator.restarts(FIRST)
        operator.looks("restarted")

    seen, _ = played(monkeypatch, work)
    changes = [
        (f"{FAMILY}.slo.latency_ms", "400", "450"), ("max_watts", "none", "7000"), ("mode", "act", "observe"),
        ("budget of acme", "none", "5 g a day"),
    ]  # fmt: skip
    for name in ("would", "does"):
        assert [(one.field, one.now, one.wanted) for one in seen[name].changes] == changes
    assert "objectives[1] (ghost): family = 'ghost': no such family" in str(seen["ghost"])
    assert f"objectives[1] ({FAMILY}): family = '{FAMILY}': given twice" in str(seen["twice"])
    assert "max_watts = -1.0: must be watts" in str(seen["cap"])
    assert "budgets[1]: time_zone = 'Mars/Olympus'" in str(seen["zone"])
    assert "budgets[1]: tenant = 'acme': given twice" in str(seen["budget twice"])
    assert [one.budget.tenant for one in seen["budgets"].budgets] == ["acme"]
    cleared = [("budget of acme", "5 g a day", "none")]
    assert [(one.field, one.now, one.wanted) for one in seen["cleared"].changes] == cleared
    assert "prune = True: it would stop every family" in str(seen["all"])
    assert in_force(seen, "before") == (400.0, 1, 0.0, "ACT"), "a wrong file, and a dry run, change nothing"
    assert in_force(seen, "after") == (450.0, 2, 7000.0, "OBSERVE")
    assert list(seen["does nothing"].changes) == []
    back = [(FAMILY, "out of service", "in service"), ("mode", "observe", "act")]
    assert [(one.field, one.now, one.wanted) for one in seen["serves"].changes] == back
    assert in_force(seen, "restarted") == (450.0, 2, 7000.0, "ACT"), "as by commands"


def test_a_command_that_lands_while_another_waits_for_its_turn_is_not_lost(monkeypatch):
    acme, beta = (codec.to_proto(Budget(name, grams_per_day=5.0, time_zone="UTC")) for name in ("acme", "beta"))
    stated = ObjectiveSettings.model_validate(ONE | {"slo": {"latency_ms": 450.0}}).stated()
    applied = pb.ApplyRequest(objectives=[codec.to_proto(stated)], budgets=[beta])

    def work(operator: Operator) -> None:
        def hold() -> None:
            loop = operator.system.controller.service._loop

            async def turn() -> None:
                async with loop._turn():
                    await loop.clock.sleep(5.0)

            operator.system.controller.process.start(operator.system.loop, turn())

        operator.does(hold)
        operator.asks("budget", "SetBudget", pb.SetBudgetRequest(budget=acme))
        operator.asks("applied", "Apply", applied)
        first = changed(codec.to_proto(replace(stated, slo_ms=470.0)), expected_number=2)
        operator.asks("objective", "SetObjectives", first)
        operator.asks("overtaken", "SetObjectives", first)
        operator.does(lambda: None, 3.0)
        operator.asks("budgets", "GetBudgets", pb.GetBudgetsRequest())
        operator.looks("after")

    seen, _ = played(monkeypatch, work)
    assert [one.budget.tenant for one in seen["budgets"].budgets] == ["acme", "beta"]
    assert [one.field for one in seen["applied"].changes] == [f"{FAMILY}.slo.latency_ms", "budget of beta"]
    assert in_force(seen, "after")[:2] == (470.0, 3)
    assert isinstance(seen["overtaken"], StaleRevision), seen["overtaken"]


def test_the_declared_families_alone_serve_with_prune(monkeypatch):
    kept = codec.to_proto(ObjectiveSettings.model_validate(ONE).stated())

    def work(operator: Operator) -> None:
        def add() -> None:  # another family, as if it had been set
            core = operator.system.controller.service._loop.core
            core.objectives["own"] = Objective("own", slo_ms=10.0, number=1)

        operator.does(add)
        operator.asks("kept", "Apply", pb.ApplyRequest(objectives=[kept], dry_run=True))
        operator.asks("pruned", "Apply", pb.ApplyRequest(objectives=[kept], prune=True, dry_run=True))

    seen, _ = played(monkeypatch, work)
    assert list(seen["kept"].changes) == []
    assert [(one.field, one.wanted) for one in seen["pruned"].changes] == [("own", "out of service")]


@pytest.mark.parametrize("mode", [each for each in ObjectiveMode if each])
@pytest.mark.parametrize("tokens", [{}, {"ttft_ms": 120.0, "ttft_quantile": 0.9}])
def test_an_exported_objective_is_read_back_as_it_was(mode, tokens):
    one = Objective(
        FAMILY, mode, 75.3, 99.9 / 100, 0.97, hard_min_accuracy=0.9, window_s=60.0, replicas_min=1, spread_min=3,
        params={"credits": 3.0, "a name": 0.1}, number=1, lambda_weight=0.25, base_j_per_request=0.1, **tokens,
    )  # fmt: skip
    text = to_toml({"objectives": [ObjectiveSettings.of(one).model_dump(exclude_none=True)]})
    assert ControllerSettings.model_validate(tomllib.loads(text)).objectives[0].stated() == one


def test_a_percentile_is_no_difference_by_the_error_of_its_division():
    quantiles = [percentile / 100 for percentile in (99.9, 99.99, 57.0, 10.01)]
    assert [q for q in quantiles if _percentile(q) / 100 != q] == []
    one = Objective(FAMILY, slo_quantile=0.999)
    assert differences({FAMILY: one}, {FAMILY: replace(one, slo_quantile=99.9 / 100)}) == []
