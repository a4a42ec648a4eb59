"""Beside the headline: levers one by one, loads, lambdas, thresholds, fewer GPUs, and every assumption turned by 30 %.

All of these are fluid runs (no single requests) or the request-level kernel, one seed: they rank and show shapes; the
headline's figures are request by request.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, Final

import numpy as np

from controller.planners.columns import effective_row
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import A100_40GB_WHOLE, device_type, slice_type
from trefoil.core.power import SWEEP_IDLE_W
from trefoil.core.queueing import ServerClass, arrivals_s, serve_shared, service_time
from trefoil.reproduce.clover import LARGEST, MAIN_TRACE, Study
from trefoil.reproduce.judge import curve, saving_pct
from trefoil.reproduce.runs import REPOSITORY, Played, Spec
from trefoil.reproduce.setting import (
    CONSTANT_G,
    DEVICE,
    GPUS,
    ITEMS,
    LOAD,
    Reference,
    capacity_per_s,
    reference_of,
    reference_spec,
    spec_of,
    trace_of,
)
from trefoil.runtime.repository import load_family

LOADS: Final = (0.1, 0.3, 0.5, 0.6, 0.7, 0.9)
LAMBDAS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
LOSSES_PCT: Final = (0.2, 0.4, 0.6, 0.8)
FLEETS: Final = (10, 4, 2)
BASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "7g": {},
    "4g + 3g (configuration 2)": {"constants": (("configuration", 2.0),)},
    "outside MIG": {"device": A100_40GB_WHOLE.name},
}
BASES_H: Final = 1.0
SHORT_H: Final = 6.0
FIG14_G: Final = 100.0
SWEEP_RATIO: Final = device_type(DEVICE).idle_w / SWEEP_IDLE_W[DEVICE][0]  # less idle, or more active: one ratio ranks
KERNEL_REQUESTS: Final = 20_000
TURNS: Final[Mapping[str, Mapping[str, Any]]] = {
    "nothing turned": {},
    "active joules x 1.3 (idle / 1.3)": {"energy": (("", 1.3),)},
    "active joules x 0.7 (idle / 0.7)": {"energy": (("", 0.7),)},
    "small slices need 30 % more joules": {"energy": (("1g.5gb", 1.3), ("2g.10gb", 1.3), ("3g.20gb", 1.3))},
    "small slices need 30 % less joules": {"energy": (("1g.5gb", 0.7), ("2g.10gb", 0.7), ("3g.20gb", 0.7))},
    "small slices are 30 % slower": {"latency": (("1g.5gb", 1.3), ("2g.10gb", 1.3), ("3g.20gb", 1.3))},
    "idle 36.1 of 55 W (CLOVER's own sweep), sleep in proportion": {"energy": (("", SWEEP_RATIO),)},
    "small slices are 30 % faster": {"latency": (("1g.5gb", 0.7), ("2g.10gb", 0.7), ("3g.20gb", 0.7))},
}
RANKED: Final = ("base", "co2opt", "clover", "oracle", "static_mix", "exact")


def _fluid(spec: Spec) -> Spec:
    return replace(spec, fidelity="fluid", label=f"{spec.label}, fluid")


def fluid_reference(study: Study, family: str, load: float = LOAD, **changes: Any) -> Reference:
    """BASE in the fluid model: SLO and C_base of what is compared in it."""
    spec = replace(_fluid(reference_spec(family, study.options.seeds[0], load)), **changes)
    return reference_of(study.play([spec])[0])


def ablation(study: Study, family: str, floor: float) -> dict[str, Any]:
    """Each lever alone, all but each, and all of them, at one accuracy floor: what `exact` makes of it."""
    reference = fluid_reference(study, family)
    best = load_family(REPOSITORY / family)[0].best.name
    locked: dict[str, Any] = {
        "sleep": {"awake_min": GPUS},
        "MIG": {"shapes": (LARGEST,)},
        "variants": {"variants": (best,)},
        "clocks": {"constants": (("clocks", 0.0),)},
    }
    free: dict[str, Any] = {"clocks": {"constants": (("clocks", 1.0),)}}

    def spec(label: str, levers: set[str]) -> Spec:
        changes: dict[str, Any] = {}
        for lever, lock in locked.items():
            changes |= free.get(lever, {}) if lever in levers else lock
        return _fluid(
            spec_of(reference, label, "exact", study.options.side_hours, trace_of(MAIN_TRACE), mode="budget",
                    min_accuracy=round(floor, 6), **changes)
        )  # fmt: skip

    every = set(locked)
    wanted = {"none (BASE)": set[str]()} | {lever: {lever} for lever in locked}
    wanted |= {f"all but {lever}": every - {lever} for lever in locked} | {"all": every}
    specs = {label: spec(label, levers) for label, levers in wanted.items()}
    study.play(list(specs.values()))
    base = study.runs[specs["none (BASE)"]]["grams_per_request"]
    return {
        label: {
            "grams_per_request": study.runs[s]["grams_per_request"],
            "saving_pct": saving_pct(study.runs[s]["grams_per_request"], base),
            "accuracy": study.runs[s]["accuracy"],
            "slo_attainment": study.runs[s]["slo_attainment"],
        }
        for label, s in specs.items()
    }


def loads(study: Study, family: str, floor: float) -> dict[str, Any]:
    """The same comparison from a nearly idle to a nearly full fleet."""
    found: dict[str, Any] = {}
    fixed = fluid_reference(study, family)
    for load in LOADS:
        own = fluid_reference(study, family, load)
        reference = replace(own, slo_ms=fixed.slo_ms)  # the SLO is fixed once, at 0.6
        specs = {
            "base": spec_of(reference, "base", "base", study.options.side_hours, trace_of(MAIN_TRACE)),
            "clover": spec_of(reference, "clover", "clover", study.options.side_hours, trace_of(MAIN_TRACE)),
            "static_mix": spec_of(reference, "static_mix", "static_mix", study.options.side_hours,
                                  trace_of(MAIN_TRACE), mode="budget", min_accuracy=round(floor, 6)),
            "exact": spec_of(reference, "exact", "exact", study.options.side_hours, trace_of(MAIN_TRACE),
                             mode="budget", min_accuracy=round(floor, 6)),
        }  # fmt: skip
        specs = {name: _fluid(replace(s, label=f"{name} at {load:g}")) for name, s in specs.items()}
        study.play(list(specs.values()))
        base = study.runs[specs["base"]]["grams_per_request"]
        found[f"{load:g}"] = {name: _short(study.runs[s], base) for name, s in specs.items()}
    return found


def _short(run: Played, base_g: float) -> dict[str, float]:
    return {
        "grams_per_request": run["grams_per_request"],
        "saving_pct": saving_pct(run["grams_per_request"], base_g),
        "accuracy": run["accuracy"],
        "slo_attainment": run["slo_attainment"],
    }


def turned(study: Study, family: str, floor: float) -> dict[str, Any]:
    """The ranking by grams under +-30 % on each assumption; CLOVER's accuracy is its own, the floor is everybody's."""
    found: dict[str, Any] = {}
    orders: dict[str, list[str]] = {}
    for name, factors in TURNS.items():
        changes: dict[str, Any] = dict(factors)
        reference = fluid_reference(study, family, **changes)
        specs = {}
        for policy in RANKED:
            held = {"mode": "budget", "min_accuracy": round(floor, 6)} if policy in ("static_mix", "exact") else {}
            truth = {"knows_truth": True} if policy == "oracle" else {}
            spec = spec_of(reference, policy, policy, study.options.side_hours, trace_of(MAIN_TRACE), **held, **truth)
            specs[policy] = _fluid(replace(spec, label=f"{policy}, {name}", **changes))
        study.play(list(specs.values()))
        grams = {policy: study.runs[s]["grams_per_request"] for policy, s in specs.items()}
        orders[name] = sorted(grams, key=lambda policy: grams[policy])
        found[name] = {
            "order": orders[name],
            **{policy: _short(study.runs[s], grams["base"]) for policy, s in specs.items()},
        }
    usual = orders["nothing turned"]
    pairs = [(a, b) for i, a in enumerate(usual) for b in usual[i + 1 :]]
    flips = {
        name: [f"{b} before {a}" for a, b in pairs if order.index(b) < order.index(a)]
        for name, order in orders.items()
        if name != "nothing turned"
    }
    return {"runs": found, "order": usual, "flips": flips, "flipped": sum(1 for f in flips.values() if f)}


def weights(study: Study, family: str) -> dict[str, Any]:
    """Fig. 14 at 100 g/kWh: (a) lambda from 0.1 to 0.9, (b) a threshold on the accuracy that may be lost."""
    reference = fluid_reference(study, family)
    where: dict[str, Any] = {"constant_g_per_kwh": FIG14_G}
    base = _fluid(spec_of(reference, "base at 100 g", "base", SHORT_H, "", **where))
    by_lambda = {
        f"{weight:g}": _fluid(spec_of(reference, f"clover, lambda {weight:g}", "clover", SHORT_H, "",
                                      **where | {"lambda_weight": weight}))
        for weight in LAMBDAS
    }  # fmt: skip
    by_loss = {
        f"{loss:g}": _fluid(spec_of(reference, f"clover, loss <= {loss:g} %", "clover", SHORT_H, "",
                                    **where | {"lambda_weight": 0.9, "constants": (("accuracy_loss_max", loss),)}))
        for loss in LOSSES_PCT
    }  # fmt: skip
    study.play([base, *by_lambda.values(), *by_loss.values()])
    zero = study.runs[base]

    def last(spec: Spec) -> dict[str, float]:
        """Of the last hour: what the search ended in."""
        found = curve(study.runs[spec], reference)
        tail = [i for i, at in enumerate(found.at_s) if at >= (SHORT_H - 1) * 3600]
        series = study.runs[spec].series
        g = sum(series["grams"][i] for i in tail) / len(tail)
        z = sum(zero.series["grams"][i] for i in tail) / len(tail)
        return {
            "saving_pct": saving_pct(g, z),
            "accuracy_loss_pct": -sum(found.accuracy[i] for i in tail) / len(tail),
            "evaluations": study.runs[spec]["evaluations"],
        }

    return {
        "lambda": {name: last(s) for name, s in by_lambda.items()},
        "threshold_pct": {name: last(s) for name, s in by_loss.items()},
    }


def fleets(study: Study, family: str) -> dict[str, Any]:
    """Fig. 15: the load of ten GPUs on ten, four and two; p95 over that of BASE on ten."""
    reference = study.reference(family, study.options.seeds[0])
    specs = {
        (policy, n): replace(
            spec_of(reference, f"{policy} on {n} GPUs", policy, SHORT_H, "", constant_g_per_kwh=FIG14_G * 2), gpus=n
        )
        for n in FLEETS
        for policy in ("base", "clover", "exact")
    }
    study.play(list(specs.values()))
    return {
        str(n): {
            policy: {
                "p95_over_slo": study.runs[specs[policy, n]]["p95_ms"] / reference.slo_ms,
                "slo_attainment": study.runs[specs[policy, n]]["slo_attainment"],
                "rejected": study.runs[specs[policy, n]]["rejected"],
                "accuracy": study.runs[specs[policy, n]]["accuracy"],
            }
            for policy in ("base", "clover", "exact")
        }
        for n in FLEETS
    }


def bases(study: Study, family: str) -> dict[str, Any]:
    """What BASE may mean on an A100: one 7g slice, section 5.2.1's 4g + 3g, or MIG off. The load is 0.6 of ten 7g's.

    Without noise: that of two operating points is drawn apart and is as large as what lies between them.
    """
    reference = study.reference(family, study.options.seeds[0])
    specs = {
        name: replace(
            spec_of(reference, f"BASE {name}", "base", BASES_H, "", constant_g_per_kwh=CONSTANT_G),
            noise=0.0, device_noise=0.0, **changes,
        )
        for name, changes in BASES.items()
    }  # fmt: skip
    study.play(list(specs.values()))
    seven = study.runs[specs["7g"]]["joules_per_request"]
    return {
        name: {
            "joules_per_request": (run := study.runs[spec])["joules_per_request"],
            "joules_over_7g_pct": 100 * (run["joules_per_request"] / seven - 1),
            "p50_ms": run["p50_ms"],
            "p95_ms": run["p95_ms"],
            "accuracy": run["accuracy"],
        }
        for name, spec in specs.items()
    }


def mixes(family: str) -> list[dict[str, Any]]:
    """Fig. 2: every mix of variants on four unpartitioned GPUs, grams and accuracy over those of the best variant."""
    rate = LOAD * capacity_per_s(family, 4)
    found, catalog = load_family(REPOSITORY / family), _catalog(family)
    names = [v.name for v in found[0].by_accuracy()]
    rows: list[dict[str, Any]] = []
    for mix in combinations_with_replacement(names, 4):
        joules, accuracy, p95 = _served(catalog, family, [(n, LARGEST, mix.count(n)) for n in dict.fromkeys(mix)],
                                        rate, 4)  # fmt: skip
        rows.append({"mix": " + ".join(mix), "joules": joules, "accuracy": accuracy, "p95_ms": p95})
    best = rows[-1]
    for row in rows:
        row["carbon_saving_pct"] = 100 * (1 - row["joules"] / best["joules"])
        row["relative_accuracy"] = row["accuracy"] / best["accuracy"]
    return rows


def partitions(family: str) -> list[dict[str, Any]]:
    """Fig. 3: one variant on C1 = 7g, C2 = 4g + 2g + 1g, C3 = 7 x 1g, at one load."""
    catalog = _catalog(family)
    variant = catalog.family(family).by_accuracy()[0].name
    kind = device_type(DEVICE)
    rates = {}
    for shape in ("7g.40gb", "1g.5gb"):
        row = _row(catalog, family, variant, shape)
        rates[shape] = 1000.0 / service_time(row).mean_ms * (7 if shape == "1g.5gb" else 1)
    rate = LOAD * min(rates.values())
    layouts = {
        "C1 7g": [("7g.40gb", 1)],
        "C2 4g+2g+1g": [("4g.20gb", 1), ("2g.10gb", 1), ("1g.5gb", 1)],
        "C3 7x1g": [("1g.5gb", 7)],
    }
    rows: list[dict[str, Any]] = []
    for name, layout in layouts.items():
        assert all(slice_type(kind, shape) for shape, _ in layout)
        joules, _, p95 = _served(catalog, family, [(variant, shape, n) for shape, n in layout], rate, 1)
        rows.append({"layout": name, "variant": variant, "joules": joules, "p95_ms": p95})
    for row in rows:
        row["carbon_saving_pct"] = 100 * (1 - row["joules"] / rows[0]["joules"])
        row["p95_over_c1"] = row["p95_ms"] / rows[0]["p95_ms"]
    return rows


def _catalog(family: str) -> Catalog:
    found, rows = load_family(REPOSITORY / family)
    return Catalog((found,), tuple(r for r in rows if r.device_type == DEVICE))


def _row(catalog: Catalog, family: str, variant: str, shape: str) -> Any:
    kind, found = device_type(DEVICE), catalog.family(family)
    row = effective_row(catalog, kind, slice_type(kind, shape), found, found.variant(variant), ITEMS[family])
    assert row is not None, f"{variant} on {shape} has no profile"
    return row


def _served(
    catalog: Catalog, family: str, classes: list[tuple[str, str, int]], rate: float, gpus: int
) -> tuple[float, float, float]:
    """Joules per request with idle power, accuracy, p95 [ms] of one FIFO before these slices."""
    rows = [_row(catalog, family, variant, shape) for variant, shape, _ in classes]
    rng = np.random.default_rng(0)
    servers = [ServerClass(n, service_time(row)) for row, (_, _, n) in zip(rows, classes, strict=True)]
    served = serve_shared(servers, arrivals_s(rate, 1.0, KERNEL_REQUESTS, rng), rng)
    shares = np.bincount(served.chosen, minlength=len(classes)) / served.chosen.size
    accuracies = [catalog.family(family).variant(variant).accuracy for variant, _, _ in classes]
    active = sum(float(s) * row.energy_active_j_per_batch for s, row in zip(shares, rows, strict=True))
    accuracy = sum(float(s) * a for s, a in zip(shares, accuracies, strict=True))
    return device_type(DEVICE).idle_w * gpus / rate + active, accuracy, served.quantile_ms(0.95)
