"""A name from outside (a plan, a message, Redis, a file of state) never chooses what a service imports."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from controller.loop.control_loop import load_saved_state
from controller.planners.policy_parts import PolicyLivePlanner, PolicyPlanner, forecaster_of, planner_of, row_of
from controller.role.disk_store import DiskStore
from controller.settings import ControllerSettings
from dispatcher.routing.core.routing_table import check_plan
from dispatcher.settings import DispatcherSettings
from power_agent.governors import governor_of
from power_agent.settings import PowerAgentSettings
from tests.support.seam import ROW
from trefoil.cli.operate.decisions import _planner_of, replay_decisions
from trefoil.cli.run.scenario import System
from trefoil.cli.run.services import _own_parts
from trefoil.core import parts
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import SliceKey
from trefoil.core.parts import Kind, find
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, PlannedDevice, Route, RouteTarget
from trefoil.core.plan_check import check_parts
from trefoil.core.policies import SHIPPED, Policy
from trefoil.runtime import codec
from trefoil.simulator.scenario.policy_check import TABLES

BODIES = {
    "exits": "raise SystemExit(7)",
    "raises": "raise RuntimeError('no')",
    "raises what is not an Exception": "class Odd(BaseException):\n    pass\nraise Odd('no')",
    "refuses its names": "def __getattr__(name):\n    raise RuntimeError(name)",
    "lacks a module": "import nowhere_at_all",
    "is not a Python": "def",
    "waits forever": "import threading\nthreading.Event().wait()",
    "computes forever": "while True:\n    pass",
}
TARGET = RouteTarget(SliceKey("node0/gpu0", "1g.5gb", 0, 1), "digits-l", 0, 1.0, 2)
PLAN = Plan(
    Revision(1, 1, 0),
    nodes=(NodePlan(node="node0", devices=(PlannedDevice("node0/gpu0", governor="fixed"),)),),
    routes=(Route("digits", "weighted", "fifo", (TARGET,)),),
)
START: Mapping[Kind, Callable[[str], object]] = {
    Kind.PLANNER: lambda name: planner_of("", row_of(ControllerSettings(planner=name))),
    Kind.FORECASTER: lambda name: forecaster_of(row_of(ControllerSettings(forecaster=name))),
    Kind.ROUTER: lambda name: DispatcherSettings(own_parts={"router": [name]}),
    Kind.QUEUE: lambda name: DispatcherSettings(own_parts={"queue": [name]}),
    Kind.GOVERNOR: lambda name: PowerAgentSettings(own_parts={"governor": [name]}),
}
"""What a service does at its start with a name in its own settings."""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A module:Class that writes a file when it is imported, and then does its worst."""
    mark, name = tmp_path / "imported", f"evil_{abs(hash(request.node.name))}"
    body = BODIES.get(getattr(request, "param", "exits"), "")
    (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"{name}:Class", mark
    sys.modules.pop(name, None)


def naming(name: str, kind: Kind) -> Plan:
    """The plan, with that part in place of a shipped one."""
    if kind == Kind.GOVERNOR:
        node = PLAN.nodes[0]
        return replace(PLAN, nodes=(replace(node, devices=(replace(node.devices[0], governor=name),)),))
    return replace(PLAN, routes=(replace(PLAN.routes[0], **{kind.value: name}),))


def test_the_names_that_ship_are_those_of_the_tables() -> None:
    for kind, names in SHIPPED.items():
        assert names - {""} == TABLES[kind].keys()


@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.parametrize("name", [None, "nonsense", "os:system", ":", "a:b:c", "sys:exit"])
def test_a_plan_that_names_what_is_not_there_is_refused_and_imports_nothing(
    evil: tuple[str, Path], kind: Kind, name: str | None
) -> None:
    given, mark = name if name is not None else evil[0], evil[1]
    plan = naming(given, kind)
    with pytest.raises(
        PlanError, match=rf"{kind} = '{given}': no such {kind}\. Remedy: .*one of: .*own_parts\.{kind} of"
    ):
        check_parts(plan)
    if kind == Kind.GOVERNOR:
        with pytest.raises(SettingError, match="no such governor"):
            governor_of(given, {})
    else:
        with pytest.raises(PlanError, match=rf"no such {kind}"):
            check_plan(plan, Revision())
    assert not mark.exists()


@pytest.mark.parametrize("kind", Kind)
def test_no_look_up_imports(evil: tuple[str, Path], kind: Kind) -> None:
    with pytest.raises(SettingError, match=f"no such {kind}"):
        find(kind, evil[0], TABLES[kind])
    assert not evil[1].exists()


@pytest.mark.parametrize("evil", BODIES, indirect=True)
@pytest.mark.parametrize("kind", Kind)
def test_own_settings_load_a_part_once_and_say_what_is_wrong_with_it(
    evil: tuple[str, Path], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "IMPORT_MAX_S", 1.0)
    with pytest.raises(SettingError, match=rf"{kind} = '{evil[0]}': cannot be imported.*Remedy: install or fix it"):
        START[kind](evil[0])


def test_the_controller_allows_names_that_others_load_and_imports_none(evil: tuple[str, Path]) -> None:
    ControllerSettings(own_parts={"router": [evil[0]]})
    check_parts(naming(evil[0], Kind.ROUTER))
    with pytest.raises(PlanError, match="no such queue"):
        check_parts(naming(evil[0], Kind.QUEUE))
    assert not evil[1].exists()


@pytest.mark.parametrize(
    ("settings", "own", "says"),
    [
        (DispatcherSettings, {"planner": ["a:B"]}, r"own_parts = 'planner': no such kind.*router, queue"),
        (DispatcherSettings, {"router": ["weighted"]}, r"own_parts.router = 'weighted': not module:Class.*Remedy"),
        (PowerAgentSettings, {"router": ["a:B"]}, r"own_parts = 'router': no such kind.*governor"),
        (ControllerSettings, {"cooler": ["a:B"]}, r"own_parts = 'cooler': no such kind"),
    ],
)
def test_own_parts_of_another_kind_or_form_are_refused(settings: type, own: dict[str, list[str]], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        settings(own_parts=own)


def test_up_writes_the_parts_of_its_policy_into_the_services_settings() -> None:
    system = System(policy="tests.support.seam:ROW", router="tests.support.own_router:LongestIdle")
    assert _own_parts(system, Kind.ROUTER, Kind.QUEUE) == {
        "router": sorted([ROW.router, "tests.support.own_router:LongestIdle"]),
        "queue": [ROW.queue],
    }
    assert _own_parts(system, Kind.GOVERNOR) == {"governor": [ROW.governor]}
    assert _own_parts(System(), *Kind) == {}


def test_a_policys_own_row_allows_its_parts_in_stored_plans_and_no_others(
    evil: tuple[str, Path], tmp_path: Path
) -> None:
    settings = ControllerSettings(policy="tests.support.seam:ROW", state_dir=tmp_path)
    assert isinstance(row_of(settings), Policy)
    disk = DiskStore(tmp_path, 10)
    old = replace(naming(ROW.router, Kind.ROUTER), revision=Revision(1, 1, 0))
    bad = replace(naming(evil[0], Kind.ROUTER), revision=Revision(1, 2, 0))
    disk.save_all("plans", [old, bad])
    disk.save("control", {"mode": "ACT", "frozen": False, "pinned": True})
    left = load_saved_state(disk, settings, {})
    assert left.plans == [old]
    assert not left.control.pinned
    assert not evil[1].exists()


@pytest.mark.parametrize("column", ["policy", "planner"])
def test_a_decision_record_imports_nothing_unless_the_command_names_it(
    evil: tuple[str, Path], tmp_path: Path, column: str
) -> None:
    record = DecisionRecord(id="1.1", policy=evil[0] if column == "policy" else "exact", view_json="{}")
    record = replace(record, versions={"planner": evil[0]} if column == "planner" else {})
    file = tmp_path / "one.json"
    file.write_text(codec.to_json(record))
    with pytest.raises(SettingError, match=rf"{column} = '{evil[0]}': is not imported.*Remedy: give --own {evil[0]}"):
        replay_decisions(str(file), tmp_path)
    assert not evil[1].exists()
    with pytest.raises(SettingError, match="cannot be imported"):
        replay_decisions(str(file), tmp_path, [evil[0]])


def test_a_preset_is_of_the_planner_that_runs_and_the_settings_of_its_part_go_over_it() -> None:
    chosen = {"policy": "exact", "planner": "clover", "preset": "guided", "parts": {"planner": {"warm": False}}}
    assert row_of(ControllerSettings(**chosen)).settings == {Kind.PLANNER: {"neighbours": "guided", "warm": False}}


@pytest.mark.parametrize(("planner", "preset", "literal"), [("clover", "literal", True), ("exact", "literal", None)])
def test_a_replay_takes_the_preset_of_the_planner_that_decided(planner: str, preset: str, literal: bool | None) -> None:
    record = DecisionRecord(id="1.1", policy="base", versions={"planner": planner, "preset": preset})
    found = _planner_of(record, ())
    assert isinstance(found, PolicyPlanner | PolicyLivePlanner)
    assert found.row.planner == planner
    assert found.row.settings.get(Kind.PLANNER, {}).get("literal") == literal


class Fields:
    """An own planner as it was before planners had settings."""

    def __init__(self, constants: Mapping[str, float] | None = None) -> None:
        self.given = constants

    def plan(self, _view: object, _rng: object) -> None:
        """Plan nothing."""


class Stated(Fields):
    constants: Mapping[str, float] = {"pace": 1.0}


@pytest.mark.parametrize("name", ["Fields", "Stated"])
def test_an_own_planner_with_constants_is_refused_with_the_name_of_its_settings(name: str) -> None:
    with pytest.raises(
        SettingError, match=r"has constants, which are settings now.*Remedy: make `settings` a subclass"
    ):
        parts.load_own_part(Kind.PLANNER, f"{__name__}:{name}")
