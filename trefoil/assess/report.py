"""Report of an assessment: tables, JSON, page with plots. What is assumed stands with the numbers."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from trefoil.assess.answering import LEVERS, Assessment, LeverAnswer
from trefoil.core.units import DAY_S, HOUR_S, J_PER_KWH, MG_PER_G

if TYPE_CHECKING:
    from matplotlib.figure import Figure

YEAR_S: Final = 365.25 * DAY_S
DEVICE_COLUMNS: Final = "device|host|board|slices|mean W|idle W|active|J|joules by"
MODEL_COLUMNS: Final = "model|servers|requests/s|batch|service ms|p95 ms|J/request|mg/request|J|g|idle"
SAVING_COLUMNS: Final = "lever|saves|of seeds|g saved|p95 ms|in SLO|accuracy|what is risky, or why none"


def headline(one: Assessment) -> str:
    """What the fleet costs, in a line."""
    whole, seconds = one.costs.whole, float(one.found.covered_s.sum())
    return (
        f"{whole.joules / J_PER_KWH:.4g} kWh and {whole.grams:.4g} g of CO2 in {seconds / HOUR_S:.3g} h "
        f"({whole.grams * YEAR_S / max(seconds, 1.0) / 1e3:.3g} kg a year); "
        f"{whole.idle_j / max(whole.joules, 1e-9):.0%} of it idle; "
        f"{one.found.asleep_h():.3g} device hours could be slept through"
    )


def tables(one: Assessment) -> list[tuple[str, str, list[tuple[str, ...]]]]:
    """Tables: title, columns, rows."""
    devices, models = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for name, device in one.found.devices.items():
        fit, slices = one.costs.fits[device.board], ", ".join(sorted(device.slices.values()))
        active = "-" if device.activity is None else f"{device.activity:.0%}"
        idle = f"{fit.idle_w:.1f} ({fit.idle_basis})"
        cells = (slices or "whole", f"{device.mean_w:.1f}", idle, active, f"{device.joules.sum():.4g}", device.basis)
        devices.append((name, device.host, device.board.removeprefix("NVIDIA ") or "-", *cells))
    for name, cost in one.costs.by_model.items():
        first: tuple[str, ...] = ("-",) * 7
        if (model := one.found.models.get(name)) is not None:
            p95 = model.latency_ms.get(0.95)
            numbers = (cost.requests / model.covered_s.sum(), model.batch, model.service_ms)
            each = (cost.joules / cost.requests, MG_PER_G * cost.grams / cost.requests)
            first = (
                str(len(model.replicas)), *(f"{n:.4g}" for n in numbers),
                f"{p95:.4g}" if p95 else f"mean {model.request_ms:.4g}", *(f"{n:.4g}" for n in each),
            )  # fmt: skip
        idle = f"{cost.idle_j / cost.joules:.0%}" if cost.joules else "-"
        models.append((name, *first, f"{cost.joules:.4g}", f"{cost.grams:.4g}", idle))
    found = [("Devices", DEVICE_COLUMNS, devices), ("Models", MODEL_COLUMNS, models)]
    if one.today:
        found.append(("Savings", SAVING_COLUMNS, [_saving(answer, one.costs.whole.grams) for answer in one.answers]))
    return found


def _saving(one: LeverAnswer, grams: float) -> tuple[str, ...]:
    shown = ((one.p95_ms, ".4g"), (one.slo_attainment, ".2%"), (one.accuracy, ".4f"))
    served = [format(value, shape) if value == value else "-" for value, shape in shown]
    words, risk = LEVERS[one.lever]
    if one.why_none:
        return (f"{one.lever}: {words}", "none", "", "", *served, one.why_none)
    spread = f"{one.low_pct:+.1f} to {one.high_pct:+.1f} %"
    saved = f"{grams * one.saving_pct / 100:.3g}"
    return (f"{one.lever}: {words}", f"{one.saving_pct:+.1f} %", spread, saved, *served, risk)


def notes(one: Assessment) -> list[str]:
    """What has to be known beside the tables, a line each."""
    lines = [f"assumed: {line}" for line in one.assumed] + [f"risk: {line}" for line in one.risks]
    if told := one.today:
        counted_w = one.costs.whole.joules / max(1e-9, float(one.found.covered_s.sum()))
        simulated = f"{told['power_w']:.1f} W, p95 {told['p95_ms']:.4g} ms, {told['seeds']:g} seeds"
        lines.append(f"today in the simulator: {simulated}; counted {counted_w:.1f} W")
    return [*lines, f"asked: {one.asked}"]


def to_json(one: Assessment) -> dict[str, Any]:
    """JSON values."""
    found, costs = one.found, one.costs
    devices, models = dict[str, Any](), dict[str, Any]()
    for name, device in found.devices.items():
        sums = {"joules": float(device.joules.sum()), "covered_s": float(device.covered_s.sum())}
        fit = costs.fits[device.board]
        devices[name] = asdict(device) | sums | {"idle_w": fit.idle_w, "idle_basis": fit.idle_basis}
    for name, model in found.models.items():
        keys = ("batch", "service_ms", "request_ms", "latency_ms", "latency_basis")
        servers = {replica.name: [device for device, _ in replica.devices] for replica in model.replicas}
        rate = (model.count("requests") / found.bin_s).tolist()
        models[name] = asdict(costs.by_model[name]) | {"servers": servers, "requests_per_s": rate}
        models[name] |= {key: getattr(model, key) for key in keys}
    return {
        "begin_s": float(found.edges_s[0]), "bin_s": found.bin_s, "covered_s": float(found.covered_s.sum()),
        **asdict(costs.whole), "asleep_device_h": found.asleep_h(), "devices": devices, "models": models,
        "joules_by_bin": costs.joules.tolist(), "intensity_g_per_kwh": costs.intensity.tolist(),
        "savings": [asdict(answer) for answer in one.answers], "today_simulated": dict(one.today),
        "assumed": list(one.assumed), "risks": list(one.risks), "asked": one.asked,
    }  # fmt: skip


def plot(one: Assessment) -> "Figure":
    """matplotlib Figure: load by model, power and intensity over time; savings with their spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    load, power, carbon, savings = panels = figure.subplots(4, 1)
    found = one.found
    hours = (found.edges_s[:-1] - found.edges_s[0]) / HOUR_S
    for model in found.models.values():
        name = f" {model.name}".replace("$", r"\$")
        load.step(hours, model.count("requests") / found.bin_s, where="post", label=name)
    load.legend(frameon=False)
    power.step(hours, one.costs.joules / found.bin_s, where="post")
    power.axhline(sum(one.costs.fits[device.board].idle_w for device in found.devices.values()), ls="--", lw=1)
    carbon.step(hours, one.costs.intensity, where="post")
    for axes, label in zip(panels, ("requests/s", "W (-- idle)", "g CO2/kWh", ""), strict=True):
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0 if label else None)
    for answer in (answer for answer in one.answers if not answer.why_none):
        apart = [[answer.saving_pct - answer.low_pct], [answer.high_pct - answer.saving_pct]]
        savings.barh(answer.lever, answer.saving_pct, xerr=apart, capsize=3)
    carbon.set_xlabel("hours")
    savings.set_xlabel("saving, % of grams a request")
    return figure


def html(one: Assessment, about: Mapping[str, Any]) -> str:
    """HTML page."""
    from trefoil.page import Card, page, svg_of

    cards = [Card(title, columns.split("|"), rows) for title, columns, rows in tables(one)]
    cards += [Card("Over time", figure=svg_of(plot(one))), Card("What it rests on", lines=notes(one))]
    simulated = "What the fleet costs was read from its own counters. Savings are simulated." if one.answers else ""
    return page("What the fleet costs, and would save", headline(one), simulated, cards, about)
