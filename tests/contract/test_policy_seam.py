"""Your own policy, five files and a row, runs simulated without a line of a shell; every column of it is read."""

from collections.abc import Mapping

import pytest

from controller.settings import ControllerSettings
from power_agent.settings import PowerAgentSettings
from tests.support.seam import ROW
from tests.support.seam.router import HOLD_S, Holding
from trefoil.cli.run.scenario import System
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.parts import Kind, Traits
from trefoil.core.plan import Plan
from trefoil.core.policies import chosen
from trefoil.runtime import codec
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.policy_check import check_policy
from trefoil.simulator.scenario.schema import Scenario
from trefoil.simulator.simulation import Simulation

NAME = "tests.support.seam:ROW"
SHIPPED = {"planner": "base", "forecaster": "last_max", "router": "least_loaded", "queue": "fifo", "governor": "fixed"}


def scenario(**choice: object) -> Scenario:
    return Scenario(
        seed=3,
        duration_s=20.0,
        warmup_s=5.0,
        nodes=({"devices": ["A100-SXM4-40GB"]},),
        families=(
            {
                "name": "digits",
                "arrivals": {"rate_per_s": 20.0},
                "objective": {"slo": {"latency_ms": 200.0}},
            },
        ),
        carbon={"zones": {"demo": {"constant_g_per_kwh": 200.0}}},
        **{"policy": NAME, **choice},
    )


class Grouped(Holding):
    """A router that wants to be the only one."""

    traits = Traits(group=True)


class Run:
    """What of a run can be seen: clocks by the second, the plan, its decisions, latencies."""

    def __init__(self, **choice: object) -> None:
        shell = Simulation(prepare(scenario(**choice)), keep_records=True)
        self.clocks_mhz = []
        for second in range(-4, 21):
            shell.run(float(second))
            self.clocks_mhz.append(max(m.clock_mhz for m in shell.hardware.devices.values()))
        shell.run(shell.end_s)
        self.plan: Plan = shell.core.plans[-1]
        self.found = result(shell)
        self.view_json = shell.records[0].view_json
        self.text = self.found.to_json()

    def seen(self, kind: Kind) -> object:
        """What a column decides."""
        summary = self.found.summary
        by_kind: Mapping[Kind, object] = {
            Kind.PLANNER: self.plan.planner,
            Kind.FORECASTER: "promised" in self.view_json,
            Kind.ROUTER: summary.p50_ms,
            Kind.QUEUE: summary.p99_ms,
            Kind.GOVERNOR: len(set(self.clocks_mhz)) > 2,
        }
        return by_kind[kind]


@pytest.fixture(scope="module")
def own() -> Run:
    return Run()


def test_every_own_part_does_its_work_in_the_simulator(own: Run) -> None:
    assert own.plan.planner == "ceiling"
    assert own.plan.policy == NAME
    assert "promised" in own.view_json
    assert own.found.summary.p50_ms > 1e3 * HOLD_S
    assert {900, 1200} <= set(own.clocks_mhz) <= {0, 210, 300, 600, 900, 1200}
    (route,) = own.plan.routes
    assert (route.router, route.queue) == (ROW.router, ROW.queue)
    assert {d.governor for n in own.plan.nodes for d in n.devices} == {ROW.governor}
    assert Run().text == own.text


@pytest.mark.parametrize("kind", Kind)
def test_every_column_is_read(own: Run, kind: Kind) -> None:
    other = Run(**{kind.value: SHIPPED[kind]})
    assert other.seen(kind) != own.seen(kind)
    assert other.text != own.text


def test_a_plan_bears_the_row_and_a_part_put_in_its_place_stays_a_matter_of_who_runs_it(own: Run) -> None:
    """As live: `--router` of a dispatcher changes no plan, so that a decision replays without knowing of it."""
    other = Run(router="fifo", governor="fixed")
    assert {r.router for r in other.plan.routes} == {ROW.router}
    assert {d.governor for n in other.plan.nodes for d in n.devices} == {ROW.governor}
    assert codec.to_plain(other.plan.nodes[0].devices[0]) == codec.to_plain(own.plan.nodes[0].devices[0])


def test_settings_of_parts_are_typed_by_the_part_and_go_over_the_rows() -> None:
    slower = Run(parts={"planner": {"variant": "digits-l"}, "governor": {"step_mhz": "600"}})
    assert {h.variant for n in slower.plan.nodes for d in n.devices for s in d.slices for h in s.hosted} == {"digits-l"}
    assert {600, 1200} <= set(slower.clocks_mhz) <= {0, 210, 600, 1200}


BAD = {
    "policy": ({"policy": "tests.support.seam:NONE"}, r"policy = 'tests.support.seam:NONE'.*Remedy"),
    "no row": ({"policy": "tests.support.seam:Policy"}, r"is not a row of a policy.*Remedy"),
    "planner": ({"planner": "best"}, r"planner = 'best': no such planner. Remedy: .*one of: alpaserve, .*module:Class"),
    "forecaster": ({"forecaster": "prophet"}, r"forecaster = 'prophet': no such.*last_max"),
    "router": (
        {"router": "fastest"},
        r"router = 'fastest': no such router. Remedy: .*one of: carbondis, dybatch, fifo",
    ),
    "queue": ({"queue": "sjf"}, r"queue = 'sjf': no such queue. Remedy: .*one of: fifo"),
    "governor": ({"governor": "turbo"}, r"governor = 'turbo': no such governor. Remedy: .*one of: fixed"),
    "module": ({"governor": "nowhere.at_all:X"}, r"governor = 'nowhere.at_all:X': cannot be imported.*PYTHONPATH"),
    "methods": ({"queue": "tests.support.seam.governor:Stairs"}, r"queue = .*has no method limit, check.*Remedy"),
    "setting": ({"parts": {"governor": {"steps": 3}}}, r"governor setting steps = 3: .*one of: step_mhz"),
    "value": ({"parts": {"governor": {"step_mhz": "low"}}}, r"governor setting step_mhz = 'low'.*Remedy"),
    "kind": ({"parts": {"cooler": {"x": 1}}}, r"parts = 'cooler': .*planner, forecaster, router, queue, governor"),
    "missing": ({"parts": {"planner": {"variant": 3.5}}}, r"planner setting variant = 3.5"),
}


@pytest.mark.parametrize("choice", BAD, ids=str)
def test_what_cannot_be_is_refused_before_anything_runs(choice: str) -> None:
    given, says = BAD[choice]
    with pytest.raises((SettingError, NotFound), match=says):
        scenario(**given)


def test_traits_that_do_not_fit_are_refused_by_field_value_and_remedy() -> None:
    with pytest.raises(SettingError, match=r"router = '.*Holding': a flow has no requests.*set fidelity to request"):
        check_policy(ROW, fluid=True)


@pytest.mark.parametrize("kind", Kind)
def test_what_starts_a_system_refuses_the_same_and_names_the_column(kind: Kind) -> None:
    with pytest.raises(SettingError, match=rf"{kind} = 'none': no such {kind}. Remedy: .*one of: .*, or module:Class"):
        System(**{kind.value: "none"})
    with pytest.raises(SettingError, match=rf"{kind} setting hidden = 3.*"):
        System(parts={kind.value: {"hidden": 3}})


def test_each_service_takes_settings_of_its_own_parts_only() -> None:
    with pytest.raises(SettingError, match="the controller has no part 'governor'; use planner or forecaster"):
        ControllerSettings(parts={"governor": {"step_mhz": 1}})
    with pytest.raises(SettingError, match="the power agent has no part 'planner'; use governor"):
        PowerAgentSettings(parts={"planner": {"variant": "s"}})


def test_a_part_that_is_replaced_takes_the_rows_settings_of_it_along() -> None:
    assert chosen(ROW, {Kind.FORECASTER: "last_max"}, {}).settings.get("forecaster") is None
    kept = chosen(ROW, {Kind.FORECASTER: ROW.forecaster}, {"forecaster": {"rate_per_s": 3.0}})
    assert kept.settings["forecaster"] == {"rate_per_s": 3.0}
