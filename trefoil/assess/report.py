"""Report of an assessment: tables, JSON, page with plots. What is assumed stands with the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from trefoil.assess.answering import WORDS, LeverAnswer, LeverAnswers
from trefoil.assess.families import FittedFamily
from trefoil.assess.finding import Found
from trefoil.assess.fitting import FleetCosts
from trefoil.core.units import DAY_S, HOUR_S, J_PER_KWH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

YEAR_S: Final = 365.25 * DAY_S
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
DEVICE_COLUMNS: Final = ("device", "host", "board", "slices", "mean W", "idle W", "active", "J", "joules by")
MODEL_COLUMNS: Final = (
    "model", "servers", "requests/s", "batch", "service ms", "p95 ms", "J/request", "mg/request", "J", "g", "idle",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assessment:
    """Assessment of a fleet: what was found, what it costs, what levers save. `assumed`, `risks`: a line each."""

    found: Found
    costs: FleetCosts
    fitted: Sequence[FittedFamily]
    answers: LeverAnswers | None
    assumed: Sequence[str]
    risks: Sequence[str]
    asked: str

    @property
    def headline(self) -> str:
        """What the fleet costs, in a line."""
        whole, seconds = self.costs.whole, float(self.found.covered_s.sum())
        per_year = YEAR_S / seconds / 1e3 if seconds else 0.0
        return (
            f"{whole.joules / J_PER_KWH:.4g} kWh and {whole.grams:.4g} g of CO2 in {seconds / HOUR_S:.3g} h "
            f"({whole.grams * per_year:.3g} kg a year), {whole.idle_j / max(whole.joules, 1e-9):.0%} of it idle; "
            f"{self.found.asleep_h():.3g} device hours could be slept through"
        )

    def tables(self) -> list[Table]:
        """Tables: title, columns, rows."""
        devices: list[tuple[str, ...]] = [
            (name, one.host, one.board or "-", ", ".join(sorted(one.slices.values())) or "whole", f"{one.mean_w:.1f}",
             f"{self.costs.fits[one.board].idle_w:.1f} ({self.costs.fits[one.board].idle_basis})",
             "-" if one.activity is None else f"{one.activity:.0%}", f"{one.joules.sum():.4g}", one.basis)
            for name, one in self.found.devices.items()
        ]  # fmt: skip
        models = list[tuple[str, ...]]()
        for name, cost in self.costs.by_model.items():
            model = self.found.models.get(name)
            cells = ("-",) * 5
            if model is not None:
                seconds = float(model.covered_s.sum())
                quantile = model.latency_ms.get(0.95)
                cells = (
                    f"{len(model.replicas)}", f"{cost.requests / seconds if seconds else 0:.4g}", f"{model.batch:.3g}",
                    f"{model.service_ms:.4g}", f"{quantile:.4g}" if quantile else f"mean {model.request_ms:.4g}",
                )  # fmt: skip
            each = (
                (f"{cost.joules_per_request:.4g}", f"{1e3 * cost.grams_per_request:.4g}")
                if cost.requests
                else ("-", "-")
            )
            idle = f"{cost.idle_j / cost.joules:.0%}" if cost.joules else "-"
            models.append((name, *cells, *each, f"{cost.joules:.4g}", f"{cost.grams:.4g}", idle))
        found: list[Table] = [
            ("Devices", DEVICE_COLUMNS, devices),
            ("Models", MODEL_COLUMNS, models),
        ]
        if self.answers is not None:
            columns = ("lever", "saves", "of seeds", "g saved", "p95 ms", "in SLO", "accuracy", "what is risky")
            found.append(("Savings", columns, [self._answer(one) for one in self.answers.answers]))
        return found

    def _answer(self, one: LeverAnswer) -> tuple[str, ...]:
        words = WORDS.get(one.lever, one.lever)
        if not one.known:
            return (words, "none", "", "", *_served(one), one.why_none)
        grams = self.costs.whole.grams
        saved, spread = f"{one.saving_pct:+.1f} %", f"{one.low_pct:+.1f} to {one.high_pct:+.1f} %"
        return (words, saved, spread, f"{grams * one.saving_pct / 100:.3g}", *_served(one), one.risk)

    def notes(self) -> list[str]:
        """What has to be known beside the tables, a line each."""
        lines = [f"assumed: {line}" for line in self.assumed] + [f"risk: {line}" for line in self.risks]
        if self.answers is not None:
            counted = self.costs.whole.joules / max(1e-9, float(self.found.covered_s.sum()))
            told = self.answers
            lines.append(
                f"today in the simulator: {told.today_w:.1f} W, counted {counted:.1f} W; {told.seeds} seeds, "
                f"{told.simulated_h:.3g} h"
            )
        return [*lines, f"asked: {self.asked}"]

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        found, costs = self.found, self.costs
        return {
            "begin_s": found.begin_s, "end_s": float(found.edges_s[-1]), "bin_s": found.bin_s,
            "covered_s": float(found.covered_s.sum()), "joules": costs.whole.joules, "grams": costs.whole.grams,
            "idle_j": costs.whole.idle_j, "asleep_device_h": found.asleep_h(),
            "devices": {
                name: {"host": one.host, "board": one.board, "slices": one.slices, "joules": float(one.joules.sum()),
                       "covered_s": float(one.covered_s.sum()), "mean_w": one.mean_w, "basis": one.basis,
                       "idle_w": costs.fits[one.board].idle_w, "idle_basis": costs.fits[one.board].idle_basis}
                for name, one in found.devices.items()
            },
            "models": {
                name: {**asdict(cost), "servers": {r.name: [d for d, _ in r.devices] for r in model.replicas},
                       "requests_per_s": (model.count("requests") / found.bin_s).tolist(), "batch": model.batch,
                       "service_ms": model.service_ms, "request_ms": model.request_ms, "latency_ms": model.latency_ms,
                       "latency_basis": model.latency_basis}
                for name, cost in costs.by_model.items() if (model := found.models.get(name)) is not None
            },
            "joules_by_bin": costs.joules.tolist(), "intensity_g_per_kwh": costs.intensity.tolist(),
            "savings": None if self.answers is None else asdict(self.answers),
            "assumed": list(self.assumed), "risks": list(self.risks), "asked": self.asked,
        }  # fmt: skip

    def plot(self) -> "Figure":
        """matplotlib Figure: load by model, power and intensity over time; savings with their spread."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 8.0), layout="constrained")
        load, power, carbon, savings = figure.subplots(4, 1)
        hours = (self.found.edges_s[:-1] - self.found.begin_s) / HOUR_S
        for model in self.found.models.values():
            load.step(hours, model.count("requests") / self.found.bin_s, where="post", label=model.name)
        power.step(hours, self.costs.joules / self.found.bin_s, where="post", color="#5b6470")
        idle = sum(self.costs.fits[one.board].idle_w for one in self.found.devices.values())
        power.axhline(idle, color="#d64545", ls="--", lw=1)
        carbon.step(hours, self.costs.intensity, where="post", color="#5b6470")
        load.legend(frameon=False)
        for axes, label in ((load, "requests/s"), (power, "W (-- idle)"), (carbon, "g CO2/kWh, by hours")):
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.margins(x=0)
        known = [one for one in self.answers.answers if one.known] if self.answers else []
        for at, one in enumerate(known):
            error = [[one.saving_pct - one.low_pct], [one.high_pct - one.saving_pct]]
            savings.barh(at, one.saving_pct, xerr=error, capsize=3, color="C0")
        savings.set_yticks(range(len(known)), [one.lever for one in known])
        savings.set_xlabel("saving, % of grams a request")
        for axes in (load, power, carbon, savings):
            axes.spines[["top", "right"]].set_visible(False)
        return figure

    def html(self, about: Mapping[str, Any]) -> str:
        """HTML page."""
        from trefoil.page import Card, page, svg_of

        cards = [Card(title, columns, rows) for title, columns, rows in self.tables()]
        cards += [Card("Over time", figure=svg_of(self.plot())), Card("What it rests on", lines=self.notes())]
        simulated = (
            "What the fleet costs was read from its own counters. Savings are simulated." if self.answers else ""
        )
        return page("what the fleet costs, and would save", self.headline, simulated, cards, about)


def _served(one: LeverAnswer) -> tuple[str, str, str]:
    shown = ((one.p95_ms, ".4g"), (one.slo_attainment, ".2%"), (one.accuracy, ".4f"))
    p95, attained, accuracy = (format(value, shape) if value == value else "-" for value, shape in shown)
    return p95, attained, accuracy
