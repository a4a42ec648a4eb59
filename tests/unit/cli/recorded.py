"""A small recorded demo: three runs of 24 s, as the run monitor writes them."""

import math

from trefoil.cli.demo.results import DemoFamilySummary, DemoSeries, DemoSummary, PlanEvent, Report
from trefoil.comparison.comparison import Case, Comparison, Row, Run

SECONDS = 24
NAMES = ("base", "static_mix", "exact")
DEVICES = ("node0/gpu0", "node0/gpu1")


def summary(grams: float | None = 0.0021, joules: float | None = 11.0, accuracy: float = 0.97) -> DemoSummary:
    return DemoSummary(
        requests=900,
        answered=900,
        failed=0,
        slo={"percentile": 95.0, "latency_ms": 66.0},
        latency_ms_p50=28.1,
        latency_ms_p95=49.0,
        latency_ms_p99=61.5,
        slo_attainment=0.991,
        accuracy=accuracy,
        accuracy_profile=accuracy - 0.0005,
        joules_per_request=joules,
        grams_per_request=grams,
        idle_share=None if joules is None else 0.4,
        replans={"carbon": 3, "load": 2, "slo": 0, "objective": 0},
        reconfigurations={"carbon": 1, "load": 2, "slo": 0, "objective": 0},
        families={"digits": family_summary(accuracy)},
    )


def family_summary(accuracy: float = 0.97) -> DemoFamilySummary:
    return DemoFamilySummary(900, 900, 0, "d1e5", 66.0, 49.0, 0.991, accuracy, accuracy - 0.0005, 0.955)


def series(name: str, metered: bool = True) -> DemoSeries:
    times = [float(t) for t in range(SECONDS)]
    watts = {"base": 120.0, "static_mix": 80.0, "exact": 60.0}[name]
    best = 26 if name == "base" else 18
    events = [
        PlanEvent(
            7.2, 2.4, "carbon", "intensity 320 -> 180 g/kWh (-44 % > 5 %)", "gpu0: 7g digits-l; gpu1 asleep", 62, True
        )
    ]
    return DemoSeries(
        policy=name,
        t_s=times,
        intensity_g_per_kwh=[250 + 120 * math.sin(t / 4) for t in times],
        offered_per_s=[26.0 + (t > 10) * 26 for t in times],
        answered_per_s=[26.0 for _ in times],
        latency_ms_p95={"digits": [None if t == 3 else 40 + 8 * math.cos(t) for t in times]},
        power_w={device: [watts if metered else None for _ in times] for device in DEVICES},
        device_state={device: ["AWAKE"] * SECONDS for device in DEVICES},
        clock_mhz={device: [1410] * SECONDS for device in DEVICES},
        slices={device: ["7g digits-l"] * SECONDS for device in DEVICES},
        answered_by_variant={
            "digits-s": [0] * SECONDS,
            "digits-m": [26 - best] * SECONDS,
            "digits-l": [best] * SECONDS,
        },
        grams=[watts * t * 250 / 3.6e6 if metered else None for t in times],
        events=events if name == "exact" else [],
    )


def report(metered: bool = True) -> Report:
    grams = {"base": 0.0035, "static_mix": 0.0024, "exact": 0.0022}
    return Report(
        simulated=True,
        triton_version="2.51.0",
        gpus=("A100-SXM4-40GB", "A100-SXM4-40GB"),
        duration_s=float(SECONDS),
        carbon_speedup=2057.1,
        seed=7,
        commit="0123abc",
        pad_overrun_ratio=0.001,
        accuracy_floor=0.955,
        command="trefoil demo",
        machine="2 cores, 8 GiB",
        started_at="2026-11-21T08:00:00+00:00",
        runs={
            name: summary(
                grams[name] if metered else None, 10.0 if metered else None, 0.97 if name == "base" else 0.956
            )
            for name in NAMES
        },
        spread=spread(),
    )


def spread(**wrong: float) -> Comparison:
    """Three seeds: a saving, less of one, and a run below the floor of 0.955. `wrong`: of every one of ours."""
    ours = ((0.0022, 0.956), (0.0023, 0.957), (0.0020, 0.951))
    of = {
        "base": [_run("base", n, 0.0035, 0.97) for n in range(3)],
        "static_mix": [_run("static_mix", n, 0.0024, 0.956) for n in range(3)],
        "exact": [_run("exact", n, grams, **{"accuracy": each, **wrong}) for n, (grams, each) in enumerate(ours)],
    }
    rows = tuple(Row(name, tuple(runs)) for name, runs in of.items())
    return Comparison("demo", float(SECONDS), NAMES, (7, 8, 9), (Case({}, rows, 0.02),))


def _run(name: str, n: int, grams: float, accuracy: float, slo_attainment: float = 0.98) -> Run:
    numbers = {
        "grams_per_request": grams, "joules_per_request": 8.0, "p95_ms": 50.0, "slo_attainment": slo_attainment,
        "accuracy": accuracy, "slo_missed": slo_attainment < 0.95, "floor_missed": accuracy < 0.9545, "arrived": 900,
        "answered": 900,
    }  # fmt: skip
    family = {**numbers, "slo_ms": 66.0, "slo_quantile": 0.95, "floor": 0.955}
    return Run(name, 7 + n, f"load{n}", {**numbers, "seed": 7 + n, "families": {"digits": family}})
