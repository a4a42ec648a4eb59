"""An assessment from series: find, fit, write the scenario, ask the simulator."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from trefoil.assess.answering import answer, risks
from trefoil.assess.families import Fitting, Terms, board_type
from trefoil.assess.finding import Found, find
from trefoil.assess.fitting import costs, fit_boards
from trefoil.assess.report import Assessment
from trefoil.assess.scenario import fleet_of, lever_scenarios, write_files
from trefoil.assess.series import Floats, MetricSeries
from trefoil.core.carbon import Factors, Method
from trefoil.core.carbon import Series as CarbonSeries
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.units import HOUR_S
from trefoil.runtime.given.table import date_of
from trefoil.simulator.scenario.carbon import intensity_of, zone_trace
from trefoil.simulator.scenario.schema import Carbon, Zone

INTENSITY: Final = 400.0  # g/kWh, where neither trace nor number is given


def zone_of(name: str, carbon: str, begin_s: float, notes: list[str]) -> dict[str, Any]:
    """Zone as a scenario has it, of a trace or a number; a trace that covers the time begins with it.

    Raises:
        TrefoilError: the trace cannot be read. SettingError: no such number.
    """
    try:
        constant = float(carbon) if carbon else INTENSITY
    except ValueError:
        path = str(Path(carbon).resolve())
        trace = zone_trace(Zone(trace=Path(path)), CarbonSeries(name, Method.AVERAGE, Factors.LIFECYCLE))
        starts = date_of(trace.starts)
        offset_h = (begin_s - starts.timestamp()) / HOUR_S if starts is not None else -1.0
        if not 0 <= offset_h < trace.body_s / HOUR_S:
            notes.append(
                f"carbon: {trace.source} does not cover the time that was read, and is played from its beginning"
            )
            offset_h = 0.0
        return {"name": name, "trace": path, "offset_h": round(offset_h, 4)}
    if not 0 <= constant <= 1500:
        raise SettingError(
            "no intensity", field="--carbon", value=carbon, remedy="0 to 1500 g/kWh, or a trace"
        ) from None
    if not carbon:
        notes.append(f"carbon: {INTENSITY:g} g/kWh at all hours (--carbon TRACE.csv or a number)")
    return {"name": name, "constant_g_per_kwh": constant}


def intensities(found: Found, zone: Mapping[str, Any]) -> Floats:
    """Intensity of each bin [g/kWh]."""
    keys = {key: value for key, value in zone.items() if key != "name"}
    played = intensity_of(zone["name"], Carbon(zones={zone["name"]: Zone(**keys)}))
    middles = (found.edges_s[:-1] + found.edges_s[1:]) / 2 - found.begin_s
    return np.array([played.reading(float(at)).intensity_g_per_kwh for at in middles])


def assess(
    series: Sequence[MetricSeries],
    terms: Terms,
    *,
    carbon: str = "",
    zone: str = "grid",
    seeds: int = 3,
    jobs: int = 0,
    out: Path | None = None,
    asked: str = "",
    date: str = "",
    say: Callable[[str], None] = lambda _text: None,
) -> Assessment:
    """Assess a fleet from its series. `seeds` 0: costs alone. `out`: folder for scenario and profile.

    Raises:
        TrefoilError: names field, value and remedy.
    """
    found = find(series)
    notes = [*found.notes, f"PUE {terms.pue:g} (--pue)"]
    chosen = zone_of(zone, carbon, found.begin_s, notes)
    types = {name: board_type(device, terms) for name, device in found.devices.items()}
    table = {device.board: types[name].idle_w for name, device in found.devices.items()}
    cost = costs(found, fit_boards(found, table), intensities(found, chosen), terms.pue)
    notes += [
        f"idle watts of {board}: {fit.idle_w:.3g} W by {fit.idle_basis}: no sample without load, and load hardly varies"
        for board, fit in cost.fits.items() if fit.idle_basis not in ("seen idle", "fitted")
    ]  # fmt: skip
    fitting = Fitting(found, cost.fits, types, terms)
    fitted = fitting.families()
    notes += [*fitting.notes, f"accuracy may fall {terms.below_best_pct:g} % below today's (--below-best-pct)"]
    with tempfile.TemporaryDirectory(prefix="trefoil-assess-") as scratch:
        folder, answers, dangers = out or Path(scratch) / "out", None, list[str]()
        try:
            fleet = fleet_of(found, types, fitted, terms, chosen, date)
            path = write_files(folder, fleet)
            if seeds:
                answers = answer(*lever_scenarios(path, Path(scratch), fleet), seeds, jobs, say)
                dangers = risks(fleet, answers)
        except InvalidInput as error:
            if out is not None:
                raise
            dangers = [f"no savings: {error}"]
    return Assessment(found, cost, fitted, answers, notes, dangers, asked)
