"""An assessment from series: find, fit, write the scenario, and ask the simulator what each lever saves.

Each seed draws other arrivals, and another truth by the errors of the fit (`noise`). So the spread of the seeds is that
of load and fit. With MIG the truth also varies by the law's error. A saving is that of `trefoil compare`: at equal
accuracy, none where an SLO or a floor is missed.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from trefoil.assess.families import Fitting, Terms, board_type
from trefoil.assess.finding import Found, find
from trefoil.assess.fitting import TABLE, FleetCosts, costs, fit_boards
from trefoil.assess.scenario import PlayedFleet, fleet_of, lever_scenarios, write_files
from trefoil.assess.series import MetricSeries
from trefoil.comparison.comparison import Case, Row
from trefoil.comparison.runs import PlannedCase, jobs_of, play, pricing, take_unplayable
from trefoil.core.carbon import Factors, Method, Series
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.units import HOUR_S
from trefoil.runtime.given.table import date_of
from trefoil.simulator.scenario.carbon import intensity_of, zone_trace
from trefoil.simulator.scenario.schema import Carbon, Zone

INTENSITY, TODAY = 400.0, "today"  # g/kWh, where neither trace nor number is given; name of the fleet as found
# In order: what each lever does, and what is risky.
LEVERS: Final[Mapping[str, tuple[str, str]]] = {
    "sleep": ("devices that the load does not need sleep", "serves again after seconds; one device may hold all"),
    "variants": ("cheaper variants above the accuracy floor", "answers differ: check the accuracies on your own data"),
    "clocks": ("lower SM clocks within the SLO", "each request takes longer; a clock holds for the whole board"),
    "mig": ("devices are cut to what models need", "cutting ends what runs there for seconds; memory is divided"),
    "placing": ("load goes where it costs least", "load that moves warms other caches"),
    "together": ("all of them, by carbon", "the sum of the above"),
}


@dataclass(frozen=True, slots=True)
class LeverAnswer:
    """Saving of one lever [%]: mean, lowest and highest of the seeds, `plain_pct` as it ran; or why there is none."""

    lever: str
    saving_pct: float = math.nan
    low_pct: float = math.nan
    high_pct: float = math.nan
    plain_pct: float = math.nan
    p95_ms: float = math.nan
    slo_attainment: float = math.nan
    accuracy: float = math.nan
    why_none: str = ""


@dataclass(frozen=True, slots=True)
class Assessment:
    """What was found, what it costs, what levers save, what that rests on; `asked`: how much was read. `today`: the
    fleet as found in the simulator, to be set beside what was counted; {}: nothing was played."""

    found: Found
    costs: FleetCosts
    answers: Sequence[LeverAnswer]
    today: Mapping[str, float]
    assumed: Sequence[str]
    risks: Sequence[str]
    asked: str


def assess(
    series: Sequence[MetricSeries], terms: Terms, *, seeds: int = 3, jobs: int = 0, out: Path | None = None,
    asked: str = "", date: str = "", say: Callable[[str], None] = lambda _: None,
) -> Assessment:  # fmt: skip
    """Assess a fleet from its series. `seeds` 0: costs alone. `out`: folder for scenario and profile."""
    found = find(series)
    notes = [*found.notes, f"PUE {terms.pue:g} (--pue)"]
    zone = zone_of(terms, found, notes)
    types = {name: board_type(device, terms) for name, device in found.devices.items()}
    fits = fit_boards(found, {device.board: types[name].idle_w for name, device in found.devices.items()})
    played = intensity_of(terms.zone, Carbon(zones={terms.zone: Zone(**zone)}))
    middles = (found.edges_s[:-1] + found.edges_s[1:]) / 2 - found.edges_s[0]
    intensity = np.array([played.reading(float(at)).intensity_g_per_kwh for at in middles])
    cost = costs(found, fits, intensity, terms.pue)
    by_table = ((board, fit.idle_w) for board, fit in fits.items() if fit.idle_basis == TABLE)
    notes += [f"idle watts of {board}: {watts:.3g}, by {TABLE}: its load hardly varies" for board, watts in by_table]
    fitting = Fitting(found, fits, types, terms)
    families = fitting.families()
    notes += [*fitting.notes, f"accuracy may fall {terms.below_best_pct:g} % below today's (--below-best-pct)"]
    answers, today, risks = list[LeverAnswer](), dict[str, float](), list[str]()
    with tempfile.TemporaryDirectory(prefix="trefoil-assess-") as scratch:
        try:
            fleet = fleet_of(fitting, families, zone, date)
            path = write_files(out or Path(scratch) / "out", fleet)
            if seeds:
                scenarios, left_out = lever_scenarios(path, Path(scratch), fleet)
                left_out |= take_unplayable(scenarios, TODAY)
                planned = {name: jobs_of(name, one, seeds, optional=name != TODAY) for name, one in scenarios.items()}
                priced = pricing(scenarios["variants"], seeds) if "variants" in planned else ()
                (case,) = play([PlannedCase({}, planned, priced, left_out)], jobs, say)
                row = case.row(TODAY)
                today = {"power_w": row.mean("power_w"), "p95_ms": row.mean("p95_ms"), "seeds": float(seeds)}
                told = {one.name: _answer(case, one, row) for one in case.rows if one is not row}
                told |= {name: LeverAnswer(name, why_none=why) for name, why in case.left_out.items()}
                answers = [told[name] for name in LEVERS if name in told]
                risks = _risks(fleet, row.missed)
        except InvalidInput as error:
            risks = [f"neither scenario nor savings: {error}"]
    return Assessment(found, cost, answers, today, notes, risks, asked)


def zone_of(terms: Terms, found: Found, notes: list[str]) -> dict[str, Any]:
    """Zone as a scenario has it, of a trace or a number; a trace that covers the time begins with it."""
    try:
        constant = float(terms.carbon or INTENSITY)
    except ValueError:
        path = Path(terms.carbon).resolve()
        trace = zone_trace(Zone(trace=path), Series(terms.zone, Method.AVERAGE, Factors.LIFECYCLE))
        starts = date_of(trace.starts)
        begin_s, end_s = found.edges_s[[0, -1]] - (starts.timestamp() if starts is not None else math.inf)
        offset_h = float(begin_s) / HOUR_S
        if not 0 <= begin_s < end_s <= trace.body_s:
            notes.append(f"carbon: {trace.source} does not cover the time that was read: played from its beginning")
            offset_h = 0.0
        return {"trace": str(path), "offset_h": round(offset_h, 4)}
    if not 0 <= constant <= 1500:
        raise SettingError("no intensity", field="--carbon", value=terms.carbon, remedy="0 to 1500 g/kWh, or a trace")
    if not terms.carbon:
        notes.append(f"carbon: {INTENSITY:g} g/kWh at all hours (--carbon TRACE.csv or a number)")
    return {"constant_g_per_kwh": constant}


def _answer(case: Case, row: Row, today: Row) -> LeverAnswer:
    told: dict[str, Any] = {name: row.mean(name) for name in ("p95_ms", "slo_attainment", "accuracy")}
    saving = case.saving(row, today)
    if saving is None or saving.pct is None or saving.plain_pct is None:
        return LeverAnswer(row.name, why_none=saving.why if saving else "", **told)
    low, high = min(saving.by_seed), max(saving.by_seed)
    return LeverAnswer(row.name, saving.pct["mean"], low, high, saving.plain_pct["mean"], **told)


def _risks(fleet: PlayedFleet, missed: Sequence[str]) -> list[str]:
    """What the answers rest on that may not hold, a line each."""
    law = ", ".join(one.family.name for one in fleet.families if one.folder is None)
    joined = ", ".join(one.family.name for one in fleet.families if one.joins)
    lines = {
        f"{law}: other slices and boards are by a law; measure them: trefoil family profile": law,
        f"{joined}: requests that are joined while they run are simulated as whole batches": joined,
        f"not simulated, as one server spans several devices: {', '.join(fleet.left_out)}": fleet.left_out,
        f"today's fleet misses its {' and '.join(missed)} in the simulator: check both": missed,
    }
    return [line for line, holds in lines.items() if holds]
