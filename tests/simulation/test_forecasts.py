"""ForecastFeed in simulated time: what they may know, and what they buy beside none and a perfect one."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from carbon_feed.core.trace_playback import Playback
from controller.settings import RelativeAccuracy
from tests.simulation.test_shell import A100, REPOSITORY
from trefoil.comparison.report import comparison_tables
from trefoil.comparison.runs import FORECASTS, compare_forecasts
from trefoil.core.carbon import Series
from trefoil.core.objective import FLOOR_TOLERANCE
from trefoil.core.units import HOUR_S
from trefoil.simulator import Provided, Scenario, simulate
from trefoil.simulator.scenario.carbon import ForecastFeed
from trefoil.simulator.scenario.inputs import Intensity, prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Served, Zone
from trefoil.simulator.simulation import Simulation

OWN = ("persistence", "climatology", "blend")
SERIES = Series("grid")


def scenario(hours: float = 48.0, forecast: str = "none", **carbon: object) -> Scenario:
    """Two GPUs as a flow; the budget's window is the run."""
    wanted = FamilyObjective(accuracy={"below_best_pct": 2.0, "hard_below_best_pct": 10.0}, window_s=hours * HOUR_S)
    served = Served(name="digits", repository=REPOSITORY, arrivals=Arrivals(rate_per_s=40.0), objective=wanted)
    return Scenario(
        hours=hours,
        fidelity="fluid",
        step_s=900.0,
        nodes=(Node(zone="grid", devices=(A100, A100)),),
        families=(served,),
        carbon=Carbon(zones={"grid": Zone()}, forecast=forecast, **carbon),
    )


def duck(days: int, seed: int = 5) -> np.ndarray:
    """A solar grid with weather, hour by hour."""
    rng, hours = np.random.default_rng(seed), np.arange(24 * days)
    sun = np.clip(np.sin((hours % 24 - 6) / 12 * np.pi), 0.0, None)
    weather = 1 + 0.2 * np.repeat(rng.standard_normal(days), 24)
    return 320.0 - 180.0 * sun * np.clip(weather, 0.2, 1.6) + 6.0 * rng.standard_normal(24 * days)


def intensity(values: np.ndarray, lead: int, **changes: float) -> Intensity:
    played = Playback(tuple(values[:lead]), tuple(values[lead:]), HOUR_S, 0.0, 0.0)
    return Intensity(SERIES, replace(played, **changes), "made up")


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("speedup", [1.0, 360.0])
def test_a_model_knows_nothing_after_its_origin(name, speedup):
    values, lead = duck(12), 7 * 24
    for hour in (0.0, 0.5, 13.0, 60.25):
        now_s = hour * HOUR_S / speedup
        blind = values.copy()
        blind[lead + math.floor(hour) + 1 :] = math.nan
        seen = ForecastFeed(name, intensity(values, lead, speedup=speedup)).at(now_s)
        again = ForecastFeed(name, intensity(blind, lead, speedup=speedup)).at(now_s)
        assert seen == again
        assert seen is not None
        assert seen.model == name
        assert len(seen.bands) >= 95
        assert all(math.isfinite(b.p10_g_per_kwh + b.p50_g_per_kwh + b.p90_g_per_kwh) for b in seen.bands)


def test_a_run_that_ends_below_its_floor_is_marked_and_saves_nothing():
    reachable = scenario(0.5)
    wanted = reachable.families[0].objective.model_copy(update={"accuracy": RelativeAccuracy(below_best_pct=0.1)})
    served = reachable.families[0].model_copy(update={"objective": wanted, "arrivals": Arrivals(rate_per_s=90.0)})
    held, missed = simulate(reachable), simulate(reachable.model_copy(update={"families": (served,)}))
    assert (held.summary.floor_missed, missed.summary.floor_missed) == (False, True)
    assert missed.summary.accuracy < missed.summary.families["digits"].floor - FLOOR_TOLERANCE
    for one, word in ((held, False), (missed, True)):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(one.table())
        assert ("MISSED" in console.export_text()) is word


def test_a_past_that_is_given_is_history_and_makes_a_forecast_from_the_start():
    values = duck(9)
    given = Provided(carbon={"grid": (HOUR_S, values[168:])}, carbon_before={"grid": values[:168]})
    for provided, bands in ((given, True), (replace(given, carbon_before={}), False)):
        view = Simulation(prepare(scenario(forecast="blend"), provided)).view()
        assert bool(view.carbon_forecast.bands) is bands
        assert len(view.carbon_history) == (96 if bands else 0)


def test_a_budget_holds_what_is_counted_and_nothing_of_the_warm_up():
    simulation = Simulation(prepare(scenario().model_copy(update={"warmup_s": 1800.0})))
    simulation.run(4 * 900.0)
    (budget,) = simulation.view().budgets
    assert budget.elapsed_s == pytest.approx(4 * 900.0, abs=900.0)
    assert budget.requests == pytest.approx(4 * 900.0 * 40.0, rel=1e-3)


def test_asked_hour_by_hour_it_says_nearly_what_it_says_when_asked_once():
    """Nearly: the errors that it corrects by are looked at once a day, at another hour."""
    values = duck(12)
    going = ForecastFeed("blend", intensity(values, 120))
    for hour in range(40):
        found = going.at(hour * HOUR_S)
    once = ForecastFeed("blend", intensity(values, 120)).at(39 * HOUR_S)
    assert found is not None
    assert once is not None
    assert [b.starts_at_s for b in found.bands] == [b.starts_at_s for b in once.bands]
    assert [b.p50_g_per_kwh for b in found.bands] == pytest.approx([b.p50_g_per_kwh for b in once.bands], rel=0.1)


def test_without_a_past_there_is_none_and_it_says_why():
    found = ForecastFeed("blend", intensity(duck(3), 0)).at(5 * HOUR_S)
    assert found is not None
    assert found.bands == ()
    assert found.fallback_reason == "6 h of the last 7 days are known, a forecast needs 24 h"


def test_a_perfect_forecast_is_the_trace():
    values = duck(6)
    found = ForecastFeed("perfect", intensity(values, 24)).at(2.5 * HOUR_S)
    assert found is not None
    assert [b.p50_g_per_kwh for b in found.bands[:50]] == values[26:76].tolist()
    assert all(b.p10_g_per_kwh == b.p50_g_per_kwh == b.p90_g_per_kwh for b in found.bands)
    assert len(found.bands) == 96


def test_a_run_until_an_hour_knows_nothing_of_what_comes_after_it():
    values, lead, until = duck(9), 5 * 24, 12
    blind = values.copy()
    blind[lead + until :] = math.nan

    def decided(found: np.ndarray) -> list[object]:
        inputs = prepare(scenario(24.0, "blend"))
        inputs.carbon[inputs.zone].played = Playback(tuple(found[:lead]), tuple(found[lead:]), HOUR_S, 0.0, 0.0)
        shell = Simulation(inputs)
        shell.run(until * HOUR_S - 901.0)
        return [*shell.ledger.decisions, shell.ledger.cost]

    seen = decided(values)
    assert seen == decided(blind)
    assert any("forecast blend" in str(one) for one in seen)


# --- what they buy ----------------------------------------------------------------------------------------------------


def cleaner_later(forecast: str) -> tuple[float, float]:
    """Grams and accuracy of a day whose second half is a quarter as dirty: accuracy is for then."""
    given = Provided(carbon={"grid": (HOUR_S, [400.0] * 12 + [100.0] * 12)})
    found = simulate(scenario(24.0, forecast), given).summary
    return found.grams_per_request, found.accuracy


def test_who_knows_that_it_will_be_clean_buys_accuracy_then():
    floor = prepare(scenario(24.0)).objectives["digits"].min_accuracy
    none, perfect = cleaner_later("none"), cleaner_later("perfect")
    assert min(none[1], perfect[1]) >= floor - 5e-4
    assert perfect[0] < 0.97 * none[0]


def test_a_model_that_cannot_know_buys_nothing():
    assert cleaner_later("blend")[0] == pytest.approx(cleaner_later("none")[0], rel=0.02)


def test_the_comparison_is_of_equals_and_one_document(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"2022-01-01T{hour:02}:00:00Z,{400 if hour < 3 else 100}" for hour in range(6)]
    trace.write_text("\n".join(["timestamp,g_per_kwh", *rows]) + "\n")
    wanted = scenario(6.0)
    wanted = wanted.model_copy(update={"carbon": Carbon(zones={"grid": Zone(trace=trace)})})
    found, notes = compare_forecasts(wanted, lambda _text: None)
    (case,) = found.cases
    assert found.names == tuple(row.name for row in case.rows) == FORECASTS
    assert len({run.summary["answered"] for row in case.rows for run in row.runs}) == 1
    assert case.saving(case.rows[0]) is None
    assert case.saving(case.rows[-1]).pct["mean"] > 0.0
    document = found.to_json()
    assert (document["forecasts"], document["against"]) == (list(FORECASTS), "none")
    assert document["cases"][0]["rows"][-1]["forecast"] == "perfect"
    assert notes[0].startswith("of a perfect forecast's saving: persistence ")
    assert notes[1].startswith("zone grid has no lead-in")
    text = Console(width=200, record=True, file=io.StringIO())
    text.print(*comparison_tables(found))
    assert "saving against none at equal accuracy" in text.export_text()
