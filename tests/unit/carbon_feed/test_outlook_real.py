"""On a real grid, hour by hour through the zone's forecasts: what it issues is worth what the backtest says."""

import os
from pathlib import Path

import numpy as np
import pytest

from carbon_feed.core.history import History
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.backtest import backtest, trace_means
from carbon_feed.providers.trace import load_trace
from carbon_feed.reading.forecasts import ZoneForecasts
from carbon_feed.reading.zone_metrics import ZoneMetrics
from carbon_feed.settings import CarbonFeedSettings
from tests.unit.carbon_feed.test_outlook import Played
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.units import HOUR_S
from trefoil.runtime.telemetry import Metrics

DATA = Path(os.environ.get("TREFOIL_DATA", Path(__file__).resolve().parents[3] / ".." / "shared" / "data")) / "carbon"
SERIES = Series("US-CAL-CISO", Method.AVERAGE, Factors.LIFECYCLE)
T0_S = 1_641_000_000.0 // 86_400.0 * 86_400.0
LEARN, PLAYED, H = 70 * 24, 4 * 24, 96


async def test_what_is_issued_live_is_worth_what_the_backtest_says(tmp_path):
    path = DATA / "em_US-CAL-CISO_2022_hourly.csv"
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA}: set TREFOIL_DATA to the evaluation data")
    values = trace_means(load_trace(path))[: LEARN + PLAYED + H]
    settings = CarbonFeedSettings(state_dir=tmp_path, zone=SERIES.zone, provider="trace")
    history, now = History(SERIES), [CarbonReading()]
    outlook = ZoneForecasts(
        settings, Played(1.0), history, lambda: now[0], ZoneMetrics(Metrics("carbon_feed"), settings)
    )
    for hour, value in enumerate(values):
        start_s = T0_S + hour * HOUR_S
        now[0] = CarbonReading(SERIES, start_s, start_s + HOUR_S, float(value), Quality.MEASURED, observed_at_s=start_s)
        if LEARN <= hour < LEARN + PLAYED:
            await outlook.refresh(start_s + 60.0)  # of the hour that holds now nothing is known yet
        history.add(now[0])
    errors, inside = [], []
    for model in MODELS:
        rows = [row for row in outlook.archive.rows(history) if row["model"] == model]
        assert len(rows) == PLAYED * H
        day = [row for row in rows if row["starts_at_s"] < row["issued_at_s"] + 23.5 * HOUR_S]
        errors.append(np.mean([abs(row["p50_g_per_kwh"] - row["actual_g_per_kwh"]) for row in day]))
        inside.append(np.mean([row["p10_g_per_kwh"] <= row["actual_g_per_kwh"] <= row["p90_g_per_kwh"] for row in day]))
        played = backtest(MODELS[model], values[: LEARN + PLAYED + 23], first=LEARN - 1)
        whole = played.day(1)
        print(f"{model}: day ahead {errors[-1]:.2f} g/kWh live, {whole.mae_g_per_kwh:.2f} in the backtest, ", end="")
        print(f"{100 * inside[-1]:.1f} and {100 * whole.coverage_ratio:.1f} % inside the band")
        assert errors[-1] == pytest.approx(whole.mae_g_per_kwh, rel=0.05)
