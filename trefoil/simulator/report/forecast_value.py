"""Value of carbon forecasts: one scenario with no forecast, with the feed's own models, and with a perfect one.

Everything else is equal: load, fleet, truth, seed, objective, accuracy floor. The floor binds a mean over a window, so
that runs end at slightly different accuracies; to compare grams all the same, the scenario is run once more without a
forecast and with a floor that is `FLOOR_STEP` higher: the grams that this costs are the price of accuracy, and
`grams at equal accuracy` are a run's grams less that price times what it is more accurate than `none`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from trefoil.core.objective import floor_missed
from trefoil.simulator.report.result import Summary, json_safe
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import Scenario, Served
from trefoil.tables import Grid

MODELS: Final = ("none", "persistence", "climatology", "blend", "perfect")
FLOOR_STEP: Final = 0.001
SAVING_MIN: Final = 5e-4  # of a perfect forecast: shares of less are noise


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """Outcome of one run. Grams of all that was drawn, in all and per answer.

    `equal_grams_per_request`: at `none`'s accuracy; `saving_ratio`: of that against `none`; `above_floor`: the least of
    any family, accuracy less its floor. A run that missed its floor has no saving: NaN.
    """

    forecast: str
    grams: float
    grams_per_request: float
    accuracy: float
    above_floor: float
    equal_grams_per_request: float
    saving_ratio: float
    slo_attainment: float
    answered: int
    replans: int
    reconfigurations: int


@dataclass(frozen=True, slots=True)
class ForecastComparison:
    """Comparison of runs, `none` first. `price_g`: grams per request of one unit of accuracy; None: not known.

    `note`: what the feed's models lack here; "" = nothing.
    """

    scenario: str
    seed: int
    duration_s: float
    floors: Mapping[str, float]
    price_g: float | None
    rows: tuple[ForecastRun, ...]
    note: str = ""

    @property
    def captured(self) -> Mapping[str, float | None]:
        """Share by forecast of a perfect one's saving; None where a perfect one saves (next to) nothing."""
        best = self.rows[-1].saving_ratio
        known = {row.forecast: row.saving_ratio / best if best > SAVING_MIN else math.nan for row in self.rows}
        return {name: share if math.isfinite(share) else None for name, share in known.items()}

    def to_json(self) -> str:
        """JSON document: the same bytes for the same scenario and seed."""
        document = json_safe({**dataclasses.asdict(self), "captured": self.captured})
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"

    def table(self) -> Table:
        """Table for people."""
        floors = ", ".join(f"{family} >= {floor:.4f}" for family, floor in self.floors.items())
        table = Grid(
            title=f"{self.scenario}: what a forecast buys, {self.duration_s / 3600:g} h simulated, seed {self.seed}, "
            f"mean accuracy {floors}"
        )
        table.title_justify = table.caption_justify = "left"
        names = ("forecast", "grams", "mg/request", "accuracy", "above floor", "at equal accuracy", "saving")
        for name in (*names, "of perfect", "in SLO", "plans", "reconfigurations"):
            table.add_column(name, justify="left" if name == "forecast" else "right")
        captured = self.captured
        for row in self.rows:
            share = captured[row.forecast]
            table.add_row(
                row.forecast, f"{row.grams:,.1f}", f"{row.grams_per_request * 1e3:.4f}", f"{row.accuracy:.5f}",
                f"{row.above_floor:+.5f}", f"{row.equal_grams_per_request * 1e3:.4f}",
                f"{row.saving_ratio:+.2%}" if math.isfinite(row.saving_ratio) else "floor missed",
                "-" if share is None else f"{share:.0%}", f"{row.slo_attainment:.2%}", str(row.replans),
                str(row.reconfigurations),
            )  # fmt: skip
        price = "not known" if self.price_g is None else f"{self.price_g * 1e3:.3f} mg per request and unit"
        table.caption = f"price of accuracy, by a floor {FLOOR_STEP:g} higher: {price}"
        table.caption += f"\n{self.note}" if self.note else ""
        return table


def compare_forecasts(
    scenario: Scenario, provided: Provided | None = None, progress: Callable[[float], None] | None = None
) -> ForecastComparison:
    """Compare forecasts of one scenario in six runs. `progress` is told the share that is done.

    Raises:
        errors.TrefoilError: the scenario cannot be run; names field, value and remedy.
    """
    scenarios = [with_forecast(scenario, name) for name in MODELS]
    scenarios.append(with_forecast(with_higher_floors(scenario), MODELS[0]))
    summaries: list[Summary] = []
    for done, one in enumerate(scenarios):
        share = None if progress is None else _share_of(progress, done, len(scenarios))
        summaries.append(simulate(one, provided, progress=share).summary)
    none, dearer = summaries[0], summaries.pop()
    gained = dearer.accuracy - none.accuracy
    price = (dearer.grams_per_request - none.grams_per_request) / gained if gained > FLOOR_STEP / 4 else None
    floors = _floors(scenario, provided)
    rows = tuple(run_of(name, one, none, price or 0.0, floors) for name, one in zip(MODELS, summaries, strict=True))
    return ForecastComparison(
        scenario.name, scenario.seed, scenario.span_s, floors, price, rows, _note(scenario, provided)
    )


def _note(scenario: Scenario, provided: Provided | None) -> str:
    """What is missing for models to learn from before the run begins."""
    known = provided.carbon_before if provided is not None else {}
    zones = {node.zone: scenario.carbon.zones[node.zone] for node in scenario.nodes if node.zone not in known}
    flat = [name for name, zone in zones.items() if zone.constant_g_per_kwh is not None]
    new = [name for name, zone in zones.items() if name not in flat and not zone.offset_h]
    parts = [f"zone {name} is constant: there is nothing to forecast" for name in flat]
    parts += [
        f"zone {name} has no lead-in (carbon.zones.{name}.offset_h = 0): the feed's models know only what the run has "
        f"seen so far; begin later in a longer trace, e.g. --set carbon.zones.{name}.offset_h=336"
        for name in new
    ]
    return "; ".join(parts)


def with_forecast(scenario: Scenario, name: str) -> Scenario:
    """Scenario with another forecast."""
    return scenario.model_copy(update={"carbon": scenario.carbon.model_copy(update={"forecast": name})})


def with_higher_floors(scenario: Scenario) -> Scenario:
    """Scenario with floors that are `FLOOR_STEP` higher."""
    return scenario.model_copy(update={"families": tuple(_with_higher_floor(served) for served in scenario.families)})


def _with_higher_floor(served: Served) -> Served:
    wanted = served.objective.accuracy
    if wanted.floor or wanted.below_best_pct is None:
        change = {"floor": min(1.0, wanted.floor + FLOOR_STEP)}
    else:
        change = {"below_best_pct": max(0.0, wanted.below_best_pct - 100 * FLOOR_STEP)}
    accuracy = wanted.model_copy(update=change)
    return served.model_copy(update={"objective": served.objective.model_copy(update={"accuracy": accuracy})})


def _floors(scenario: Scenario, provided: Provided | None) -> dict[str, float]:
    return {family: o.min_accuracy for family, o in sorted(prepare(scenario, provided).objectives.items())}


def run_of(name: str, one: Summary, none: Summary, price: float, floors: Mapping[str, float]) -> ForecastRun:
    """Run of a forecast against one without: `price` is the grams of a unit of accuracy."""
    equal = one.grams_per_request - price * (one.accuracy - none.accuracy)
    saving = 1 - equal / none.grams_per_request if none.grams_per_request else 0.0
    above = min((one.families[family].accuracy - floor for family, floor in floors.items()), default=0.0)
    return ForecastRun(
        forecast=name,
        grams=one.grams,
        grams_per_request=one.grams_per_request,
        accuracy=one.accuracy,
        above_floor=above,
        equal_grams_per_request=equal,
        saving_ratio=math.nan if floor_missed(above, 0.0) else saving,
        slo_attainment=one.slo_attainment,
        answered=one.answered,
        replans=one.replans,
        reconfigurations=one.reconfigurations,
    )


def _share_of(progress: Callable[[float], None], done: int, parts: int) -> Callable[[float], None]:
    return lambda share: progress((done + share) / parts)
