"""CARBONDIS's tables as data, what is modelled of them, and the carbon ratio of Algorithm 1 (lines 1 to 3) by hand."""

from dataclasses import replace

import numpy as np
import pytest

from carbon_feed.core.history import History
from carbon_feed.history.core.ratio import ratio
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.units import HOUR_S
from trefoil.reproduce.carbondis.experiment import (
    A100,
    MODELS,
    P4,
    SET_1,
    SET_2,
    SETS,
    T4,
    TABLE_II,
    TABLE_III,
    JobsSpec,
    batch,
    catalog_of,
)
from trefoil.reproduce.carbondis.study import intensities

PRINTED = """
1  18  81.64  12  73.78  13.89   68.17
2  21  84.32  16  76.34  13.67   73.63
3  26  85.09  19  80.88  13.70   83.03
4  29  86.70  22  82.59  13.81   90.11
5  32  88.06  26  83.64  14.22   88.68
6  37  88.66  30  84.66  14.35  111.14
"""  # Table III: batch; ms and W on P4, T4, A100
JOBS = """
480 30 20 290   360 55 30 120
750 50 10 1000  210 25 10 20
650 35 15 800   480 45 15 150
590 65 10 500   540 60 20 300
270 70 25 250   720 40 15 450
"""  # Table V: inter-arrival ms, batch mean, its standard deviation, SLA ms of Set 1 and of Set 2
SERIES = Series("zone", Method.AVERAGE, Factors.LIFECYCLE)


def numbers(text):
    return [[float(cell) for cell in line.split()] for line in text.strip().splitlines()]


def test_table_ii_is_what_device_types_idle_at():
    assert TABLE_II == {P4: 25, T4: 30, A100: 55}
    assert {kind: kind.idle_w for kind in TABLE_II} == TABLE_II
    assert [kind.tier for kind in (P4, T4, A100)] == ["low", "low", "high"]


def test_table_v():
    for row, *jobs in zip(numbers(JOBS), SET_1, SET_2, strict=True):
        assert [value for job in jobs for value in job[1:]] == row
    assert (SETS["Set 1"].low, SETS["Set 2"].low) == (P4, T4)
    assert {job.model for job in (*SET_1, *SET_2)} == MODELS.keys(), "ten models"


@pytest.mark.parametrize("column", range(3))
def test_table_iii_is_in_the_profile_as_printed_and_power_is_above_idle(column):
    device = (P4, T4, A100)[column]
    for items, *values in numbers(PRINTED):
        ms, watts = values[2 * column : 2 * column + 2]
        assert TABLE_III[device][int(items) - 1] == (ms, watts)
        found_ms, joules = batch(device, "inception-v3", int(items), {})
        assert found_ms == pytest.approx(ms)
        assert joules / found_ms * 1e3 + TABLE_II[device] == pytest.approx(watts)


@pytest.mark.parametrize("device", [P4, T4, A100])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_modelled_grows_with_the_batch_and_stays_below_what_the_board_may_draw(device, model):
    ms, joules = np.array([batch(device, model, items, {}) for items in range(6, 129)]).T
    assert np.all(np.diff(ms) > 0)
    assert np.all(np.diff(joules) > 0)
    assert ms[0] > 0
    watts = joules[-1] / ms[-1] * 1e3 + TABLE_II[device]
    assert watts < max(device.max_w, *(w for _, w in TABLE_III[device])) * 1.1


def test_nvidias_own_resnet_50_on_an_a100_is_met_within_a_tenth():
    """Flat up to a batch of six, then a straight line: TensorFlow at TF32, README of NVIDIA's DeepLearningExamples."""
    printed = {16: 11.82, 32: 19.99, 64: 35.82, 128: 68.23}
    for items, ms in printed.items():
        found, _ = batch(A100, "resnet-v2-50", items, {})
        assert found == pytest.approx(ms, rel=0.1, abs=3.5), "batch 1 takes 5.26 ms there, and more by Table III"


def test_an_a100_takes_fewer_joules_for_every_batch():
    for name in ("Set 1", "Set 2"):
        rows = catalog_of(JobsSpec(name, "carbondis", 1, 1.0)).rows
        by = {(row.device_type == A100.name, row.family, row.batch): row.energy_active_j_per_batch for row in rows}
        assert all(joules < by[False, model, items] for (high, model, items), joules in by.items() if high)
        assert len(rows) == 2 * 5 * 128


@pytest.mark.parametrize(("history", "before_h"), [("2022-01", 173), ("2021-10", 173 + 2030)])
def test_the_average_of_carbon_starts_with_the_papers_traces_or_with_the_series_at_hand(tmp_path, history, before_h):
    """A cheap autumn before 2022 lowers ACI and raises CIR; a ratio is told from the second hour on."""
    began, autumn = np.datetime64("2021-10-08T10:00:00"), 2030
    values = [100.0] * autumn + [200.0] * 400
    times = [str(began + np.timedelta64(hour, "h")).replace("T", " ") for hour in range(len(values))]
    path = tmp_path / "trace.csv"
    path.write_text("datetime,us-west-1\n" + "".join(f"{at},{ci}\n" for at, ci in zip(times, values, strict=True)))
    second = JobsSpec("Set 1", "carbondis", 2, 1.0, trace=str(path), history=history)
    first = intensities(second, 3)[0]
    assert first["aci"] == pytest.approx((100 * (before_h - 173) + 200 * 173) / before_h)
    assert first["cir"] == pytest.approx(200 / first["aci"])
    one = intensities(replace(second, seed=1), 3)
    assert np.isnan(one[0]["cir"]) == (history == "2022-01")
    assert one[1]["cir"] == pytest.approx(1.0 if history == "2022-01" else 200 * 2031 / (100 * 2030 + 200))


def test_the_carbon_ratio_by_hand():
    """ACI is the mean of what came before, CIR = CCI / ACI, and only then is CCI part of the history."""
    history, found, printed = History(SERIES), [], []
    values = [100.0] * 12 + [300.0] * 12 + [500.0, 104.0]
    for hour, value in enumerate(values):
        starts_s = hour * HOUR_S
        now = CarbonReading(SERIES, starts_s, starts_s + HOUR_S, value, Quality.MEASURED, "", fetched_at_s=starts_s)
        found.append(ratio(history, now))
        printed.append(ratio(history, now, known_h=0.0))
        history.add(now)
    assert found[:24] == [None] * 24
    assert (printed[0], printed[1].cir, printed[24:]) == (None, 1.0, found[24:])
    assert (found[24].aci_g_per_kwh, found[24].cir) == (200, 2.5)
    assert found[25].aci_g_per_kwh == pytest.approx((24 * 200 + 500) / 25)
    assert found[25].cir == pytest.approx(104 / 212)
