"""CPU slices in simulations: n requests at once, core seconds, no joules where nothing measures any."""

import json
import math

import numpy as np
import pytest

from tests.support.engines import request_engine
from trefoil.core.cpus.use import CpuUse
from trefoil.core.errors import ProfileMissing, SettingError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import ServiceTime, pool_rate_max
from trefoil.reproduce.infadapter.published import CORES, catalog
from trefoil.simulator.engines.engine import SliceService
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import Arrivals, FamilyObjective, Node, Scenario, Served
from trefoil.simulator.simulation import Simulation

KNOWN = Provided(catalog=catalog(), truth=catalog(CORES))


def scenario(policy="infadapter", fidelity="request", rate=75.0, seconds=240.0, device="cpu:48", **settings):
    return Scenario(
        duration_s=seconds,
        fidelity=fidelity,
        step_s=5.0,
        nodes=(Node(devices=(device,)),),
        families=(
            Served(
                name="resnets",
                arrivals=Arrivals(rate_per_s=rate),
                objective=FamilyObjective(type="instant", slo={"percentile": 99.0, "latency_ms": 750.0}),
            ),
        ),
        policy=policy,
        parts={"planner": {"budget_cores": 20.0, **settings}},
    )


def played(*args, **kwargs):
    simulation = Simulation(prepare(scenario(*args, **kwargs), KNOWN))
    simulation.run(math.inf)
    return simulation, result(simulation)


@pytest.mark.parametrize("servers", [2, 8])
def test_a_slice_of_n_cores_serves_n_at_once_as_the_queueing_law_has_it(servers):
    service, slo_ms = ServiceTime(100.0, 0.1), 250.0
    rate = pool_rate_max(service, slo_ms, 0.95, 1.0, servers)
    key = SliceKey("n/cpu", f"cpu:{servers}", 0, servers)
    route = Route("f", "weighted", "fifo", (RouteTarget(key, "v", 0, 1.0, servers + 1),), 10_000, 1 << 30)
    one = SliceService(service, 1.0, 0.0, "v", "f", 0.0, instances=servers)
    level = request_engine({"f": route}, {"f": {key: one}}, np.random.default_rng(3))
    at_s = np.cumsum(np.random.default_rng(4).exponential(1 / rate, 20_000))
    window = level.windows({"f": at_s}, float(at_s[-1]) + 1.0)["f"]
    assert np.mean(window.latency_ms <= slo_ms) == pytest.approx(0.95, abs=0.02)
    assert window.busy_s[key] / (at_s[-1] * servers) == pytest.approx(rate * 0.1 / servers, rel=0.03)


def test_request_and_fluid_agree_on_a_slice_of_many_cores():
    found = {f: played("fixed_size", f, version=3.0, initial_cores=10.0)[1] for f in ("request", "fluid")}
    (one, other) = (r.summary.families["resnets"] for r in found.values())
    assert one.slo_attainment == pytest.approx(other.slo_attainment, abs=0.01)
    assert one.p95_ms == pytest.approx(other.p95_ms, rel=0.1)
    assert one.accuracy == pytest.approx(other.accuracy) == 0.7613


def test_core_seconds_are_counted_and_joules_are_null_where_nothing_measures_them():
    simulation, found = played(beta=0.0125)
    assert list(simulation.hardware.devices) == ["node/cpu"]
    assert found.summary.core_s == pytest.approx(
        float(np.sum(found.series["cores"])) * simulation.scenario.bin_s, rel=0.05
    )
    assert 14 * 240 < found.summary.core_s < 30 * 240, "the old size stands beside the new one meanwhile"
    told = json.loads(found.to_json())["summary"]
    assert told["joules"] is told["grams"] is told["families"]["resnets"]["grams_per_request"] is None
    assert told["core_s"] == pytest.approx(found.summary.core_s)
    assert "energy is not metered" in str(found.table().caption)
    again = played(beta=0.0125)[1]
    assert again.to_json() == found.to_json()


def test_planners_see_what_slices_use_and_vpa_follows_it():
    simulation, found = played("vpa_plus", rate=40.0, seconds=420.0, version=3.0)
    (use,) = simulation.view().cpu_uses
    cores = int(use.slice.slice_type.removeprefix("cpu:"))
    assert isinstance(use, CpuUse)
    assert 2.0 < use.cores < cores
    (history,) = simulation.view().cpu_histories
    assert cores == math.ceil(1.15 * history.percentile(0.9))
    assert found.summary.core_s < 420.0 * 20
    assert found.summary.families["resnets"].rejected == 0, "the new size serves before the old one goes"


def test_a_family_without_a_profile_on_cpus_is_refused_where_there_is_nothing_else():
    bare = Provided(catalog=catalog(cores=()))
    with pytest.raises(ProfileMissing, match=r"cpu:48.*profile the family on a device type of the fleet"):
        prepare(scenario(), bare)


def test_a_node_has_one_device_of_cpus():
    with pytest.raises(SettingError, match="the CPUs of a node are one device"):
        Node(devices=("cpu:4", "cpu:8"))
